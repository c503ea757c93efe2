"""Reads on guesses: after demand reads, within the budget, and discarded on failure."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moepack
from moepack.stores.streaming.records import RecordCache
from moepack.stores.streaming.residency import Expert, Residency
from moepack.stores.streaming.source import PAGE


class Drive:
    """A tensor of 32 records, or of experts of one page each, without a file: records reads, which wait while it is
    closed."""

    count = 32

    def __init__(self) -> None:
        self.sizes = [PAGE] * self.count
        self.there: set[int] = set()
        self.broken: set[int] = set()
        self.begun, self.open = 0, threading.Event()
        self.open.set()

    def reads(self, number: int) -> Any:
        yield self, memoryview(bytes(PAGE)), number * PAGE

    def read(self, what: Any, place: int) -> tuple[int, int]:
        """Read an expert's page at a position, or records with a number of threads."""
        units = {place // PAGE} if isinstance(what, memoryview) else {*what.tolist()}
        self.begun += len(units)
        self.open.wait()
        if units & self.broken:
            raise moepack.LoadError("a failing drive")
        self.there |= units
        return 1, PAGE * len(units)

    def drop(self, what: Any) -> None:
        self.there -= {what} if isinstance(what, int) else {*what.tolist()}


class Cache:
    """Both caches have 32 units; 16 of them fit."""

    def __init__(self, kind: str) -> None:
        self.drive = Drive()
        drives: Any = [self.drive]
        self.records = kind == "records"
        self.kept: Any = RecordCache(16, PAGE, drives, 2) if self.records else Residency(16 * PAGE, 2)
        self.experts = [] if self.records else [Expert(drives, number) for number in range(32)]

    def units(self, numbers: Any) -> Any:
        chosen = sorted(numbers)
        return np.array(chosen, np.int64) if self.records else [self.experts[number] for number in chosen]

    def use(self, *numbers: int) -> None:
        self.kept.hold(self.units(numbers))
        assert {*numbers} <= self.drive.there
        self.kept.release(self.units(numbers))


@pytest.fixture(params=["records", "experts"])
def cache(request: pytest.FixtureRequest) -> Cache:
    return Cache(request.param)


def until(happened: Callable[[], bool]) -> None:
    """Wait for other threads, up to a minute: far longer than they take on a busy machine."""
    for _ in range(12_000):
        if happened():
            return
        time.sleep(0.005)
    raise AssertionError("did not happen within a minute")


def idle(cache: Cache) -> bool:
    return not cache.kept._guesses._active


def test_predicted_experts_are_prefetched_and_counted(cache: Cache) -> None:
    cache.use(0, 1)
    cache.kept.guess(cache.units({1, 5, 6, 20}))
    until(lambda: {5, 6, 20} <= cache.drive.there and idle(cache))
    begun = cache.drive.begun
    cache.use(1, 5, 6)
    assert cache.drive.begun == begun
    counts = cache.kept.statistics
    assert (counts.guessed, counts.right, counts.wanted) == (4, 3, 3)
    assert (counts.bytes_guessed, counts.in_vain, counts.bytes_read) == (3 * PAGE, PAGE, 5 * PAGE)
    assert counts.misses == 2 and counts.hidden > 0


def test_demand_comes_first_and_ends_a_guess(cache: Cache) -> None:
    cache.drive.open.clear()
    with ThreadPoolExecutor(1) as pool:
        demand = pool.submit(cache.use, 0)
        until(lambda: cache.drive.begun == 1)
        cache.kept.guess(cache.units({8, 12, 16}))
        time.sleep(0.05)
        assert cache.drive.begun == 1
        cache.drive.open.set()
        demand.result()
    until(lambda: {8, 12, 16} <= cache.drive.there)
    until(lambda: idle(cache))
    cache.drive.open.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.use, 1)
        until(lambda: cache.drive.begun == 5)
        cache.kept.guess(cache.units({24, 28}))
        second = pool.submit(cache.use, 3)
        until(lambda: cache.drive.begun == 6)
        cache.drive.open.set()
        first.result(), second.result()
    assert not cache.drive.there & {24, 28}


def test_guesses_that_are_mostly_wrong_are_compared_and_not_read_until_they_are_right(cache: Cache) -> None:
    for _ in range(32):
        cache.kept.guess(cache.units({20, 24}))
        cache.use(0)
    until(lambda: idle(cache))
    begun = cache.drive.begun
    cache.kept.guess(cache.units({8, 12}))
    cache.use(0)
    assert cache.drive.begun == begun and not cache.drive.there & {8, 12}
    for _ in range(32):
        cache.kept.guess(cache.units({0}))
        cache.use(0)
    cache.kept.guess(cache.units({8, 12}))
    until(lambda: {8, 12} <= cache.drive.there and idle(cache))
    assert cache.kept.statistics.guessed == 2 * 33 + 32


def test_a_read_that_fails_on_a_guess_is_forgotten(cache: Cache) -> None:
    cache.drive.broken = {5}
    cache.kept.guess(cache.units({5, 20}))
    until(lambda: 20 in cache.drive.there and idle(cache))
    assert cache.kept.statistics.resident == PAGE
    cache.use(20)
    cache.drive.broken = set()
    cache.use(5)


def test_held_entries_stay_for_any_predictions(cache: Cache) -> None:
    held = cache.units(range(14))
    cache.kept.hold(held)
    cache.kept.guess(cache.units(range(14, 30)))
    until(lambda: idle(cache) and len(cache.drive.there) >= 15)
    assert {*range(14)} <= cache.drive.there and len(cache.drive.there) <= 16
    cache.kept.release(held)
    cache.use(*range(16, 32))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["records", "experts"]),
    st.lists(st.tuples(st.sets(st.integers(0, 31), max_size=9), st.sets(st.integers(0, 31), max_size=12)), max_size=20),
)
def test_the_budget_is_kept_for_any_predictions(kind: str, calls: list[tuple[set[int], set[int]]]) -> None:
    cache = Cache(kind)
    for wanted, guessed in calls:
        cache.use(*wanted)
        cache.kept.guess(cache.units(guessed))
        assert len(cache.drive.there) <= 16
    until(lambda: idle(cache) and len(cache.drive.there) * PAGE == cache.kept.statistics.resident)
    counts = cache.kept.statistics
    assert counts.most <= 16 * PAGE and 0 <= counts.bytes_used <= counts.bytes_guessed

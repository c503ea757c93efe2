"""Reads on a guess: after those that somebody waits for, within the budget, forgotten where they fail."""

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
from moepack.runtime.streaming import blocks
from moepack.runtime.streaming.blocks import BLOCK, Blocks
from moepack.runtime.streaming.residency import Expert, Residency
from moepack.runtime.streaming.source import PAGE


class Drive:
    """A tensor of blocks, or experts of a page each, without a file: notes reads, which wait while it is closed."""

    def __init__(self, count: int, kind: str) -> None:
        self.sizes, self.unit = ([BLOCK * count], BLOCK) if kind == "blocks" else ([PAGE] * count, PAGE)
        self.there: set[int] = set()
        self.broken: set[int] = set()
        self.begun, self.open = 0, threading.Event()
        self.open.set()

    def piece(self, _: int, start: int, stop: int) -> Any:
        return self, memoryview(bytes(stop - start)), start

    def reads(self, number: int) -> Any:
        yield self, memoryview(bytes(PAGE)), number * PAGE

    def read_parts(self, parts: list[memoryview], place: int) -> None:
        for part in parts:
            if part.obj is not blocks._FORGOTTEN.obj:
                self.read(part, place)
            place += len(part)

    def read(self, memory: memoryview, place: int) -> None:
        self.begun += 1
        self.open.wait()
        units = {*range(place // self.unit, (place + len(memory)) // self.unit)}
        if units & self.broken:
            raise moepack.LoadError("a failing drive")
        self.there |= units

    def drop(self, number: int, start: int = 0, stop: int | None = None) -> None:
        self.there -= {number} if stop is None else {*range(start // BLOCK, stop // BLOCK)}


class Cache:
    """Both caches alike: 32 units, of which 16 fit."""

    def __init__(self, kind: str) -> None:
        self.drive = Drive(32, kind)
        drives: Any = [self.drive]
        self.kept: Any = Blocks(16 * BLOCK, drives, 2) if kind == "blocks" else Residency(16 * PAGE, 2)
        self.blocks = kind == "blocks"
        self.experts = [] if self.blocks else [Expert(drives, number) for number in range(32)]

    def units(self, numbers: Any) -> Any:
        chosen = sorted(numbers)
        return np.array(chosen, np.int64) if self.blocks else [self.experts[number] for number in chosen]

    def use(self, *numbers: int) -> None:
        self.kept.hold(self.units(numbers))
        assert {*numbers} <= self.drive.there
        self.kept.release(self.units(numbers))


@pytest.fixture(params=["blocks", "experts"])
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setattr(blocks, "GAP", 0)
    return Cache(request.param)


def until(happened: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    for _ in range(1000):
        if happened():
            return
        time.sleep(0.005)
    raise AssertionError("did not happen within five seconds")


def idle(cache: Cache) -> bool:
    return not cache.kept._guesses._active


def test_what_is_guessed_is_read_ahead_and_counted(cache: Cache) -> None:
    cache.use(0, 1)
    cache.kept.guess(cache.units({1, 5, 6, 20}))
    until(lambda: {5, 6, 20} <= cache.drive.there and idle(cache))
    begun = cache.drive.begun
    cache.use(1, 5, 6)
    assert cache.drive.begun == begun
    counts, unit = cache.kept.statistics, cache.drive.unit
    assert (counts.guessed, counts.right, counts.wanted) == (4, 3, 3)
    assert (counts.bytes_guessed, counts.in_vain, counts.bytes_read) == (3 * unit, unit, 5 * unit)
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
    cache.kept.guess(cache.units({5, 9}))
    until(lambda: 9 in cache.drive.there and idle(cache))
    assert cache.kept.statistics.resident == cache.drive.unit
    cache.use(9)
    cache.drive.broken = set()
    cache.use(5)


def test_what_is_held_stays_whatever_is_guessed(cache: Cache) -> None:
    held = cache.units(range(14))
    cache.kept.hold(held)
    cache.kept.guess(cache.units(range(14, 30)))
    until(lambda: idle(cache) and len(cache.drive.there) >= 15)
    assert {*range(14)} <= cache.drive.there and len(cache.drive.there) <= 16
    cache.kept.release(held)
    cache.use(*range(16, 32))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["blocks", "experts"]),
    st.lists(st.tuples(st.sets(st.integers(0, 31), max_size=9), st.sets(st.integers(0, 31), max_size=12)), max_size=20),
)
def test_the_budget_is_kept_whatever_is_guessed(kind: str, calls: list[tuple[set[int], set[int]]]) -> None:
    cache = Cache(kind)
    for wanted, guessed in calls:
        cache.use(*wanted)
        cache.kept.guess(cache.units(guessed))
        assert len(cache.drive.there) <= 16
    until(lambda: idle(cache))
    counts = cache.kept.statistics
    assert counts.most <= 16 * cache.drive.unit and 0 <= counts.bytes_used <= counts.bytes_guessed
    assert len(cache.drive.there) * cache.drive.unit == counts.resident

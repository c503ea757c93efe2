"""Channels that stay on disk: the right blocks of records, within the budget, whatever tokens ask for."""

import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import moepack
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.methods.floe import Floe
from moepack.methods.floe.thresholds import Decision
from moepack.progress import Progress
from moepack.runtime.experts import SparseExperts
from moepack.runtime.streaming import ChannelStore, StreamingStore, statistics_of
from moepack.runtime.streaming.blocks import _FORGOTTEN, BLOCK, GAP, Blocks
from moepack.runtime.streaming.channels import LEAST_BLOCKS, Records
from moepack.runtime.streaming.source import Source
from runtime_support import inputs, logits, write_packed


class Drive:
    """A tensor of some blocks without a file, which notes what is read and what is there."""

    def __init__(self, blocks: int) -> None:
        self.sizes = [BLOCK * blocks]
        self.there: set[int] = set()
        self.broken: set[int] = set()
        self.count, self.lock = 0, threading.Lock()

    def piece(self, _: int, start: int, stop: int) -> Any:
        return self, memoryview(bytes(stop - start)), start

    def read_parts(self, parts: list[memoryview], place: int) -> None:
        for part in parts:
            blocks = {*range(place // BLOCK, (place := place + len(part)) // BLOCK)}
            if blocks & self.broken:
                raise moepack.LoadError(f"block {min(blocks & self.broken)}")
            with self.lock:
                self.count += len(blocks)
                if part.obj is not _FORGOTTEN.obj:
                    assert not blocks & self.there
                    self.there |= blocks

    def drop(self, _: int, start: int, stop: int) -> None:
        self.there -= {*range(start // BLOCK, stop // BLOCK)}


def numbers(blocks: Any) -> Any:
    return np.array(sorted(blocks), np.int64)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 39), max_size=9), max_size=40))
def test_what_is_held_is_there_and_the_budget_is_kept(calls: list[set[int]]) -> None:
    drives = Drive(15), Drive(25)
    kept = Blocks(9 * BLOCK + 5, drives, 3)  # type: ignore[arg-type]
    for call in calls:
        kept.hold(numbers(call))
        there = drives[0].there | {15 + block for block in drives[1].there}
        assert call <= there and len(there) <= 9
        kept.release(numbers(call))
    counts = kept.statistics
    assert counts.misses <= drives[0].count + drives[1].count and counts.most <= 9 * BLOCK
    assert counts.hits + counts.misses == sum(map(len, calls))
    assert counts.bytes_read == (drives[0].count + drives[1].count) * BLOCK and counts.reads <= counts.misses


def test_what_lies_between_missing_blocks_is_read_with_them_and_forgotten() -> None:
    drives, gap = (Drive(20), Drive(600)), GAP // BLOCK
    kept = Blocks(500 * BLOCK, drives, 2)  # type: ignore[arg-type]
    kept.hold(numbers({1, 3}))
    kept.hold(numbers({0, 4, 5, 6 + gap, 8 + 2 * gap, 20}))
    assert drives[0].there == {0, 1, 3, 4, 5, 6 + gap} and drives[1].there == {8 + 2 * gap - 20, 0}
    assert kept.statistics.reads == 3 and kept.statistics.bytes_read == (3 + 7 + gap + 9 + 2 * gap - 20) * BLOCK
    kept.hold(numbers(range(30, 30 + 300)))
    assert kept.statistics.reads == 5


def test_blocks_that_most_calls_want_stay() -> None:
    drive = Drive(64)
    kept = Blocks(24 * BLOCK, [drive], 2)  # type: ignore[list-item]
    for call in range(40):
        wanted = numbers({*range(16), *(16 + (8 * call + i) % 48 for i in range(8))})
        kept.hold(wanted)
        kept.release(wanted)
    assert kept.statistics.misses == 16 + 40 * 8


def test_threads_read_a_block_once_and_wait_for_room() -> None:
    drive = Drive(40)
    kept = Blocks(16 * BLOCK, [drive], 4)  # type: ignore[list-item]

    def use(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(100):
            chosen = np.sort(random.choice(40, 6, replace=False))
            kept.hold(chosen)
            assert set(chosen.tolist()) <= drive.there and len(drive.there) <= 16
            kept.release(chosen)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))


def test_a_block_that_cannot_be_read_is_not_there_and_may_come_later() -> None:
    drive = Drive(8)
    kept = Blocks(4 * BLOCK, [drive], 2)  # type: ignore[list-item]
    drive.broken = {5}
    with pytest.raises(moepack.LoadError, match="block 5"):
        kept.hold(numbers({0, 5, 7}))
    drive.broken, drive.there = set(), set()
    kept.hold(numbers({0, 5, 6, 7}))
    assert drive.there == {0, 5, 6, 7}
    kept.release(numbers({0, 5, 6, 7}))
    assert kept.statistics.resident == 4 * BLOCK


@given(
    st.integers(64, 8 * BLOCK),
    st.integers(-4096, 0),
    st.sets(st.integers(0, 99), min_size=1),
    st.integers(LEAST_BLOCKS, 240),
)
def test_blocks_and_portions_cover_the_records(nbytes: int, offset: int, chosen: set[int], budget: int) -> None:
    blocks = -(-(offset + 100 * nbytes) // BLOCK)
    own = Records((), None, offset, nbytes, 10, first=7, blocks=blocks)  # type: ignore[arg-type]
    parts = own.portions(numbers(chosen), budget)
    assert [record for part in parts for record in part.tolist()] == sorted(chosen)
    for part in parts:
        wanted = set()
        for record in part.tolist():
            start = offset + record * nbytes
            first, last = (min(max(byte, 0) // BLOCK, blocks - 1) for byte in (start, start + nbytes - 1))
            wanted |= {*range(first, last + 1)}
        assert (own.needed(part) - 7).tolist() == sorted(wanted)
        assert len(wanted) <= (budget if len(parts) == 1 else budget // 2)


class Skipping(Floe):
    """Floe with one threshold for all experts, without a text."""

    threshold = 1.0

    def prepare(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None) -> None:
        shares = (0.7,) * 6
        decision = Decision((self.threshold,) * 6, (), (), shares, shares)
        self._decisions = {layer.name: decision for layer in model.layers if self.arranged(layer)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of six experts of 384 channels, 576 bytes each: 324 blocks a layer."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=256, moe_intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, num_experts=6, num_experts_per_tok=2, initializer_range=0.05,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return write_packed(model, tmp_path_factory.mktemp("packed") / "model", Skipping(""))


def always(directory: Path) -> int:
    """Bytes of what every token needs."""
    model = moepack.load(directory, dtype="float32", mode="exact")
    buffers = [buffer for name, buffer in model.named_buffers() if not name.endswith(".channels")]
    return sum(tensor.nbytes for tensor in (*model.parameters(), *buffers)) + (64 << 10)


def streamed(directory: Path, blocks: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moepack.MoepackWarning)
        return moepack.load(directory, dtype="float32", mode="exact", host_memory=always(directory) + blocks * BLOCK)


def sparse(model: Any) -> Iterator[SparseExperts]:
    return (module for module in model.modules() if isinstance(module, SparseExperts))


@pytest.mark.parametrize("blocks", [LEAST_BLOCKS + 1, 480, 3200])
def test_streamed_channels_compute_what_mapped_ones_do(directory: Path, blocks: int) -> None:
    expected, model = moepack.load(directory, dtype="float32", mode="exact"), streamed(directory, blocks)
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-5, atol=1e-5)
    first, second = next(sparse(model)), next(sparse(expected))
    assert isinstance(first.store, ChannelStore)
    assert 0 < first.computed == second.computed < 0.6 * first.asked
    ids = inputs(model, batch=1, tokens=1)["input_ids"]
    generated = [each.generate(ids, max_new_tokens=8, do_sample=False) for each in (model, expected)]
    assert torch.equal(*generated)
    counts = statistics_of(model)
    assert counts is not None and 0 < counts.most <= (blocks + 16) * BLOCK and counts.bytes_read >= counts.reads * 4096
    assert (counts.misses <= 3 * 325) == (blocks == 3200)


def test_threads_and_what_is_in_memory_change_nothing(directory: Path) -> None:
    model = streamed(directory, 240)
    expected = [logits(model, tokens=3, seed=seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda seed: logits(model, tokens=3, seed=seed), range(8)))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_budgets_are_refused_warned_of_or_serve_whole_experts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChannelStore, "_share", lambda *_: 1.0)
    with pytest.raises(moepack.LoadError, match="are too little"):
        moepack.load(directory, dtype="float32", mode="exact", host_memory=1)
    with pytest.warns(moepack.MoepackWarning, match="left for channels, less than the .* that one token uses"):
        moepack.load(directory, dtype="float32", mode="exact", host_memory=always(directory) + LEAST_BLOCKS * BLOCK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moepack.MoepackWarning)
        model = moepack.load(directory, dtype="float32", mode="exact", host_memory=always(directory) - 16 * BLOCK)
    assert type(next(sparse(model)).store) is StreamingStore


def test_a_failing_drive_is_named_and_the_call_may_be_repeated(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected = streamed(directory, 240), logits(moepack.load(directory, dtype="float32", mode="exact"))
    real = Source.read_parts

    def failing(self: Source, into: Sequence[memoryview], place: int) -> None:
        raise moepack.LoadError("Input/output error", file=self.file)

    monkeypatch.setattr(Source, "read_parts", failing)
    with pytest.raises(moepack.LoadError, match=r"safetensors: Input/output error"):
        logits(model)
    monkeypatch.setattr(Source, "read_parts", real)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)


def test_tokens_that_choose_no_expert_and_channels_that_nobody_wants_read_nothing(directory: Path) -> None:
    model = streamed(directory, 240)
    layer, before = next(sparse(model)), statistics_of(model)
    nothing = layer(torch.ones(2, 256), torch.full((2, 2), 6), torch.ones(2, 2))
    quiet = layer(torch.full((1, 256), 1e-9), torch.tensor([[0, 1]]), torch.ones(1, 2))
    assert not nothing.any() and not quiet.any() and statistics_of(model).bytes_read == before.bytes_read

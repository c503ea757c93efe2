"""Streamed channels: the right records, within the budget, for any token choices."""

import os
import shutil
import threading
import warnings
from collections.abc import Iterator
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
from moepack import _core
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.methods.floe import Floe
from moepack.methods.floe.thresholds import Decision
from moepack.modules.experts import SparseExperts
from moepack.progress import Progress
from moepack.stores.streaming import ChannelStore, StreamingStore, statistics_of
from moepack.stores.streaming.channels import LEAST, NOTES, RECORDS, RecordFile, _portions
from moepack.stores.streaming.records import RecordCache
from moepack.stores.streaming.source import Source
from runtime_support import inputs, logits, write_packed


class Drive:
    """A tensor of some records without a file, which records reads and resident records."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.there: set[int] = set()
        self.broken: set[int] = set()
        self.came, self.lock = 0, threading.Lock()

    def read(self, records: Any, threads: int) -> tuple[int, int]:
        own = {*records.tolist()}
        if own & self.broken:
            raise moepack.LoadError(f"record {min(own & self.broken)}")
        with self.lock:
            assert not own & self.there
            self.there |= own
            self.came += len(own)
        return 1, 10 * len(own)

    def drop(self, records: Any) -> None:
        self.there -= {*records.tolist()}


def numbers(records: Any) -> Any:
    return np.array(sorted(records), np.int64)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 39), max_size=9), max_size=40))
def test_held_entries_are_present_and_the_budget_is_kept(calls: list[set[int]]) -> None:
    drives = Drive(15), Drive(25)
    kept = RecordCache(9, 10, drives, 3)
    for call in calls:
        kept.hold(numbers(call))
        there = drives[0].there | {15 + record for record in drives[1].there}
        assert call <= there and len(there) <= 9
        kept.release(numbers(call))
    counts = kept.statistics
    assert counts.misses == drives[0].came + drives[1].came and counts.most <= 90
    assert counts.hits + counts.misses == sum(map(len, calls))
    assert counts.bytes_read == 10 * counts.misses and counts.reads <= counts.misses


def test_records_that_most_calls_want_stay() -> None:
    drive = Drive(64)
    kept = RecordCache(24, 10, [drive], 2)
    for call in range(40):
        wanted = numbers({*range(16), *(16 + (8 * call + i) % 48 for i in range(8))})
        kept.hold(wanted)
        kept.release(wanted)
    assert kept.statistics.misses == 16 + 40 * 8


def test_threads_read_a_record_once_and_wait_for_room() -> None:
    drive = Drive(40)
    kept = RecordCache(16, 10, [drive], 4)

    def use(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(100):
            chosen = np.sort(random.choice(40, 6, replace=False))
            kept.hold(chosen)
            assert set(chosen.tolist()) <= drive.there and len(drive.there) <= 16
            kept.release(chosen)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))


def test_a_record_that_cannot_be_read_is_not_there_and_may_come_later() -> None:
    drive = Drive(8)
    kept = RecordCache(4, 10, [drive], 2)
    drive.broken = {5}
    with pytest.raises(moepack.LoadError, match="record 5"):
        kept.hold(numbers({0, 5, 7}))
    assert not drive.there
    drive.broken = set()
    kept.hold(numbers({0, 5, 6, 7}))
    assert drive.there == {0, 5, 6, 7}
    kept.release(numbers({0, 5, 6, 7}))
    assert kept.statistics.resident == 40


@given(st.sets(st.integers(0, 99)), st.integers(1, 120))
def test_portions_cover_the_records(chosen: set[int], budget: int) -> None:
    parts = _portions(numbers(chosen), budget)
    assert [record for part in parts for record in part.tolist()] == sorted(chosen)
    assert all(len(part) <= (budget if len(parts) == 1 else max(1, budget // 2)) for part in parts)


class Skipping(Floe):
    """Floe with one threshold for all experts, without a text."""

    def _decide(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None) -> None:
        self._name_tensors(model)
        self._measure(checkpoint, model)
        shares, threshold = (0.7,) * 6, 2.0 if self.paper_form else 0.15
        decision = Decision((threshold,) * 6, (), (), shares, shares)
        self._decisions = {layer.name: decision for layer in model.layers}


@pytest.fixture(scope="module", params=["refined", "paper"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of six experts of 384 channels, records of 576 bytes each."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=256, moe_intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, num_experts=6, num_experts_per_tok=2, initializer_range=0.05,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return write_packed(
        model, tmp_path_factory.mktemp("packed") / "model", Skipping("", bits=8, paper_form=request.param == "paper")
    )


def always(directory: Path) -> int:
    """Bytes of the weights that every token needs."""
    model = moepack.load(directory, dtype="float32", mode="exact")
    buffers = [buffer for name, buffer in model.named_buffers() if not name.endswith(RECORDS)]
    heads = 3 * (256 + NOTES * 6 * 384)
    return sum(tensor.nbytes for tensor in (*model.parameters(), *buffers)) + heads


def streamed(directory: Path, memory: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moepack.MoepackWarning)
        return moepack.load(directory, dtype="float32", mode="exact", host_memory=always(directory) + memory)


def sparse(model: Any) -> Iterator[SparseExperts]:
    return (module for module in model.modules() if isinstance(module, SparseExperts))


@pytest.mark.parametrize("memory", [LEAST, 10 << 20])
def test_streamed_channels_compute_the_same_as_mapped_ones(directory: Path, memory: int) -> None:
    expected, model = moepack.load(directory, dtype="float32", mode="exact"), streamed(directory, memory)
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-5, atol=1e-5)
    first, second = next(sparse(model)), next(sparse(expected))
    assert isinstance(first.store, ChannelStore)
    assert 0 < first.computed == second.computed < 0.6 * first.asked
    ids = inputs(model, batch=1, tokens=1)["input_ids"]
    generated = [each.generate(ids, max_new_tokens=8, do_sample=False) for each in (model, expected)]
    assert torch.equal(*generated)
    counts = statistics_of(model)
    assert counts is not None and 0 < counts.most <= memory and counts.bytes_read >= counts.reads * 4096
    assert (counts.misses <= 3 * 6 * 384) == (memory > LEAST)


def test_threads_and_the_cache_change_nothing(directory: Path) -> None:
    model = streamed(directory, 1 << 20)
    expected = [logits(model, tokens=3, seed=seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda seed: logits(model, tokens=3, seed=seed), range(8)))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_budgets_are_refused_warned_of_or_serve_whole_experts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChannelStore, "_share", lambda *_: 1.0)
    with pytest.raises(moepack.LoadError, match="is too little"):
        moepack.load(directory, dtype="float32", mode="exact", host_memory=1)
    with pytest.warns(moepack.MoepackWarning, match="left for channels, less than the .* that one token uses"):
        moepack.load(directory, dtype="float32", mode="exact", host_memory=always(directory) + LEAST)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moepack.MoepackWarning)
        model = moepack.load(directory, dtype="float32", mode="exact", host_memory=always(directory) - 4096)
    assert type(next(sparse(model)).store) is StreamingStore


def test_a_failing_drive_is_named_and_the_call_may_be_repeated(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected = streamed(directory, 1 << 20), logits(moepack.load(directory, dtype="float32", mode="exact"))
    files = [own.file for own in next(sparse(model)).store._layers.values()]

    class Failing:
        def read(self, *_: Any) -> Any:
            raise OSError(5, "Input/output error at byte 77")

        def drop(self, *_: Any) -> None:
            pass

    with monkeypatch.context() as patch:
        patch.setattr(files[1], "matrix", Failing())
        with pytest.raises(moepack.LoadError, match=r"safetensors: cannot be read: Input/output error at byte 77"):
            logits(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    codes, scales = np.full((1, 300, 256), 3, np.uint8), np.ones((1, 300, 4), np.float32)
    blob = _core.encode_channels((codes, scales), np.zeros(1, np.float32), bits=8)
    file = tmp_path / "records"
    file.write_bytes(blob.tobytes())
    head = int(_core.PackedTensor(blob).payloads()[0, 0])
    matrix = _core.StreamedChannels(_core.RecordMemory(), blob[:head], str(file), 0, False)
    records = RecordFile(matrix, Source(file))
    assert records.count == 300 and records.read(np.arange(3), 2)[0] == 1
    os.truncate(file, 4096)
    with pytest.raises(moepack.CorruptionError, match=r"records: ends at byte \d+: it was truncated while"):
        records.read(np.array([250]), 2)


def test_a_file_that_is_replaced_stays_the_one_that_was_opened(directory: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(directory, tmp_path / "copy"))
    model, expected = streamed(copy, 1 << 20), logits(moepack.load(directory, dtype="float32", mode="exact"))
    for file in list(copy.glob("*.safetensors")):
        file.rename(file.with_suffix(".old"))
        file.write_bytes(bytes(1 << 20))
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)


def test_tokens_without_experts_and_unused_channels_read_nothing(directory: Path) -> None:
    model = streamed(directory, 1 << 20)
    layer, before = next(sparse(model)), statistics_of(model)
    nothing = layer(torch.ones(2, 256), torch.full((2, 2), 6), torch.ones(2, 2))
    quiet = layer(torch.full((1, 256), 1e-9), torch.tensor([[0, 1]]), torch.ones(1, 2))
    assert not nothing.any() and quiet.abs().max() < 1e-12 and statistics_of(model).bytes_read == before.bytes_read

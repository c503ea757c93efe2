"""Streamed experts: the right bytes within the budget, even if the file changes."""

import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import moepack
from moepack import _core
from moepack.methods.finequant import FineQuant
from moepack.modules.experts import PackedExperts
from moepack.stores.streaming import StreamingStore, statistics_of
from moepack.stores.streaming.region import Region
from moepack.stores.streaming.residency import Expert, Residency
from moepack.stores.streaming.source import PAGE, Source
from moepack.system import reading
from moepack.system.maps import anonymous
from moepack.units import byte_count
from places import GOLDEN
from runtime_support import inputs, logits, write_packed

BLOBS = sorted(GOLDEN.glob("*/*.bin"))
BLOBS = [path for path in BLOBS if path.parent.name in {kind for kind, _, _ in _core.formats()}]


@pytest.mark.parametrize("path", BLOBS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_products_read_only_their_experts_payloads_and_shared_data(path):
    data = np.fromfile(path, np.uint8)
    tensor = _core.PackedTensor(data)
    experts, _, columns = tensor.shape
    runs = tensor.payloads()
    assert runs.shape == (experts, 2)
    assert (runs[:, 0] <= runs[:, 1]).all() and runs.min(initial=0) >= 0 and runs.max(initial=0) <= tensor.nbytes
    shared = data.copy()
    for start, stop in runs:
        shared[start:stop] = 0
    x = np.random.default_rng(0).standard_normal((1, columns), np.float32)
    for expert, (start, stop) in enumerate(runs):
        own = shared.copy()
        own[start:stop] = data[start:stop]
        assert np.array_equal(_core.PackedTensor(own).matmul(x, expert), tensor.matmul(x, expert), equal_nan=True)


@pytest.fixture
def file(tmp_path):
    """A file of random bytes that ends inside a page."""
    path = tmp_path / "bytes"
    path.write_bytes(np.random.default_rng(0).bytes(40 * PAGE + PAGE // 2))
    return path


def read_all(expert):
    for given_source, memory, place in expert.reads():
        given_source.read(memory, place)


@pytest.mark.parametrize("place", [0, 64, PAGE - 64, 3 * PAGE + 128])
def test_a_region_has_the_bytes_of_experts_that_were_read(file, place):
    data = np.fromfile(file, np.uint8)[place : place + 30 * PAGE]
    payloads = np.array([[100, 100], [100, 9 * PAGE], [9 * PAGE, 9 * PAGE + 10], [10 * PAGE, 30 * PAGE]])
    found = Region(Source(file), place, data, payloads)
    experts = [Expert([found], number) for number in range(4)]
    assert [expert.nbytes % PAGE for expert in experts] == [0] * 4
    assert experts[0].nbytes == experts[2].nbytes == 0
    outside = np.ones(len(data), bool)
    for start, stop in payloads:
        outside[start:stop] = False
    assert np.array_equal(found.data.numpy()[outside], data[outside])
    for expert in experts:
        read_all(expert)
    assert np.array_equal(found.data.numpy(), data)
    experts[3].drop()
    assert not found.data.numpy()[12 * PAGE : 28 * PAGE].any()
    assert np.array_equal(found.data.numpy()[: 9 * PAGE], data[: 9 * PAGE])
    read_all(experts[3])
    assert np.array_equal(found.data.numpy(), data)


@pytest.mark.parametrize("refused", ["flag", "read"])
def test_where_direct_reads_are_refused_reads_are_buffered(file, monkeypatch, refused):
    real_open, real_read, direct = os.open, os.preadv, set()

    def opened(path, flags, *rest):
        if flags & os.O_DIRECT and refused == "flag":
            raise OSError(22, "Invalid argument")
        descriptor = real_open(path, flags, *rest)
        (direct.add if flags & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def read(descriptor, *rest):
        if descriptor in direct:
            raise OSError(22, "Invalid argument")
        return real_read(descriptor, *rest)

    monkeypatch.setattr(reading.os, "open", opened)
    monkeypatch.setattr(reading.os, "preadv", read)
    found = Source(file)
    assert not found.is_direct
    memory = bytearray(2 * PAGE)
    found.read(memoryview(memory), 5 * PAGE)
    assert memory == file.read_bytes()[5 * PAGE : 7 * PAGE]


def test_a_truncated_file_and_a_failing_drive_are_named(file, monkeypatch):
    found = Source(file)
    os.truncate(file, 8 * PAGE)
    memory = np.frombuffer(anonymous(4 * PAGE), np.uint8)
    with pytest.raises(moepack.CorruptionError, match=rf"{file}: ends at byte {8 * PAGE}: it was truncated"):
        found.read(memoryview(memory), 6 * PAGE)
    monkeypatch.setattr(reading.os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(moepack.LoadError, match=r"cannot be read at byte 0: Input/output error"):
        found.read(memoryview(memory), 0)


def test_short_reads_are_continued(file, monkeypatch):
    found, real = Source(file), os.preadv
    monkeypatch.setattr(reading.os, "preadv", lambda fd, into, place: real(fd, [into[0][:PAGE]], place))
    memory = np.frombuffer(anonymous(5 * PAGE), np.uint8)
    found.read(memoryview(memory), 3 * PAGE)
    assert memory.tobytes() == file.read_bytes()[3 * PAGE : 8 * PAGE]


def test_a_file_that_is_replaced_stays_open(file):
    expected, found = file.read_bytes(), Source(file)
    file.with_suffix(".new").write_bytes(bytes(len(expected)))
    file.with_suffix(".new").replace(file)
    memory = np.frombuffer(anonymous(PAGE), np.uint8)
    found.read(memoryview(memory), PAGE)
    assert memory.tobytes() == expected[PAGE : 2 * PAGE]


class Drive:
    """Experts of `sizes` pages without a file, which record reads and resident experts."""

    def __init__(self, sizes):
        self.sizes = [PAGE * pages for pages in sizes]
        self.there, self.count, self.broken, self.lock = set(), 0, set(), threading.Lock()

    def reads(self, number):
        yield self, memoryview(b""), number

    def read(self, memory, number):
        if number in self.broken:
            raise moepack.LoadError(f"expert {number}")
        with self.lock:
            assert number not in self.there
            self.there.add(number)
            self.count += 1

    def drop(self, number):
        self.there.discard(number)

    def experts(self):
        return [Expert([self], number) for number in range(len(self.sizes))]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=4, max_size=12),
    st.lists(st.sets(st.integers(0, 11), max_size=4), max_size=40),
    st.booleans(),
)
def test_held_entries_are_present_and_the_budget_is_kept(pages, calls, recent_first):
    drive = Drive(pages)
    experts = drive.experts()
    kept = Residency(16 * PAGE, 2, recent_first=recent_first)
    for call in calls:
        chosen = sorted({number % len(pages) for number in call})
        kept.hold([experts[number] for number in chosen])
        assert {number for number in chosen if pages[number]} <= drive.there
        assert sum(pages[number] for number in drive.there) <= 16
        kept.release([experts[number] for number in chosen])
    counts = kept.statistics
    assert counts.misses == drive.count
    assert counts.most <= 16 * PAGE
    assert counts.hits + counts.misses == sum(len({number % len(pages) for number in call}) for call in calls)


def test_recently_used_entries_stay_and_cycles_keep_a_part():
    def hits(budget, recent_first):
        drive = Drive([1] * 16)
        experts, kept = drive.experts(), Residency(budget * PAGE, 1, recent_first=recent_first)
        for number in [*range(16)] * 10:
            kept.hold([experts[number]])
            kept.release([experts[number]])
        return kept.statistics.hits

    assert hits(16, recent_first=False) == 144
    assert hits(12, recent_first=False) == 0
    assert hits(12, recent_first=True) >= 90


def test_threads_read_an_expert_once_and_wait_for_room():
    drive = Drive([2] * 12)
    experts, kept = drive.experts(), Residency(8 * PAGE, 4)

    def use(seed):
        random = np.random.default_rng(seed)
        for _ in range(200):
            chosen = random.choice(12, 3, replace=False)
            kept.hold([experts[number] for number in chosen])
            assert set(chosen.tolist()) <= drive.there
            assert len(drive.there) <= 4
            kept.release([experts[number] for number in chosen])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    assert kept.statistics.hits + kept.statistics.misses == 8 * 200 * 3


def test_an_expert_that_cannot_be_read_is_not_there_and_may_come_later():
    drive = Drive([1] * 4)
    experts, kept = drive.experts(), Residency(3 * PAGE, 2)
    drive.broken = {1}
    with pytest.raises(moepack.LoadError, match="expert 1"):
        kept.hold(experts[:3])
    assert drive.there == {0, 2}
    drive.broken = set()
    kept.hold(experts[1:])
    assert drive.there == {1, 2, 3}
    kept.release(experts[1:])
    assert kept.statistics.resident == 3 * PAGE


def qwen3_moe(**settings):
    """A small model of random weights."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, **settings
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Six int4 experts per layer, of 36 pages each."""
    model = qwen3_moe(moe_intermediate_size=384, num_hidden_layers=3, num_experts=6, num_experts_per_tok=2)
    return write_packed(model, tmp_path_factory.mktemp("packed") / "model", FineQuant(bits=4, dense_bits=8))


def least(directory):
    """The minimum sufficient memory according to the message, and the memory of one token's experts."""
    with pytest.raises(moepack.LoadError, match=f"{directory}: .* is too little") as caught:
        moepack.load(directory, host_memory=1)
    words = str(caught.value).replace(";", "").split()
    sizes = [byte_count(f"{words[at - 1]}{word}") for at, word in enumerate(words) if word in ("kB", "MB")]
    always, expert, token = sizes[-3:]
    return int(1.01 * (always + expert)), int(1.01 * token)


@pytest.mark.parametrize("budget", ["least", "token", "all"])
def test_streamed_models_compute_the_same_as_mapped_ones(directory, budget):
    one, token = least(directory)
    expected = moepack.load(directory, dtype="float32", mode="exact")
    memory = {"least": one, "token": token, "all": "1GB"}[budget]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moepack.MoepackWarning)
        model = moepack.load(directory, dtype="float32", mode="exact", host_memory=memory)
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-5, atol=1e-5)
    ids = inputs(model, batch=1, tokens=5)["input_ids"]
    assert torch.equal(
        model.generate(ids, max_new_tokens=12, do_sample=False),
        expected.generate(ids, max_new_tokens=12, do_sample=False),
    )
    counts = statistics_of(model)
    assert counts.misses == 18 if budget == "all" else counts.misses > 18
    assert counts.most <= byte_count(memory)
    assert statistics_of(expected) is None


def test_outputs_do_not_depend_on_the_cache(directory):
    model = moepack.load(directory, dtype="float32", host_memory=least(directory)[1])
    expected = logits(model)
    logits(model, tokens=3, seed=7)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("mode", ["exact", "auto"])
@pytest.mark.parametrize(
    "method", [{"method": "finequant", "bits": 3}, {"method": "milo"}, {"method": "rate", "bits_per_weight": 3.0}]
)
def test_experts_of_one_token_add_up_as_if_all_were_there(method, mode, tmp_path):
    model = qwen3_moe(moe_intermediate_size=256, num_hidden_layers=1, num_experts=12, num_experts_per_tok=4)
    model.save_pretrained(tmp_path / "model")
    directory = tmp_path / "packed"
    moepack.compress(tmp_path / "model", directory, **method)
    mapped = moepack.load(directory, dtype="float32", mode=mode)
    streaming = moepack.load(directory, dtype="float32", mode=mode, host_memory=least(directory)[1])
    (layer,), (expected,) = (
        [m for m in each.modules() if isinstance(m, PackedExperts)] for each in (streaming, mapped)
    )
    random = torch.Generator().manual_seed(1)
    for _ in range(20):
        index = torch.randperm(13, generator=random)[None, :4]  # the last number is no expert's
        x, weights = torch.randn(1, 256, generator=random), torch.rand(1, 4, generator=random)
        assert torch.equal(layer(x, index, weights), expected(x, index, weights))
    counts = statistics_of(streaming)
    assert counts.hits > 10 and counts.misses > 10


class Slow(Drive):
    """Experts whose reads end when released."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.let = [threading.Event() for _ in sizes]

    def read(self, memory, number):
        assert self.let[number].wait(60)
        super().read(memory, number)


def test_experts_are_given_as_they_come():
    drive = Slow([1] * 6)
    experts, kept = drive.experts(), Residency(5 * PAGE, 3)
    drive.let[4].set()
    kept.hold([experts[4]])
    kept.release([experts[4]])
    coming = kept.come([experts[number] for number in (1, 2, 4)])
    assert next(coming) == [experts[4]]
    drive.let[2].set()
    assert next(coming) == [experts[2]]
    drive.let[1].set()
    assert next(coming) == [experts[1]] and not list(coming)
    assert kept.statistics.misses == 3 and kept.statistics.hits == 1
    kept.release([experts[number] for number in (1, 2, 4)])


def test_an_aborted_wait_holds_nothing():
    drive = Slow([1] * 6)
    experts, kept = drive.experts(), Residency(3 * PAGE, 3)
    drive.let[0].set()
    drive.broken = {1}
    coming = kept.come(experts[:3])
    assert next(coming) == [experts[0]]
    drive.let[1].set()
    drive.let[2].set()
    with pytest.raises(moepack.LoadError, match="expert 1"):
        list(coming)
    coming = kept.come([experts[0], experts[2]])
    next(coming)
    coming.close()
    drive.let[3].set(), drive.let[4].set(), drive.let[5].set()
    kept.hold(experts[3:])
    assert drive.there == {3, 4, 5}


def test_threads_compute_the_same_as_one(directory):
    model = moepack.load(directory, dtype="float32", host_memory=least(directory)[1])
    expected = [logits(model, seed=seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda seed: logits(model, seed=seed), range(8)))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_too_little_memory_for_a_token_is_reported(directory):
    one, _ = least(directory)
    with pytest.warns(moepack.MoepackWarning, match="less than the .* that one token uses"):
        moepack.load(directory, host_memory=one)


def test_a_file_truncated_under_a_model_is_an_error_and_not_a_crash(directory, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in directory.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    model = moepack.load(copy, dtype="float32", host_memory="1GB")
    layer = next(module for module in model.modules() if isinstance(getattr(module, "store", None), StreamingStore))
    for path in copy.glob("*.safetensors"):
        os.truncate(path, PAGE)
    with pytest.raises(moepack.CorruptionError, match=r"safetensors: ends at byte .*: it was truncated"):
        layer(torch.ones(1, 256), torch.tensor([[0, 1]]), torch.ones(1, 2))


def test_streamed_models_cannot_be_moved(directory):
    for other in ({"resident": True}, {"device": "cuda"}, {"device_map": "auto"}):
        with pytest.raises(ValueError, match="host_memory needs a model on the CPU"):
            moepack.load(directory, host_memory="1GB", **other)
    layer = next(
        module
        for module in moepack.load(directory, host_memory="1GB").modules()
        if isinstance(getattr(module, "store", None), StreamingStore)
    )
    with pytest.raises(moepack.LoadError, match="multiplied on the CPU, not on 'meta'"):
        next(layer.store.portions(layer, torch.zeros(1, 1), torch.device("meta")))
    for wrong in (lambda: layer.matrix("up_proj"), lambda: layer.attach("up_proj", torch.zeros(8, dtype=torch.uint8))):
        with pytest.raises(moepack.LoadError):
            wrong()


@pytest.mark.parametrize(
    ("text", "count"), [("5MB", 5e6), ("5 MiB", 5 << 20), ("5e6", 5e6), (7, 7), ("1.5gb", 1.5e9), ("2 TiB", 2 << 40)]
)
def test_sizes_are_read(text, count):
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-5MB", "0", "5 apples", "1.2.3MB", "nan", "5MiX", "1e999", "1e305TB"])
def test_invalid_sizes_are_rejected(text):
    with pytest.raises(ValueError, match="is not a size"):
        byte_count(text)

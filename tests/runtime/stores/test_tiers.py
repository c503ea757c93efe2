"""A device with too little memory, simulated in host memory: the right experts in the right slots."""

from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from threading import Lock

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import moepack
from moepack.arrays import as_bytes
from moepack.methods import create
from moepack.methods.floe import Floe
from moepack.methods.floe.thresholds import Decision
from moepack.stores.base import Call
from moepack.stores.mapped import matrix_over
from moepack.stores.streaming import statistics_of
from moepack.stores.streaming.experts import expert_layers
from moepack.stores.streaming.trace import Trace, hit_rate
from moepack.stores.tiers import experts as store
from moepack.stores.tiers import keep_on
from moepack.stores.tiers.accelerator import ChannelCounts, Device
from moepack.stores.tiers.arena import Arena, Stack
from moepack.stores.tiers.misses import MARGIN, Rates, Shares
from moepack.stores.tiers.slots import Slots
from places import GOLDEN
from runtime_support import logits, tiny_model, write_packed


class Skipping(Floe):
    """Floe with one threshold for all experts, without a text."""

    def _decide(self, checkpoint, model, progress=None):
        self._name_tensors(model)
        self._measure(checkpoint, model)
        decision = Decision((0.01 if self.paper_form else 1e-5,) * 4, (), (), (0.7,) * 4, (0.7,) * 4)
        self._decisions = {layer.name: decision for layer in model.layers}


class Copies:
    """Copies that are made only when they are waited for, as late as on a real device."""

    def __init__(self, waiting):
        self.waiting = waiting

    def wait(self):
        for source, target in self.waiting:
            target.copy_(source)
        self.waiting.clear()

    finish = wait


class Memory(Device):
    """Host memory that simulates a device; the CPU computes its products."""

    place = torch.device("cpu")

    def __init__(self, overlapping=False):
        self.overlapping, self.begun, self.waiting = overlapping, [], []

    def allocate(self, size):
        return torch.zeros(size, dtype=torch.uint8)

    def pinned(self, size):
        return torch.empty(size, dtype=torch.uint8)

    def matrix(self, data, like, count):
        return matrix_over(data)

    def uploaded(self, data, place):
        return matrix_over(data.clone(), **place), data.nbytes

    def left_on_the_host(self, matrix):
        self.left = [*getattr(self, "left", []), matrix]
        return matrix, 16

    def channels(self, records, like, resident):
        self.resident = resident
        return matrix_over(records)

    def counts(self, records):
        return ChannelCounts(self.resident, 3, 100, 7 * self.resident)

    def numbers(self, values):
        return torch.from_numpy(values)

    def bring(self, copies):
        self.waiting += copies
        return Copies(self.waiting)

    def enter(self):
        pass

    def leave(self):
        Copies(self.waiting).wait()

    def overlaps(self, matrices, layer, index):
        return self.overlapping

    def beginning(self, matrices, there, late, arrival):
        assert there.is_contiguous() and late.is_contiguous()
        assert not ((there < matrices[0].shape[0]) & (late < matrices[0].shape[0])).any()
        self.begun.append(late)
        arrival.wait()
        return matrices


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_packed(tiny_model("qwen2_moe"), tmp_path_factory.mktemp("packed") / "packed", create("finequant"))


def on_memory(directory, memory, host_memory=None, device=None, misses="moved"):
    """A model whose device has a given memory for weights."""
    model = moepack.load(directory, dtype="float32")
    keep_on(model, device or Memory(), memory, host_memory, misses)
    return model


@pytest.fixture(scope="module")
def least(directory):
    """The sufficient number of bytes according to an error message."""
    budgets = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "size", lambda count: budgets.append(count) or str(count))
        with pytest.raises(moepack.DeviceMemoryError, match=r"1 of device memory .* the minimum is"):
            on_memory(directory, 1)
    return budgets[-1]


def test_outputs_depend_on_no_slot(directory, least):
    """With six experts per layer and two chosen, prompts run in portions, and tokens find some of their experts."""
    expected = logits(moepack.load(directory, dtype="float32"))
    found = []
    for memory in (least, least + 2000, 10**9):
        model = on_memory(directory, memory)
        for _ in range(2):
            found.append(logits(model))
            for tokens in (1, 3):
                assert_near(logits(model, tokens=tokens, batch=1), expected_of(directory, tokens))
    for each in found:
        assert_near(each, expected)
    assert torch.equal(found[0], found[1]) and torch.equal(found[4], found[5])


def expected_of(directory, tokens):
    return logits(moepack.load(directory, dtype="float32"), tokens=tokens, batch=1)


def assert_near(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_budget_is_kept_and_events_are_counted(directory, least):
    model, roomy = on_memory(directory, least), on_memory(directory, 10**9)
    for each in (model, roomy):
        for tokens in range(1, 9):
            logits(each, tokens=tokens, batch=1)
    counts, all_there = statistics_of(model), statistics_of(roomy)
    assert counts.hits + counts.misses == all_there.hits + all_there.misses
    assert counts.misses > all_there.misses > 0 and counts.bytes_read > all_there.bytes_read
    assert all_there.misses == all_there.reads <= 12  # each expert once
    assert counts.most <= least < all_there.most + sum(p.nbytes for p in model.parameters())
    assert counts.resident <= counts.most


def test_the_least_budget_is_of_use_and_one_byte_less_is_refused(directory, least):
    on_memory(directory, least)
    with pytest.raises(moepack.DeviceMemoryError, match="below which each is evicted"):
        on_memory(directory, least - 1)


def test_experts_on_the_drive_come_through_the_host(directory, least):
    expected = logits(moepack.load(directory, dtype="float32"))
    model = on_memory(directory, least, host_memory=200_000)
    assert_near(logits(model), expected)
    assert expert_layers(model)[0].store.host_statistics is not None
    with pytest.raises(moepack.LoadError, match="too little for experts"):
        on_memory(directory, least, host_memory=1000)


def test_a_read_error_leaves_no_slot_behind(directory, least, monkeypatch):
    model = on_memory(directory, least)
    expected, tier = logits(model), expert_layers(model)[0].store
    send = tier._host.send

    def failing(layer, experts, to):
        send(layer, experts[:1], to)
        raise moepack.LoadError("the drive is gone")

    monkeypatch.setattr(tier._host, "send", failing)
    with pytest.raises(moepack.LoadError, match="gone"):
        logits(model)
    monkeypatch.undo()
    assert torch.equal(logits(model), expected)


def test_calls_begin_with_the_experts_that_are_there(directory, least):
    device = Memory(overlapping=True)
    model = on_memory(directory, least, device=device)
    expected = expected_of(directory, 1)
    logits(model, tokens=9, batch=1)
    for _ in range(2):
        assert_near(logits(model, tokens=1, batch=1), expected)
    assert device.begun
    for late in device.begun:
        count = expert_layers(model)[0].store._layers[expert_layers(model)[0]].arena.slots.count
        assert 0 < int((late < count).sum()) < late.numel()


@pytest.mark.parametrize("host_memory", [None, 200_000])
@pytest.mark.parametrize("overlapping", [False, True])
def test_the_cpu_multiplies_misses(directory, least, host_memory, overlapping):
    model = on_memory(directory, least, host_memory, Memory(overlapping), "computed")
    for tokens, batch in ((1, 1), (3, 1), (20, 2), (1, 1)):
        expected = logits(moepack.load(directory, dtype="float32"), tokens=tokens, batch=batch)
        assert_near(logits(model, tokens=tokens, batch=batch), expected)
    counts, tier = statistics_of(model), expert_layers(model)[0].store
    slots = {arena.slots.count for arena in tier._arenas.values()}
    assert {counts.misses - counts.computed} == slots and counts.computed > counts.reads > 0  # free slots are filled


def test_calls_without_experts_give_zeros(directory, least):
    for misses in ("moved", "computed"):
        layer = expert_layers(on_memory(directory, least, misses=misses))[0]
        experts, _, columns = layer.shapes["gate_proj"]
        for index in (torch.empty((0, 2), dtype=torch.int64), torch.full((3, 2), experts)):
            x = torch.ones(len(index), columns)
            assert torch.equal(layer(x, index, torch.ones(index.shape)), torch.zeros_like(x))


def test_a_call_that_uses_all_slots_does_not_change_them(directory, least):
    model = on_memory(directory, least)
    layer = expert_layers(model)[0]
    tier = layer.store
    count = tier._layers[layer].arena.slots.count
    x, index = torch.ones(count + 1, layer.shapes["gate_proj"][2]), torch.arange(count + 1).view(-1, 1)
    layer(x[:count], index[:count], torch.ones(count, 1))
    before = statistics_of(model).reads
    tier._shares = dict.fromkeys(tier._shares, Shares(Rates(100.0, 100.0, 0.0, 1.0, 1.0)))
    for _ in range(200):
        layer(x, index, torch.ones(index.shape))
    assert statistics_of(model).reads == before and statistics_of(model).computed == 200


@pytest.mark.parametrize("misses", ["moved", "computed"])
@pytest.mark.parametrize("host_memory", [None, 200_000])
def test_a_product_that_fails_leaves_nothing_behind(directory, least, monkeypatch, misses, host_memory):
    model = on_memory(directory, least, host_memory, misses=misses)
    expected, layer = logits(model), expert_layers(model)[0]

    def failing(*_):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(layer, "_multiply", failing)
        with pytest.raises(MemoryError) as raised:
            logits(model)
    with ThreadPoolExecutor(1) as pool:  # another thread runs while the error object exists
        assert_near(pool.submit(logits, model).result(timeout=60), expected)
    assert raised.value.args == ("no room",)
    if host_memory is not None:
        assert not any(expert.holders for _, own in layer.store._host._layers.values() for expert in own)


@pytest.mark.parametrize("overlapping", [False, True])
def test_misses_are_shared_out(directory, least, overlapping):
    """If slots and the CPU are equally fast, one of two misses is copied, and the CPU takes few of many tokens."""
    model = on_memory(directory, least, device=Memory(overlapping))
    tier = expert_layers(model)[0].store
    tier._shares = dict.fromkeys(tier._shares, Shares(Rates(1.0, 1.0, 0.0, 1.0, 1.0)))
    for _ in range(2):
        for tokens, batch in ((1, 1), (2, 1), (20, 2), (1, 3)):
            expected = logits(moepack.load(directory, dtype="float32"), tokens=tokens, batch=batch)
            assert_near(logits(model, tokens=tokens, batch=batch), expected)
    counts = statistics_of(model)
    assert 0 < counts.computed < counts.misses and counts.bytes_read > 0


def test_frequently_used_experts_are_still_copied(directory, least):
    """If the CPU is faster than the bus, it multiplies all misses of a token, but frequently used experts are copied
    later."""
    model = on_memory(directory, least)
    first, second = expert_layers(model)
    tier = first.store
    tier._shares = dict.fromkeys(tier._shares, Shares(Rates(3.0, 3.0, 0.0, 1.0, 1.0)))

    def call(layer, *experts):
        index = torch.tensor([experts])
        x = torch.ones(1, layer.shapes["gate_proj"][2])
        layer(x, index, torch.ones(index.shape))
        return statistics_of(model).computed, statistics_of(model).reads

    for layer in (first, second):  # slots are free
        for expert in (0, 1):
            assert call(layer, expert)[0] == 0
    found = [call(first, 4, 5) for _ in range(12)]
    assert found[0] == (2, 4) and found[1] == (4, 4)
    assert found[-1] == found[-2] and found[-1][1] == 6


def test_shares_are_measured_for_experts_on_the_drive(directory, least):
    model = on_memory(directory, least, 200_000, misses="auto")
    tier = expert_layers(model)[0].store
    assert all(shares.rates.bus > 0 and shares.rates.product > 0 for shares in tier._shares.values())
    assert not any(expert.holders for _, own in tier._host._layers.values() for expert in own)
    assert_near(logits(model), logits(moepack.load(directory, dtype="float32")))


def rates_of(model):
    (shares,) = expert_layers(model)[0].store._shares.values()
    return shares.rates


class Clock:
    """A clock that only copies and products advance, so the machine's load changes no measured time."""

    READING = 1e-6
    """Seconds that a reading takes, so that nothing takes no time."""

    def __init__(self):
        self._now, self._lock = 0.0, Lock()

    def sleep(self, seconds):
        with self._lock:
            self._now += seconds
            return self._now

    def perf_counter(self):
        return self.sleep(self.READING)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("moepack.stores.tiers.misses.time", clock)
    monkeypatch.setattr(store, "perf_counter", clock.perf_counter)
    return clock


class Slow(Memory):
    """Memory with a given copy time in seconds."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def bring(self, copies):
        self.clock.sleep(self.seconds)
        return super().bring(copies)


def test_shares_are_measured(directory, least, clock):
    """Measured rates assign all misses to the CPU if the bus takes 30 ms per expert, and none if the CPU takes 50
    ms."""
    model = on_memory(directory, least, device=Slow(clock, 0.03), misses="auto")
    rates = rates_of(model)
    assert 0.03 <= rates.bus < 0.06 and 0.03 <= rates.bus_concurrent < 0.06
    assert 0 < rates.overhead + rates.product < 0.02
    assert rates.cpu_share([1]) == 1 and rates.cpu_share([1, 1]) == 2 and rates.cpu_share([10**6] * 2) == 0
    assert_near(logits(model), logits(moepack.load(directory, dtype="float32")))

    class Slowly(torch.nn.Module):
        def forward(self, x):
            clock.sleep(0.05)  # once for each expert or once for all
            return torch.nn.functional.silu(x)

    model = moepack.load(directory, dtype="float32")
    for layer in expert_layers(model):
        layer.act_fn = Slowly()
    keep_on(model, Memory(), least)
    rates = rates_of(model)
    assert rates.bus < 0.02 and rates.overhead + rates.product > 0.05
    assert rates.cpu_share([1]) == rates.cpu_share([1, 1]) == 0


def test_shares_follow_a_cpu_that_is_slower_than_when_it_was_measured(directory, least, clock):
    class Delayed(torch.nn.Module):
        seconds = 0.0

        def forward(self, x):
            clock.sleep(self.seconds)
            return torch.nn.functional.silu(x)

    model = on_memory(directory, least)
    tier, counts = expert_layers(model)[0].store, statistics_of(model)
    for layer in expert_layers(model):
        layer.act_fn = Delayed()
    logits(model)  # no slot is free
    before = Rates(0.01, 0.01, 0.0, 0.001, 0.001)
    tier._shares = {arena: Shares(before, follow=True) for arena in tier._shares}
    Delayed.seconds = 0.1
    for tokens in range(1, 40):
        computed, misses = counts.computed, counts.misses
        logits(model, tokens=1 + tokens % 3, batch=1)
        if counts.computed == computed and counts.misses > misses:
            break
    assert tokens > 1 and counts.computed == computed > 0 and rates_of(model).cpu_share([1]) == 0
    assert rates_of(model)[:2] == before[:2]


@pytest.mark.parametrize("of_cpu", [0.1, 0.7, 1.2, 3.0, 10.0])
@pytest.mark.parametrize("measured", [0.01, 0.5, 1.0, 8.0])
def test_shares_find_who_is_faster(of_cpu, measured):
    """The bus takes 1 s and the CPU a different time than measured; calls converge to the faster one."""
    shares = Shares(Rates(1.0, 1.0, 0.0, measured, measured), follow=True)
    left = []
    for _ in range(8000):
        left.append(shares.cpu_share([1]))
        if left[-1]:
            shares.note(1, 1, of_cpu, concurrent=False)
    seconds = np.where(left, of_cpu, 1.0)[6000:].mean()
    assert seconds < 1.02 * min(of_cpu, 1.0)
    assert np.isclose(shares.rates.product, MARGIN * of_cpu) if of_cpu < 1 else shares.rates.product > 0.999


def test_many_tokens_of_an_expert_say_when_the_cpu_is_slow_but_not_when_it_is_fast():
    shares = Shares(Rates(1.0, 1.0, 0.0, 0.1, 0.1), follow=True)
    shares.note(1, 8, 0.2, concurrent=False)
    assert shares.rates.product == 0.1
    shares.note(1, 8, 2.0, concurrent=True)
    assert shares.rates.product > 0.1 < shares.rates.product_concurrent


def test_arguments_are_not_modified():
    shares = Shares(Rates(1.0, 1.0, 0.0, 2.0, 2.0))
    assert shares.cpu_share([1]) == 0
    shares.note(1, 1, 0.1, concurrent=False)
    assert shares.rates == Rates(1.0, 1.0, 0.0, 2.0, 2.0)


def test_the_time_of_a_share_has_no_reads_from_the_drive(clock):
    def portions():
        for _ in range(2):
            clock.sleep(0.3)
            yield (), torch.zeros((1, 1), dtype=torch.int64)

    def multiply(_, call):
        clock.sleep(0.02)
        return call.x.clone()

    call = Call(torch.ones(1, 4), torch.zeros((1, 1), dtype=torch.int64), torch.ones(1, 1))
    outputs, seconds = store._timed(portions(), call, multiply, clock.perf_counter())
    assert torch.equal(outputs, torch.full((1, 4), 2.0)) and seconds == pytest.approx(0.04, abs=20 * clock.READING)


TIMES = st.floats(0, 8)


@given(st.lists(TIMES, min_size=5, max_size=5), st.lists(st.integers(1, 9), max_size=6))
def test_no_other_shares_are_done_sooner(seconds, tokens):
    def done(computed):
        coming = len(tokens) - len(computed)
        if not computed:
            return coming * rates.bus
        on_cpu = rates.overhead + sum(computed) * (rates.product_concurrent if coming else rates.product)
        return max(coming * rates.bus_concurrent, on_cpu)

    rates, tokens = Rates(*seconds), sorted(tokens)
    others = (done(some) for size in range(len(tokens) + 1) for some in combinations(tokens, size))
    assert done(tokens[: rates.cpu_share(tokens)]) <= min(others) * (1 + 1e-9)


@pytest.mark.parametrize("misses", ["moved", "computed"])
def test_threads_take_turns(directory, least, misses):
    model = on_memory(directory, least, misses=misses)
    expected = [logits(model, tokens=tokens, batch=1) for tokens in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda tokens: logits(model, tokens=tokens, batch=1), list(range(1, 9)) * 3))
    for one, other in zip(found, expected * 3, strict=True):
        assert torch.equal(one, other) if misses == "moved" else assert_near(one, other) is None


def test_the_first_layers_of_other_formats_are_on_the_device(packed):
    expected = moepack.load(packed, dtype="float32")
    layers = expert_layers(expected)
    sizes = [sum(buffer.nbytes for buffer in layer.buffers()) for layer in layers]
    always = sum(tensor.nbytes for tensor in (*expected.parameters(), *expected.buffers())) - sum(sizes)
    for memory, left in ((10**9, 0), (always + sizes[0] + 48, 1), (always + 48 * len(sizes), len(sizes))):
        device = Memory()
        model = on_memory(packed, memory, device=device)
        assert torch.equal(logits(model), logits(expected))
        assert len(getattr(device, "left", [])) == 3 * left
    with pytest.raises(moepack.DeviceMemoryError, match="every token needs"):
        on_memory(packed, always)
    with pytest.raises(moepack.LoadError, match="of host memory"):
        on_memory(packed, always + 1000, host_memory=sum(sizes) - 1)


def test_impossible_combinations_are_rejected(directory, least):
    with pytest.raises(moepack.LoadError, match="does not accept new weights"):
        expert_layers(on_memory(directory, least))[0].attach("gate_proj", torch.zeros(64, dtype=torch.uint8))
    for arguments in ({}, {"device": "cpu"}, {"device_map": "auto"}):
        with pytest.raises(ValueError, match="device_memory needs a model on one GPU"):
            moepack.load(directory, device_memory="1GB", **arguments)
    with pytest.raises(ValueError, match="misses must be one of auto, moved, computed, got 'sometimes'"):
        moepack.load(directory, misses="sometimes")
    with pytest.raises(ValueError, match="misses needs device_memory"):
        moepack.load(directory, misses="moved")


@pytest.mark.parametrize("paper_form", [False, True])
def test_experts_by_channels_keep_the_first_channels_on_the_device(tmp_path, paper_form):
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, moe_intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    method = Skipping("", paper_form=paper_form)
    directory = write_packed(transformers.AutoModelForCausalLM.from_config(config), tmp_path / "packed", method)
    expected = moepack.load(directory, dtype="float32")
    records = sum(layer.get_buffer(layer.projections[-1]).nbytes for layer in expert_layers(expected))
    always = sum(tensor.nbytes for tensor in (*expected.parameters(), *expected.buffers())) - records
    device = Memory()
    model = on_memory(directory, always + records // 4, device=device)
    assert torch.equal(logits(model), logits(expected))
    assert all(0 < layer.computed < layer.asked for layer in expert_layers(model))
    assert 0.2 * 96 < device.resident <= 24
    counts = statistics_of(model)
    assert (counts.hits, counts.misses, counts.bytes_read) == (2 * device.resident, 6, 600)
    assert not expert_layers(model)[0].store.asks_host
    with pytest.raises(moepack.DeviceMemoryError, match="every token needs"):
        on_memory(directory, always - 1)
    with pytest.raises(moepack.LoadError, match="of host memory"):
        on_memory(directory, 10**9, host_memory=records - 1)


@pytest.mark.parametrize("kind", ["groupwise", "codebook"])
def test_a_tensor_over_slots_multiplies_as_the_tensor_of_its_experts(kind):
    random = np.random.default_rng(0)
    for path in sorted((GOLDEN / kind).glob("*.bin")):
        data = as_bytes(np.fromfile(path, np.uint8))
        matrix = matrix_over(data)
        experts, _, columns = matrix.shape
        if not experts:
            continue
        stack = Stack(data, matrix)
        arena = Arena(Memory(), [stack], min(experts, 3))
        order = random.permutation(experts)[:3].tolist()
        for slot, expert in enumerate(order):
            for source, target in arena.copies(slot, [stack.payloads()[expert]]):
                target.copy_(source)
        x = random.standard_normal((2, columns), np.float32)
        for slot, expert in enumerate(order):
            assert np.array_equal(arena.matrices[0].matmul(x, slot), matrix.matmul(x, expert))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.lists(st.lists(st.integers(0, 12), unique=True, max_size=9), max_size=40))
def test_slots_hold_each_expert_once_and_the_call_s_for_sure(count, calls):
    slots, before = Slots(count), {}
    used = []
    for call in calls:
        call = call[:count]
        kept = [expert for expert in used if expert in before and expert not in call][: count - len(call)]
        places, missing = slots.take(call, kept)
        assert set(missing) == {expert for expert in call if expert not in before}
        new = {places[call.index(expert)] for expert in missing}
        now = {expert: place for expert, place in before.items() if place not in new}
        assert all(now[expert] == before[expert] for expert in kept)
        assert all(now.get(expert, place) == place for expert, place in zip(call, places, strict=True))
        before = now | dict(zip(call, places, strict=True))
        assert len(set(before.values())) == len(before) == len(slots) <= count
        used = call
    slots.forget(list(before))
    assert len(slots) == 0


def test_slots_hit_as_the_replayed_policy_says():
    trace = Trace(np.random.default_rng(1).integers(0, 12, (200, 3, 2)), 12)
    for capacity in (7, 20):
        slots, hits = Slots(capacity), 0
        for request in trace.requests:
            hits += not slots.take([request])[1]
        assert hits == round(hit_rate(trace, "whole experts", capacity) * len(trace.requests))

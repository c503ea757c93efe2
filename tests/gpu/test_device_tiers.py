"""Swapped experts on a real GPU."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import moepack
from moepack.backends.gpu import slots
from moepack.decoding.decoder import set_decoding
from moepack.methods import create
from moepack.stores.streaming import statistics_of
from moepack.stores.streaming.experts import expert_layers
from moepack.stores.tiers import experts as store
from moepack.stores.tiers.misses import Rates, Shares

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def whole(qwen3_moe, tmp_path_factory):
    """A model of whole experts, and the minimum useful device memory."""
    directory = tmp_path_factory.mktemp("packed") / "whole"
    moepack.compress(qwen3_moe, directory, method=create("finequant", bits=4, group_size=16))
    budgets = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "size", lambda count: budgets.append(count) or str(count))
        with pytest.raises(moepack.DeviceMemoryError, match="the minimum is"):
            moepack.load(directory, dtype="float32", device="cuda", device_memory=1)
    return directory, budgets[-1]


@pytest.fixture(scope="module", params=["refined", "paper"])
def channels(request, mixtral, tmp_path_factory):
    directory = tmp_path_factory.mktemp("packed") / request.param
    text = directory.with_suffix(".txt")
    text.write_text("She opened the door, and the river ran past the mill. " * 60)
    settings = {"sequence_length": 64, "sparsity": 0.5, "paper_form": request.param == "paper"}
    made = create("floe", calibration=str(text), **settings)
    moepack.compress(mixtral, directory, method=made)
    return directory


@pytest.fixture(scope="module", params=["ternary", "rate"])
def other(request, mixtral, tmp_path_factory):
    directory = tmp_path_factory.mktemp("packed") / request.param
    settings = {"bits_per_weight": 3} if request.param == "rate" else {}
    moepack.compress(mixtral, directory, method=create(request.param, **settings))
    return directory


def ids(tokens, batch=2):
    return torch.randint(3, 250, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


@torch.inference_mode()
def logits(model, tokens=20, batch=2):
    return model(ids(tokens, batch).to(next(model.parameters()).device)).logits.float().cpu()


def assert_near(found, expected):
    assert float((found - expected).norm() / expected.norm()) < 0.01


@pytest.mark.parametrize("host_memory", [None, "300kB"])
def test_outputs_are_those_of_the_whole_model_and_depend_on_no_slot(whole, host_memory):
    directory, least = whole
    expected = moepack.load(directory, dtype="float32")
    options = {"dtype": "float32", "device": "cuda", "host_memory": host_memory, "misses": "moved"}
    small = moepack.load(directory, device_memory=least, **options)
    large = moepack.load(directory, device_memory="1GB", **options)
    for tokens, batch in ((1, 1), (3, 1), (20, 2), (1, 1), (100, 2), (1, 4)):
        found = logits(small, tokens, batch)
        assert_near(found, logits(expected, tokens, batch))
        if tokens * batch <= 4:  # one portion: the same bits for any content of the slots
            assert torch.equal(found, logits(small, tokens, batch))
            assert torch.equal(found, logits(large, tokens, batch))
    counts, all_there = statistics_of(small), statistics_of(large)
    assert counts.misses > all_there.misses and counts.most < least
    assert counts.waited > 0


@pytest.mark.parametrize("misses", ["auto", "computed"])
@pytest.mark.parametrize("host_memory", [None, "300kB"])
def test_outputs_with_misses_on_the_cpu_are_those_of_the_whole_model(whole, host_memory, misses):
    directory, least = whole
    expected = moepack.load(directory, dtype="float32")
    options = {"dtype": "float32", "device": "cuda", "host_memory": host_memory, "misses": misses}
    model = moepack.load(directory, device_memory=least, **options)
    for tokens, batch in ((1, 1), (3, 1), (20, 2), (1, 1), (100, 2), (1, 4), (1, 1)):
        assert_near(logits(model, tokens, batch), logits(expected, tokens, batch))
    assert misses == "auto" or statistics_of(model).computed > 0


def test_shares_of_all_kinds_are_those_of_the_whole_model(whole):
    """Some experts are resident, some are copied, and the CPU multiplies some, with and without recordings."""
    directory, least = whole
    model = moepack.load(directory, dtype="float32", device="cuda", device_memory=least)
    tier = expert_layers(model)[0].store
    tier._shares = dict.fromkeys(tier._shares, Shares(Rates(1.0, 1.0, 0.0, 1.0, 1.0)))
    expected = moepack.load(directory, dtype="float32")
    for tokens in (1, 2, 3, 5, 8, 9, 30) * 4:
        assert_near(logits(model, 1, tokens), logits(expected, 1, tokens))
    counts = statistics_of(model)
    assert counts.hits and 0 < counts.computed < counts.misses
    (arena,) = tier._arenas.values()
    assert len(slots._recorded[arena.matrices[-1]].of_shape) > 3
    with torch.no_grad():  # recordings were made in inference mode
        found = model(ids(1, 2).cuda()).logits.float().cpu()
    assert_near(found, logits(expected, 1, 2))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_experts_come_and_go_on_a_gpu_that_is_not_the_current_one(whole):
    directory, least = whole
    expected = moepack.load(directory, dtype="float32")
    options = {"dtype": "float32", "device": "cuda:1", "device_memory": least}
    for misses in ("moved", "auto"):
        model = moepack.load(directory, misses=misses, **options)
        for tokens, batch in ((1, 1), (1, 1), (3, 1), (20, 2), (1, 1)):
            assert_near(logits(model, tokens, batch), logits(expected, tokens, batch))


def test_recordings_go_with_their_model(whole):
    directory, least = whole
    model = moepack.load(directory, dtype="float32", device="cuda", device_memory=least, misses="moved")
    for _ in range(4):
        logits(model, 1, 2)
    (arena,) = expert_layers(model)[0].store._arenas.values()
    down = weakref.ref(arena.matrices[-1])
    assert slots._recorded[down()].of_shape
    del model, arena
    gc.collect()
    assert down() is None


def generated(model, batch=1):
    prompt = ids(9, batch).cuda()
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def launched(model, batch=1):
    try:
        set_decoding("transformers")
        return generated(model, batch)
    finally:
        set_decoding(None)


@pytest.mark.parametrize("misses", ["moved", "computed"])
@pytest.mark.parametrize("batch", [1, 3])
def test_steps_are_recorded_between_layers_of_experts(whole, batch, misses):
    directory, least = whole
    options = {"dtype": "float32", "device": "cuda", "misses": misses}
    model = moepack.load(directory, device_memory=least + 20_000, **options)
    expected = launched(model, batch)
    assert model.model.forward.steps == 0
    found = generated(model, batch)
    assert model.model.forward.steps > 30
    assert (found == expected).float().mean() > 0.6


def test_threads_take_turns(whole):
    directory, least = whole
    model = moepack.load(directory, dtype="float32", device="cuda", device_memory=least, misses="moved")
    expected = [logits(model, 1, tokens) for tokens in range(1, 9)]

    def run(tokens):
        with torch.cuda.stream(torch.cuda.Stream()):
            return logits(model, 1, tokens)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, list(range(1, 9)) * 5))
    for one, other in zip(found, expected * 5, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_layers_of_other_formats_are_read_from_the_host(other):
    expected = moepack.load(other, dtype="float32")
    all_there = moepack.load(other, dtype="float32", device="cuda")
    layers = expert_layers(all_there)
    always = sum(tensor.nbytes for tensor in (*all_there.parameters(), *all_there.buffers()))
    for left in (1, len(layers)):
        memory = always - sum(layer.nbytes for layer in layers[-left:]) + sum(map(tables, layers)) + 100
        model = moepack.load(other, dtype="float32", device="cuda", device_memory=memory)
        for tokens in (1, 20, 100):
            assert_near(logits(model, tokens), logits(expected, tokens))
        assert torch.equal(logits(model, 1), logits(all_there, 1))
        generated(model)
        assert model.model.forward.steps > 30


def tables(layer):
    return sum(matrix.nbytes - matrix.data.nbytes for matrix in layer.store.fetch(layer, None, GPU))


@pytest.mark.parametrize("tokens", [1, 20, 100])
def test_channels_compute_the_same_as_on_the_cpu(channels, tokens):
    expected = logits(moepack.load(channels, dtype="float32"), tokens)
    assert_near(logits(moepack.load(channels, dtype="float32", device="cuda"), tokens), expected)


def test_some_channels_are_on_the_gpu_and_steps_are_recorded_whole(channels):
    whole = moepack.load(channels, dtype="float32")
    records = sum(layer.get_buffer(layer.projections[-1]).nbytes for layer in expert_layers(whole))
    with pytest.raises(moepack.DeviceMemoryError, match="every token needs"):
        moepack.load(channels, dtype="float32", device="cuda", device_memory=1000)
    all_there = moepack.load(channels, dtype="float32", device="cuda")
    always = sum(tensor.nbytes for tensor in (*all_there.parameters(), *all_there.buffers())) - records + 4096
    found = []
    for memory in (always + records // 2, "1GB"):
        model = moepack.load(channels, dtype="float32", device="cuda", device_memory=memory)
        assert torch.equal(logits(model), logits(all_there))
        found.append(statistics_of(model))
        generated(model)
        assert model.model.forward.steps > 30
    assert found[0].misses > 0 and found[0].hits > 0
    assert found[1].misses == 0
    assert found[0].hits + found[0].misses == found[1].hits

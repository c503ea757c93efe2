"""Routing and packed experts modules in isolation, with weights in a format that tests can read."""

import copy
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack import CorruptionError, LoadError
from moepack.backends.cpu.backend import sort_by_expert
from moepack.modules.experts import PackedExperts, PackedSwitchExperts
from moepack.registry import open_tensor, register
from runtime_support import KIND, MAGIC, DenseMatrix, dense_blob

EXPERTS, HIDDEN, INNER = 5, 16, 24
SHAPES = {
    "gate_proj": (EXPERTS, INNER, HIDDEN),
    "up_proj": (EXPERTS, INNER, HIDDEN),
    "down_proj": (EXPERTS, HIDDEN, INNER),
}


@pytest.fixture(scope="module")
def weights():
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def experts(weights):
    module = PackedExperts(SHAPES, torch.nn.SiLU())
    for name, weight in weights.items():
        module.attach(name, dense_blob(weight))
    return module


def reference(weights, hidden, index, scale):
    """One token and one expert at a time, in float64."""
    gate, up, down = (torch.from_numpy(weights[name]).double() for name in SHAPES)
    output = torch.zeros(hidden.shape, dtype=torch.float64)
    for token, chosen in enumerate(index.tolist()):
        for slot, expert in enumerate(chosen):
            if expert < EXPERTS:
                x = hidden[token].double()
                inner = torch.nn.functional.silu(gate[expert] @ x) * (up[expert] @ x)
                output[token] += scale[token, slot].double() * (down[expert] @ inner)
    return output


def assert_near(output, expected):
    """Equal up to the rounding of float32 sums of values around 10."""
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-4)


def routed(tokens, top_k, highest=EXPERTS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    index = torch.randint(0, highest, (tokens, top_k), generator=generator)
    return hidden, index, torch.rand(tokens, top_k, generator=generator)


@given(st.lists(st.integers(0, EXPERTS + 2), max_size=40))
def test_sort_by_expert_is_a_stable_sort_without_sentinels(index):
    order, offsets = sort_by_expert(np.array(index, np.int64), EXPERTS)
    expected = sorted((i for i, expert in enumerate(index) if expert < EXPERTS), key=lambda i: index[i])
    assert order.tolist() == expected
    for expert in range(EXPERTS):
        assert [index[i] for i in order[offsets[expert] : offsets[expert + 1]]] == [expert] * index.count(expert)


@pytest.mark.parametrize("tokens", [0, 1, 2, 37])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("highest", [EXPERTS, EXPERTS + 1, 1])
def test_experts_equal_one_token_at_a_time(weights, experts, tokens, top_k, highest):
    hidden, index, scale = routed(tokens, top_k, highest)
    assert_near(experts(hidden, index, scale), reference(weights, hidden, index, scale))


def test_only_sentinels_yield_zeros(experts):
    hidden, index, scale = routed(4, 2)
    assert not experts(hidden, torch.full_like(index, EXPERTS), scale).any()


def test_a_token_does_not_depend_on_its_batch(experts):
    hidden, index, scale = routed(64, 2)
    together = experts(hidden, index, scale)
    for token in (0, 17, 63):
        alone = experts(*(tensor[token : token + 1] for tensor in (hidden, index, scale)))
        torch.testing.assert_close(alone[0], together[token])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_returned_and_errs_by_the_rounding_of_the_output(weights, experts, dtype):
    hidden, index, scale = (tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in routed(9, 2))
    output = experts(hidden, index, scale)
    assert output.dtype == dtype
    expected = reference(weights, hidden, index, scale)
    torch.testing.assert_close(output.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_switch_runs_the_chosen_expert_and_drops_tokens_beyond_capacity():
    generator = np.random.default_rng(0)
    shapes = {"wi": (EXPERTS, INNER, HIDDEN), "wo": (EXPERTS, HIDDEN, INNER)}
    weights = {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    module = PackedSwitchExperts(shapes, torch.nn.ReLU())
    for name, weight in weights.items():
        module.attach(name, dense_blob(weight))
    hidden, index, scale = routed(6, 1)
    mask = torch.nn.functional.one_hot(index, EXPERTS)
    mask[3] = 0
    output = module(hidden, mask, scale)
    wi, wo = (torch.from_numpy(weights[name]) for name in shapes)
    for token in range(6):
        expert = index[token, 0]
        expected = wo[expert] @ torch.relu(wi[expert] @ hidden[token]) * scale[token] * (token != 3)
        torch.testing.assert_close(output[token], expected)


def test_bytes_are_buffers_that_casts_leave_alone(experts):
    before = {name: buffer.data_ptr() for name, buffer in experts.named_buffers()}
    experts.bfloat16().to("cpu")
    assert set(before) == set(SHAPES)
    assert {name: buffer.data_ptr() for name, buffer in experts.named_buffers()} == before
    assert experts.nbytes == sum(buffer.numel() for buffer in experts.buffers())


def test_copies_compute_the_same_from_their_own_bytes(experts):
    inputs = routed(7, 2)
    expected = experts(*inputs)
    stream = io.BytesIO()
    torch.save(experts, stream)
    stream.seek(0)
    for clone in (copy.deepcopy(experts), torch.load(stream, weights_only=False)):
        assert clone.gate_proj.data_ptr() != experts.gate_proj.data_ptr()
        torch.testing.assert_close(clone(*inputs), expected, rtol=0, atol=0)


def test_a_state_dict_is_adopted_and_never_written_into_the_old_bytes(experts, weights):
    state = {name: torch.from_numpy(dense_blob(2 * weight)) for name, weight in weights.items()}
    for buffer in experts.buffers():
        buffer.numpy().setflags(write=False)
    old = {name: buffer.clone() for name, buffer in experts.named_buffers()}
    kept = dict(experts.named_buffers())
    inputs = routed(5, 2)
    experts.load_state_dict(state)
    doubled = {name: 2 * weight for name, weight in weights.items()}
    assert_near(experts(*inputs), reference(doubled, *inputs))
    assert all(torch.equal(kept[name], old[name]) for name in old)


def test_a_state_dict_with_wrong_bytes_is_refused(experts, weights):
    state = {name: torch.from_numpy(dense_blob(weight)) for name, weight in weights.items()}
    with pytest.raises(RuntimeError, match="up_proj"):
        experts.load_state_dict({**state, "up_proj": state["down_proj"]})
    with pytest.raises(RuntimeError, match="gate_proj"):
        experts.load_state_dict({**state, "gate_proj": torch.zeros(3)})
    del state["down_proj"]
    with pytest.raises(RuntimeError, match=r"Missing.*down_proj"):
        experts.load_state_dict(state)


def test_no_gradient_is_lost_silently(experts):
    hidden, index, scale = routed(3, 2)
    hidden.requires_grad_()
    output = experts(hidden, index, scale)
    torch.testing.assert_close(output.detach(), experts(hidden.detach(), index, scale))
    with pytest.raises(LoadError, match="does not support gradients"):  # a format without a transposed product
        output.sum().backward()


def test_other_devices_are_refused(experts):
    with pytest.raises(LoadError, match="on the CPU"):
        experts(*(tensor.to("meta") for tensor in routed(3, 2)))


def test_experts_without_bytes_say_so():
    with pytest.raises(LoadError, match="load the model first"):
        PackedExperts(SHAPES, torch.nn.SiLU())(*routed(3, 2))


def test_a_shape_that_is_not_the_models_is_refused(experts, weights):
    with pytest.raises(LoadError, match=r"shard-3.*'layer\.up'.*up_proj"):
        experts.attach("up_proj", dense_blob(weights["down_proj"]), file="shard-3", tensor="layer.up")


@pytest.mark.parametrize("length", [0, 7])
def test_too_short_for_a_magic(length):
    with pytest.raises(CorruptionError, match="'name'") as caught:
        open_tensor(np.zeros(length, np.uint8), file="shard", tensor="name")
    assert (caught.value.file, caught.value.tensor) == ("shard", "name")


def test_unknown_formats_are_named_with_the_known_ones():
    with pytest.raises(LoadError, match=r"NEWMAGIC.*MOEPTERN"):
        open_tensor(np.frombuffer(b"NEWMAGIC" + bytes(56), np.uint8))


@settings(max_examples=50)
@given(st.binary(min_size=8, max_size=200))
def test_damaged_ternary_blobs_raise_the_typed_error(data):
    with pytest.raises(CorruptionError, match="'name'"):
        open_tensor(np.frombuffer(b"MOEPTERN" + data, np.uint8), file="shard", tensor="name")


def test_formats_register_once():
    register(KIND, MAGIC, DenseMatrix)
    for kind, magic in [(KIND, b"NEWMAGIC"), ("new", MAGIC), ("ternary", b"NEWMAGIC"), ("new", b"MOEPTERN")]:
        with pytest.raises(ValueError, match="already registered"):
            register(kind, magic, lambda data: DenseMatrix(data))
    with pytest.raises(ValueError, match="8 bytes"):
        register("new", b"SHORT", DenseMatrix)

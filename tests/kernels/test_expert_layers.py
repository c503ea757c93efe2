"""Layers of gated experts in one call, with projections in any mix of formats."""

import itertools

import numpy as np
import pytest
import torch

from moepack import _core
from moepack._core import PackedTensor, gated_experts
from moepack.modules.experts import PackedExperts
from runtime_support import dense_blob

EXPERTS, HIDDEN, INNER = 6, 80, 96
SHAPES = {
    "gate_proj": (EXPERTS, INNER, HIDDEN),
    "up_proj": (EXPERTS, INNER, HIDDEN),
    "down_proj": (EXPERTS, HIDDEN, INNER),
}


def groupwise(shape, seed, bits=4, group_size=32):
    random = np.random.default_rng(seed)
    codes = random.integers(0, 1 << bits, shape, dtype=np.uint8)
    groups = -(-shape[2] // group_size)
    scales = random.uniform(0.02, 0.04, (*shape[:2], groups)).astype(np.float16).astype(np.float32)
    offsets = -scales * np.float32(1 << (bits - 1))
    return _core.encode_groupwise(codes, scales, offsets, bits=bits, group_size=group_size, ndim=3)


def coded(shape, seed, columns=None):
    codes = np.rint(2 * np.random.default_rng(seed).standard_normal(shape)).astype(np.int8)
    return _core.encode_coded(codes, np.full((1, 1), 0.03125, np.float32), ndim=3, columns=columns)


def coded_columns(shape, seed):
    """One row of scales of columns for all experts."""
    scales = np.exp2(np.random.default_rng(seed).normal(0, 1, (1, shape[2])))
    return coded(shape, seed, scales.astype(np.float32))


def coded_own_columns(shape, seed):
    """A row of scales of columns for each expert."""
    scales = np.exp2(np.random.default_rng(seed).normal(0, 1, (shape[0], shape[2])))
    return coded(shape, seed, scales.astype(np.float32))


def ternary(shape, seed):
    random = np.random.default_rng(seed)
    codes = random.choice(np.array([-1, 0, 1], np.int8), shape, p=[0.1, 0.8, 0.1])
    levels = np.array([-0.25, 0.25], np.float32) * random.choice([1, 0.5], (*shape[:2], 1))
    return _core.encode_ternary(codes, levels.astype(np.float32), ndim=3)


def codebook(shape, seed):
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, shape, dtype=np.uint8)
    centroids = random.integers(-32639, 32640, (*shape[:2], 1, 16)).astype(np.int16)
    scales = random.uniform(1e-6, 9e-6, (*shape[:2], 1)).astype(np.float32)
    return _core.encode_codebook(codes, centroids, scales, bits=4, block=128, ndim=3)


def compensated(shape, seed, bits=3):
    random = np.random.default_rng(seed + 10)
    ranks = random.integers(0, 3, shape[0]) * 8

    def factor(length):
        codes = random.integers(0, 1 << bits, (ranks.sum(), length), dtype=np.uint8)
        return codes, np.full((len(codes), -(-length // 64)), 0.03125, np.float32)

    right, left = factor(shape[2]), factor(shape[1])
    return _core.encode_compensated(groupwise(shape, seed, bits=3), ranks, right, left, bits=bits)


COLUMNS = {"none": coded, "shared": coded_columns, "own": coded_own_columns}
FORMATS = {"groupwise": groupwise, "coded": coded, "ternary": ternary, "codebook": codebook}


def matrices(*formats):
    return [
        PackedTensor(FORMATS[name](shape, seed))
        for seed, (name, shape) in enumerate(zip(formats, SHAPES.values(), strict=True))
    ]


def inputs(tokens, top_k=3):
    random = np.random.default_rng(tokens)
    x = random.standard_normal((tokens, HIDDEN), np.float32)
    experts = random.integers(0, EXPERTS + 1, (tokens, top_k))
    return x, experts, random.random((tokens, top_k), np.float32)


def one_by_one(layer, x, experts, weights, modes=(None, None, None)):
    """Three products for each token and expert."""

    def product(number, expert, x):
        offsets = np.repeat(np.array([0, 1]), [expert + 1, EXPERTS - expert])
        return layer[number].matmul_grouped(x, offsets, modes[number])

    y = np.zeros_like(x)
    for token, slot in itertools.product(range(len(x)), range(experts.shape[1])):
        expert = experts[token, slot]
        if expert < EXPERTS:
            row = x[token : token + 1]
            gated = torch.nn.functional.silu(torch.from_numpy(product(0, expert, row))).numpy()
            y[token] += weights[token, slot] * product(2, expert, gated * product(1, expert, row))[0]
    return y


@pytest.mark.parametrize("formats", [*((name,) * 3 for name in FORMATS), *itertools.permutations(FORMATS, 3)])
@pytest.mark.parametrize("tokens", [1, 2, 19])
def test_a_layer_of_any_formats_is_its_products(formats, tokens):
    layer, modes = matrices(*formats), ("exact",) * 3
    x, experts, weights = inputs(tokens)
    y = gated_experts(*layer, x, experts, weights, modes)
    np.testing.assert_allclose(y, one_by_one(layer, x, experts, weights, modes), rtol=1e-4, atol=1e-4 * np.abs(y).max())


@pytest.mark.parametrize("formats", list(itertools.product(COLUMNS, repeat=3)))
@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("mode", ["exact", "int8", "auto"])
def test_projections_of_a_layer_have_their_own_scales_of_columns(formats, tokens, mode):
    """Projections that read the same tokens share activations unless scales of columns differ."""
    functions = [COLUMNS[name] for name in formats]
    made = zip(functions, SHAPES.values(), strict=True)
    layer = [PackedTensor(function(shape, seed)) for seed, (function, shape) in enumerate(made)]
    x, experts, weights = inputs(tokens)
    y = gated_experts(*layer, x, experts, weights, (mode,) * 3)
    wanted = one_by_one(layer, x, experts, weights, (mode,) * 3)
    # In int8, hidden values may be rounded differently; panels of many tokens round to bf16.
    tolerance = 1e-4 if mode == "exact" else 3e-2
    np.testing.assert_allclose(y, wanted, rtol=tolerance, atol=tolerance * np.abs(y).max())


def test_each_projection_has_its_own_mode():
    layer = matrices("groupwise", "groupwise", "groupwise")
    x, experts, weights = inputs(4)
    exact = gated_experts(*layer, x, experts, weights)
    modes = (None, "exact", "int8")
    mixed = gated_experts(*layer, x, experts, weights, modes)
    assert not np.array_equal(mixed, exact)
    np.testing.assert_allclose(
        mixed, one_by_one(layer, x, experts, weights, modes), rtol=1e-4, atol=1e-4 * np.abs(exact).max()
    )


def test_a_format_that_takes_no_part_is_multiplied_by_itself():
    random = np.random.default_rng(0)
    module = PackedExperts(SHAPES, torch.nn.SiLU())
    for name, shape in SHAPES.items():
        blob = dense_blob(random.standard_normal(shape, np.float32)) if name == "up_proj" else groupwise(shape, 1)
        module.attach(name, blob)
    x, experts, weights = inputs(5)
    layer = [module.matrix(name) for name in SHAPES]
    with pytest.raises(TypeError, match="not a tensor that layers can use"):
        gated_experts(*layer, x, experts, weights)
    y = module(torch.from_numpy(x), torch.from_numpy(experts), torch.from_numpy(weights)).numpy()
    np.testing.assert_allclose(y, one_by_one(layer, x, experts, weights), rtol=1e-4, atol=1e-4 * np.abs(y).max())


def test_bad_arguments_are_refused():
    layer = matrices("groupwise", "ternary", "groupwise")
    x, experts, weights = inputs(2)
    with pytest.raises(TypeError, match="not a tensor that layers can use"):
        gated_experts(layer[0], object(), layer[2], x, experts, weights)
    with pytest.raises(ValueError, match='no mode "int8"'):
        gated_experts(*layer, x, experts, weights, ("int8",) * 3)
    with pytest.raises(ValueError, match="do not fit"):
        gated_experts(layer[0], layer[1], layer[1], x, experts, weights)
    with pytest.raises(ValueError, match="activations"):
        gated_experts(*layer, x[:, 1:].copy(), experts, weights)

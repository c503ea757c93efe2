import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.errors import InvalidTensorError
from moepack.solvers.gptq import GptqSettings, factorize, gptq
from moepack.solvers.grids import AffineGrid, SymmetricGrid, TernaryGrid
from moepack.solvers.groupwise import GroupwiseCodes, group_values, quantize_groupwise
from oracle import gptq as oracle


def problem(experts=3, rows=24, columns=80, tokens=200, seed=0, dead=()):
    """bf16-exact weights with a few outliers, and Hessians of correlated tokens."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(experts, rows, columns, generator=generator).bfloat16().float()
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    tokens = torch.randn(experts, tokens, columns, generator=generator) @ mixing
    tokens[..., list(dead)] = 0
    return weights, tokens.mT @ tokens


def quadratic(weights, values, hessians):
    error = (weights - values).double()
    return torch.einsum("erc,ecd,erd->e", error, hessians.double(), error)


def agrees(result, weights, hessians, rule, **options):
    """Codes equal the oracle's in every row without a near-tie; at least 60% of the rows must have none."""
    compared = 0
    for e in range(len(weights)):
        codes, values, margin = oracle.gptq(
            weights[e].double().numpy(), hessians[e].double().numpy(), rule(e), **options
        )
        clear = margin > 1e-5
        compared += clear.sum()
        np.testing.assert_array_equal(result.codes[e].numpy()[clear], codes[clear])
        np.testing.assert_allclose(result.values[e].numpy()[clear], values[clear], rtol=1e-4, atol=1e-5)
    assert compared >= 0.6 * weights.shape[0] * weights.shape[1]


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 80, 130, 257])
def test_ternary_equals_the_plain_oracle(columns):
    weights, hessians = problem(columns=columns, tokens=2 * columns)
    result = gptq(weights, hessians, TernaryGrid())
    agrees(result, weights, hessians, lambda e: oracle.ternary_rule(weights[e].double().numpy()))
    assert result.codes.dtype == torch.int8 and {r.outcome for r in result.reports} == {"gptq"}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "group, static", [(None, True), (32, False), (32, True), (24, False), (200, False), (7, False)]
)
def test_affine_groups_equal_the_plain_oracle(bits, group, static):
    weights, hessians = problem(rows=64)
    result = gptq(weights, hessians, AffineGrid(bits, group, static=static, storage=torch.float32))
    agrees(result, weights, hessians, lambda e: oracle.affine_rule(bits, group, static))
    assert int(result.codes.max()) <= 2**bits - 1


@pytest.mark.parametrize("bits", [None, 3])
def test_act_order_equals_the_plain_oracle(bits):
    weights, hessians = problem(dead=[3, 70])
    grid = TernaryGrid() if bits is None else AffineGrid(bits, 16, static=True, storage=torch.float32)
    result = gptq(weights, hessians, grid, GptqSettings(act_order=True))
    rule = (
        (lambda e: oracle.ternary_rule(weights[e].double().numpy()))
        if bits is None
        else (lambda e: oracle.affine_rule(bits, 16, True))
    )
    agrees(result, weights, hessians, rule, act_order=True)


@pytest.mark.parametrize("block", [1, 8, 33, 128])
def test_the_block_size_changes_nothing_but_rounding(block):
    weights, hessians = problem()
    result = gptq(weights, hessians, TernaryGrid(), GptqSettings(block_size=block))
    agrees(result, weights, hessians, lambda e: oracle.ternary_rule(weights[e].double().numpy()))


def test_compensation_beats_rounding():
    weights, hessians = problem(columns=128, tokens=150)
    for make in (TernaryGrid, lambda: AffineGrid(2, 64), lambda: AffineGrid(3)):
        rounded = gptq(weights, torch.zeros_like(hessians), make())
        solved = gptq(weights, hessians, make())
        ratio = quadratic(weights, solved.values, hessians) / quadratic(weights, rounded.values, hessians)
        assert (ratio < 0.6).all(), ratio


def test_the_reported_loss_is_the_damped_quadratic_error():
    weights, hessians = problem()
    result = gptq(weights, hessians, TernaryGrid())
    damped = hessians.clone()
    damped.diagonal(dim1=1, dim2=2).add_(0.1 * hessians.diagonal(dim1=1, dim2=2).mean(1, keepdim=True))
    expected = quadratic(weights, result.values, damped)
    np.testing.assert_allclose([r.loss for r in result.reports], expected.numpy(), rtol=1e-3)


def test_experts_do_not_influence_each_other():
    weights, hessians = problem()
    together = gptq(weights, hessians, TernaryGrid())
    for e in range(3):
        alone = gptq(weights[e : e + 1], hessians[e : e + 1], TernaryGrid())
        assert (alone.codes[0] != together.codes[e]).float().mean() < 0.01


BAD_HESSIANS = {
    "zero": (torch.zeros(40, 40), "no token"),
    "nan": (torch.full((40, 40), float("nan")), "not finite"),
    "one infinity": (
        torch.eye(40).index_put((torch.tensor(3), torch.tensor(3)), torch.tensor(float("inf"))),
        "not finite",
    ),
    "negative": (-torch.eye(40), "negative"),
}


@pytest.mark.parametrize("name", BAD_HESSIANS)
@pytest.mark.parametrize("grid", [TernaryGrid, lambda: AffineGrid(2, 16)])
def test_an_unusable_hessian_means_rounding_and_says_so(name, grid):
    weights, good = problem(experts=2, columns=40)
    bad, reason = BAD_HESSIANS[name]
    result = gptq(weights, torch.stack([good[0], bad]), grid())
    assert [r.outcome for r in result.reports] == ["gptq", "rtn"]
    assert reason in result.reports[1].reason
    rounded = gptq(weights, torch.eye(40).expand(2, 40, 40), grid())
    assert torch.equal(result.codes[1], rounded.codes[1])
    assert not torch.equal(result.codes[0], rounded.codes[0])


HARD_HESSIANS = {
    "rank one": lambda x: x[:, :1] @ x[:, :1].T,
    "tiny scale": lambda x: x @ x.T * 1e-35,
    "huge scale": lambda x: x @ x.T * 1e34,
    "graded": lambda x: (x * torch.logspace(-9, 9, 40)[:, None]) @ (x * torch.logspace(-9, 9, 40)[:, None]).T,
    "indefinite": lambda x: x @ x.T - 8 * torch.eye(40) + 8 * torch.diag((x @ x.T).diagonal() < 9),
    "one column": lambda x: torch.diag(torch.eye(40)[7]),
    "asymmetric": lambda x: torch.triu(x @ x.T),
}


@pytest.mark.parametrize("name", HARD_HESSIANS)
def test_a_hard_hessian_gives_finite_weights_on_the_grid(name):
    weights, _ = problem(experts=1, columns=40)
    x = torch.randn(40, 10, generator=torch.Generator().manual_seed(1))
    result = gptq(weights, HARD_HESSIANS[name](x)[None], TernaryGrid())
    assert torch.isfinite(result.values).all()
    assert result.reports[0].outcome == "gptq"


def test_damping_grows_until_the_factorisation_holds():
    hessian = torch.eye(6) + 0.9 * (torch.ones(6, 6) - torch.eye(6))
    hessian[0, 1] = hessian[1, 0] = 3.0
    factors = factorize(hessian[None], 0.01)
    assert factors.reasons == [None] and factors.damping[0] == pytest.approx(10.0)
    damped = hessian + factors.damping[0] * torch.eye(6)
    root = factors.upper[0] * factors.pivots[0]
    torch.testing.assert_close(root @ root.T, damped)


def test_dead_columns_keep_their_rounded_weights():
    weights, hessians = problem(dead=[0, 5, 79])
    result = gptq(weights, hessians, TernaryGrid())
    rounded = gptq(weights, torch.zeros_like(hessians), TernaryGrid())
    assert torch.equal(result.codes[..., [0, 5, 79]], rounded.codes[..., [0, 5, 79]])
    assert (result.codes[..., [0, 5, 79]] != 0).any()
    assert [r.dead_columns for r in result.reports] == [3, 3, 3]


def test_weights_near_the_largest_float_fall_back_to_rounding():
    weights, hessians = problem(experts=2)
    weights[1] *= 5e37
    result = gptq(weights, hessians, AffineGrid(4, 16, storage=torch.float32))
    assert torch.isfinite(result.values).all()
    assert result.reports[0].outcome == "gptq"


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_batches(shape):
    experts, _, columns = shape
    for grid in (TernaryGrid(), AffineGrid(3, 2)):
        result = gptq(torch.zeros(shape), torch.zeros(experts, columns, columns), grid)
        assert result.codes.shape == result.values.shape == shape and len(result.reports) == experts


def test_bad_arguments_are_typed_errors():
    weights, hessians = problem()
    with pytest.raises(InvalidTensorError, match=r"\[E, R, C\]"):
        gptq(weights[0], hessians, TernaryGrid())
    with pytest.raises(InvalidTensorError, match="hessians"):
        gptq(weights, hessians[:, 1:], TernaryGrid())
    with pytest.raises(InvalidTensorError, match="NaN"):
        gptq(weights.index_put((torch.tensor(0),), torch.tensor(float("nan"))), hessians, TernaryGrid())
    with pytest.raises(ValueError, match="static"):
        gptq(weights, hessians, AffineGrid(3, 16), GptqSettings(act_order=True))
    with pytest.raises(ValueError, match="damping"):
        GptqSettings(damping=0)


def test_inputs_are_not_modified():
    weights, hessians = problem()
    before = weights.clone(), hessians.clone()
    gptq(weights, hessians, AffineGrid(3, 32))
    assert torch.equal(weights, before[0]) and torch.equal(hessians, before[1])


def test_constant_groups_and_rows_are_kept_exactly():
    weights = torch.full((1, 3, 16), -2.5)
    weights[0, 1] = 0
    result = gptq(weights, torch.eye(16)[None], AffineGrid(2, 8))
    assert torch.equal(result.values, weights)
    ternary = gptq(weights, torch.eye(16)[None], TernaryGrid())
    assert torch.equal(ternary.values, weights)


@settings(deadline=None, max_examples=40)
@given(
    experts=st.integers(1, 3), rows=st.integers(1, 9), columns=st.integers(1, 40), bits=st.integers(1, 8),
    group=st.none() | st.integers(1, 50), scale=st.floats(1e-6, 1e6), tokens=st.integers(0, 50),
)  # fmt: skip
def test_any_shape_gives_finite_values_on_the_grid(experts, rows, columns, bits, group, scale, tokens):
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    weights = torch.randn(experts, rows, columns, generator=generator)
    x = torch.randn(experts, tokens, columns, generator=generator) * scale
    result = gptq(weights, x.mT @ x, grid := AffineGrid(bits, group))
    index = torch.arange(columns) // (group or columns)
    on_grid = grid.scales[..., index] * result.codes + grid.offsets[..., index]
    assert torch.isfinite(result.values).all()
    torch.testing.assert_close(result.values, on_grid)


def test_a_searched_range_is_never_worse_and_much_better_at_two_bits():
    weights = torch.randn(2, 50, 128, generator=torch.Generator().manual_seed(0))
    weights[0, 0, :64] = 1.5
    eye = torch.eye(128).expand(2, 128, 128)
    plain = gptq(weights, eye, AffineGrid(2, 64)).values
    searched = gptq(weights, eye, AffineGrid(2, 64, search=True)).values
    error = {n: (v - weights).square().unflatten(2, (2, 64)).sum(3) for n, v in (("p", plain), ("s", searched))}
    assert (error["s"] <= error["p"] + 1e-5).all()
    assert error["s"].sum() < 0.75 * error["p"].sum()
    assert torch.equal(searched[0, 0, :64], weights[0, 0, :64])


@pytest.mark.parametrize(("bits", "group", "search"), [(2, 16, True), (4, 64, True), (4, 32, False), (8, 64, True)])
def test_symmetric_groups_without_a_hessian_match_the_groupwise_quantizer(bits, group, search):
    weights, hessians = problem(columns=80)
    weights[0, 0, :64] = 0
    grid = SymmetricGrid(bits, group, search=search)
    result = gptq(weights, torch.zeros_like(hessians), grid)
    expected = quantize_groupwise(weights, bits, group, search=search)
    assert torch.equal(grid.scales, expected.scales)
    assert torch.equal(result.codes, expected.codes)
    assert torch.equal(result.values, group_values(expected, bits, group))


def test_symmetric_groups_follow_the_compensated_weights_and_beat_rounding():
    weights, hessians = problem()
    errors = {}
    for static in (False, True):
        grid = SymmetricGrid(3, 16, static=static)
        result = gptq(weights, hessians, grid, GptqSettings(damping=0.01))
        stored = GroupwiseCodes(result.codes, grid.scales, None)
        assert torch.equal(group_values(stored, 3, 16), result.values)
        assert torch.equal(grid.scales, grid.scales.half().float())
        errors[static] = quadratic(weights, result.values, hessians).sum()
    rounded = group_values(quantize_groupwise(weights, 3, 16), 3, 16)
    assert max(errors.values()) < 0.7 * quadratic(weights, rounded, hessians).sum()
    assert errors[False] < errors[True]

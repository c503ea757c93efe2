"""Truncated decompositions against numpy's, and their quantized factors."""

import numpy as np
import pytest
import torch

from moepack.solvers import low_rank
from moepack.solvers.low_rank import decompose, measured_error, quantize_factors, truncated_svd


def matrices(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def residual(target, product):
    return (target - product).square().sum((1, 2)) / target.square().sum((1, 2))


@pytest.mark.parametrize(("rows", "columns"), [(40, 24), (24, 40), (32, 32), (1, 5)])
@pytest.mark.parametrize("rank", [0, 1, 8, 24])
def test_exact_decompositions_are_numpys(rows, columns, rank):
    rank = min(rank, rows, columns)
    target = matrices(3, rows, columns)
    found = truncated_svd(target, rank)
    assert found.left.shape == (3, rank, rows) and found.right.shape == (3, rank, columns)
    u, s, v = np.linalg.svd(target.double().numpy(), full_matrices=False)
    expected = (u[..., :rank] * s[:, None, :rank]) @ v[:, :rank]
    np.testing.assert_allclose(found.product().numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(found.left.norm(dim=2), np.sqrt(s[:, :rank]), rtol=1e-4)


def test_randomised_decompositions_come_close_and_are_deterministic(monkeypatch):
    monkeypatch.setattr(low_rank, "EXACT_SIDE", 8)
    target = matrices(2, 96, 160) + matrices(2, 96, 4, seed=1) @ matrices(2, 4, 160, seed=2) * 50
    found = truncated_svd(target, 12)
    assert torch.equal(found.product(), truncated_svd(target, 12).product())
    s = torch.linalg.svdvals(target)
    best = s[:, 12:].square().sum(1) / s.square().sum(1)
    assert (residual(target, found.product()) <= 1.01 * best).all()
    assert not torch.equal(found.product(), truncated_svd(target, 12, seed=1).product())


def test_a_decomposition_starts_from_the_subspace_of_a_similar_matrix(monkeypatch):
    target = matrices(2, 96, 160)
    for side in (8, 512):
        monkeypatch.setattr(low_rank, "EXACT_SIDE", side)
        _, space = decompose(target, 12)
        changed = target + 0.1 * matrices(2, 96, 160, seed=1)
        for _ in range(4):
            found, space = decompose(changed, 12, start=space)
        s = torch.linalg.svdvals(changed)
        best = s[:, 12:].square().sum(1) / s.square().sum(1)
        assert (residual(changed, found.product()) <= 1.002 * best).all()


@pytest.mark.parametrize("bits", [3, 8, 16])
@pytest.mark.parametrize("refits", [0, 2])
def test_the_error_is_known_without_the_product(bits, refits):
    target = matrices(3, 40, 72)
    factors, told = quantize_factors(target, truncated_svd(target, 8), bits, 64, refits=refits)
    found = factors.factors()
    left = (target - found.product()).double().square().sum((1, 2)) - target.double().square().sum((1, 2))
    assert torch.allclose(told, left, rtol=1e-4)
    assert torch.allclose(measured_error(target, found), left, rtol=1e-4)


@pytest.mark.parametrize("shape", [(2, 16, 24), (2, 20, 12)])
def test_zero_and_deficient_matrices(shape):
    zero = truncated_svd(torch.zeros(shape), 4)
    assert not zero.product().any()
    one = matrices(2, shape[1], 1) @ matrices(2, 1, shape[2], seed=3)
    found = truncated_svd(one, 6)
    assert torch.allclose(found.product(), one, atol=1e-7)
    for bits in (3, 8, 16):
        for target in (torch.zeros(shape), one):
            packed = quantize_factors(target, truncated_svd(target, 6), bits, 64)[0].factors().product()
            assert packed.isfinite().all()
            assert (packed - target).norm() <= (0.3 if bits == 3 else 0.01) * target.norm()


def test_rank_above_the_matrix_is_refused():
    for rank in (-1, 9):
        with pytest.raises(ValueError, match=f"rank {rank} of matrices of 8 x 12"):
            truncated_svd(matrices(1, 8, 12), rank)


@pytest.mark.parametrize("rank", [8, 32, 64])
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_refitting_factors_to_each_other_helps_at_every_rank(bits, rank):
    target = matrices(3, 64, 128)
    exact = truncated_svd(target, rank)
    plain = residual(target, quantize_factors(target, exact, bits, 64, refits=0)[0].factors().product())
    refit = residual(target, quantize_factors(target, exact, bits, 64, refits=2)[0].factors().product())
    assert (refit <= plain + 2e-4).all()
    if bits < 8:
        assert refit.mean() < plain.mean()


def test_integer_factors_cost_little_and_an_all_negative_one_survives():
    target = -matrices(2, 96, 128).abs()
    exact = truncated_svd(target, 16)
    errors = {
        bits: residual(target, quantize_factors(target, exact, bits, 64)[0].factors().product()) for bits in (3, 8, 16)
    }
    assert (errors[8] < errors[16] + 1e-3).all()
    assert (errors[3] < errors[16] + 0.03).all()


def test_sixteen_bits_are_halves():
    target = matrices(1, 16, 16)
    packed, _ = quantize_factors(target, truncated_svd(target, 4), 16, 64)
    assert packed.left.dtype == packed.right.dtype == torch.float16

"""The logarithmic grid: against a loop over all of its values, and compared with the uniform grid."""

import numpy as np
import pytest
import torch

from moepack.errors import InvalidTensorError
from moepack.solvers.groupwise import group_values, quantize_groupwise
from moepack.solvers.logarithmic import round_logarithmic


def gaussian(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02


def nearest(weight: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """The nearest value `+-scale 2^-k` of each weight, by exhaustive search."""
    powers = 2.0 ** -np.arange(2 ** (bits - 1))
    grid = np.concatenate([powers, -powers]) * scales[..., None]
    return np.take_along_axis(grid, np.abs(weight[..., None] - grid).argmin(-1, keepdims=True), -1)[..., 0]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_largest_magnitude_as_scale_gives_the_nearest_values(bits: int) -> None:
    weight = gaussian(9, 70).double().numpy()
    scales = np.broadcast_to(np.abs(weight).max(1, keepdims=True), weight.shape)
    found = round_logarithmic(torch.from_numpy(weight), bits, search=False)
    np.testing.assert_allclose(found.numpy(), nearest(weight, scales, bits), rtol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_searched_scale_is_near_the_best_there_is(bits: int) -> None:
    weight = gaussian(6, 128)
    found = (round_logarithmic(weight, bits) - weight).square().sum(1).numpy()
    rows = weight.numpy().astype(np.float64)
    best = np.full(len(rows), np.inf)
    for step in np.linspace(0.15, 1.5, 500):
        scales = np.broadcast_to(step * np.abs(rows).max(1, keepdims=True), rows.shape)
        best = np.minimum(best, np.square(nearest(rows, scales, bits) - rows).sum(1))
    assert (found <= 1.02 * best).all()
    fixed = (round_logarithmic(weight, bits, search=False) - weight).square().sum()
    assert found.sum() < fixed


def test_groups_are_rows_of_their_own() -> None:
    weight = gaussian(4, 96)
    assert torch.equal(round_logarithmic(weight, 3, 32), round_logarithmic(weight.reshape(12, 32), 3).reshape(4, 96))


def test_it_loses_to_uniform_steps_on_gaussian_weights() -> None:
    weight = gaussian(64, 256)
    for bits in (2, 3, 4):
        uniform = group_values(quantize_groupwise(weight, bits, None), bits, None)
        assert (round_logarithmic(weight, bits) - weight).norm() > (uniform - weight).norm()


def test_odd_input() -> None:
    weight = torch.tensor([[0.0, 0.0], [1.0, -1.0], [1e30, 1e-30]])
    found = round_logarithmic(weight, 4)
    assert torch.equal(found[:2], weight[:2]) and bool(found.isfinite().all())
    assert round_logarithmic(torch.zeros(0, 3, 8), 2).shape == (0, 3, 8)
    assert round_logarithmic(torch.zeros(2, 0), 2).shape == (2, 0)
    with pytest.raises(InvalidTensorError):
        round_logarithmic(torch.tensor([[torch.nan]]), 4)
    for bits, size in ((1, None), (9, None), (4, 3)):
        with pytest.raises(ValueError, match="no logarithmic grid"):
            round_logarithmic(weight, bits, size)

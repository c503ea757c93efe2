"""Rows of the embedding and the head are rounded with compensation in their metric."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moepack.methods.rate import vocabulary
from moepack.methods.rate.scales import Scales
from moepack.methods.rate.step_size import encoded
from moepack.methods.rate.vocabulary import solved_rows
from moepack.solvers.priced import Lengths, Profile, round_priced, scale_of, worth_of
from moepack.solvers.uniform import UniformSettings

STEP = 0.5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lengths_of(matrix: Tensor, dependent: bool) -> Lengths:
    profile = Profile()
    profile.add(matrix, 1.0)
    return profile.lengths(STEP, worth_of(dependent), dependent)


def scales(rows: int, columns: int) -> Scales:
    """Return factors that are powers of two, so that scaled weights are exact."""
    return Scales(2.0 ** drawn(1, rows, seed=1).round(), 2.0 ** drawn(1, columns, seed=2).round())


@pytest.mark.parametrize("dependent", [False, True])
def test_the_error_in_the_metric_falls_at_the_same_size(dependent: bool) -> None:
    """The metric is that of the weights; the factors of columns are divided out."""
    rows, columns = 256, 48
    own = scales(rows, columns)
    scaled = drawn(rows, columns)
    matrix = scaled / (own.rows[0, :, None] * own.columns[0])
    inputs = drawn(400, 6, seed=3) @ drawn(6, columns, seed=4) * own.columns
    metric, lengths = inputs.T @ inputs / 400, lengths_of(scaled, dependent)
    settings = UniformSettings(largest=lengths.largest, even=True)
    rounded = round_priced(scaled, STEP, lengths, lengths.worth)
    solved = solved_rows(matrix, own, metric, STEP, lengths, settings)
    losses, sizes = [], []
    for codes in (rounded, solved):
        of_rows, of_columns = own.stored(scale_of(STEP, dependent))
        error = (codes * of_rows[0, :, None] * of_columns[0] - matrix) * own.rows[0, :, None]
        losses.append(float(((error @ metric) * error).sum()))
        sizes.append(encoded(codes[None].contiguous(), lengths.largest, dependent).nbytes)
    assert losses[1] < 0.6 * losses[0] and sizes[1] < 1.03 * sizes[0]


def test_blocks_of_rows_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's codes do not depend on other blocks, and progress counts every weight once."""
    matrix, own, metric = drawn(300, 32), scales(300, 32), torch.eye(32)
    lengths = lengths_of(own.scaled(0, matrix), True)
    monkeypatch.setattr(vocabulary, "BLOCK", 64 * 32)
    passed: list[int] = []
    whole = solved_rows(matrix, own, metric, STEP, lengths, UniformSettings(even=True), passed.append)
    part = Scales(own.rows[:, 64:128], own.columns)
    alone = solved_rows(matrix[64:128], part, metric, STEP, lengths, UniformSettings(even=True))
    assert torch.equal(whole[64:128], alone)
    assert passed == [64 * 32] * 4 + [44 * 32]


@pytest.mark.parametrize(("size", "dtype"), [(40.0, torch.int16), (40_000.0, torch.int32)])
def test_large_codes_have_a_wider_type(size: float, dtype: torch.dtype) -> None:
    matrix, own = drawn(128, 32), Scales(torch.ones(1, 128), torch.ones(1, 32))
    lengths = lengths_of(matrix, True)
    matrix[100, 3] = size
    codes = solved_rows(matrix, own, torch.eye(32), STEP, lengths, UniformSettings(even=True))
    assert codes.dtype == dtype and abs(float(codes[100, 3]) * scale_of(STEP, True) - size) < STEP


def test_weights_that_are_not_finite_are_refused() -> None:
    matrix, own = drawn(64, 32), Scales(torch.ones(1, 64), torch.ones(1, 32))
    lengths = lengths_of(matrix, True)
    matrix[5, 3] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        solved_rows(matrix, own, torch.eye(32), STEP, lengths, UniformSettings(even=True))

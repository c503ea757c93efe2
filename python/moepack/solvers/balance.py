"""The magnitudes of the rows and columns of matrices.

Factors a of rows and b of columns *balance* a matrix W if the mean magnitude of W[i, j] / (a[i] b[j]) is 1 over each
row and each column (Sinkhorn and Knopp, 1967). The same function can be written with any scale of rows and columns,
compensated by the gain of a norm or the outputs of the layer before. Such scales change a and b but not the balanced
matrix, so decisions on balanced matrices do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Balance", "Matrices", "balance", "column_magnitudes", "row_magnitudes"]

EXPERTS, ROWS = 16, 256
"""Matrices per tensor, and approximate rows per matrix, from which column magnitudes are estimated."""

ROUNDS = 8
"""Rounds over rows and columns, after which magnitudes change by less than a hundredth."""

CHUNK, IN_CACHE = 1 << 22, 1 << 18
"""Weights processed together, in float32, and in float64, where passes over more take five times as long."""


@dataclass(frozen=True)
class Matrices:
    """Matrices of one shape, read one at a time.

    Attributes:
        shape: number of experts, rows and columns.
        expert: returns matrix i, [R, C], in any floating-point dtype.
    """

    shape: tuple[int, int, int]
    expert: Callable[[int], Tensor]


@dataclass(frozen=True)
class Balance:
    """Mean magnitudes; 1 where there are no weights or only zeros.

    Attributes:
        rows: [E, R] float32.
        columns: [1, C] float32 if all matrices share them, otherwise [E, C].
    """

    rows: Tensor
    columns: Tensor


def balance(tensors: Sequence[Matrices]) -> list[Balance]:
    """Balance the matrices of tensors that read the same input; the tensors share the column factors.

    A single tensor has separate column factors for each matrix. Non-finite weights give non-finite factors.
    """
    if len(tensors) == 1:
        (tensor,) = tensors
        columns = [_columns([_sampled(tensor.expert(expert))]) for expert in range(tensor.shape[0])]
        shared = torch.stack(columns) if columns else torch.ones(0, tensor.shape[2])
    else:
        shared = _columns([rows for tensor in tensors for rows in _samples(tensor)])[None]
    return [Balance(_rows(tensor, shared), shared) for tensor in tensors]


def _samples(tensor: Matrices) -> Iterator[Tensor]:
    """Yield sampled rows of some matrices."""
    experts = tensor.shape[0]
    for number in range(min(experts, EXPERTS)):
        yield _sampled(tensor.expert(number * experts // min(experts, EXPERTS)))


def _sampled(matrix: Tensor) -> Tensor:
    """Return the magnitudes of evenly spaced rows of a matrix, float32."""
    return matrix[:: max(1, len(matrix) // ROWS)].float().abs()


def _columns(samples: Sequence[Tensor]) -> Tensor:
    """Return the column factors [C] that balance the concatenated magnitudes [N, C]."""
    magnitudes = torch.cat(list(samples))
    found = torch.ones(magnitudes.shape[1])
    if not magnitudes.numel():
        return found
    for _ in range(ROUNDS):
        rows = _positive((magnitudes / found).mean(1, keepdim=True))
        found = _positive((magnitudes / rows).mean(0))
    return found


def column_magnitudes(rows: Tensor) -> Tensor:
    """Return the column factors [C] that balance sampled rows [N, C], float64; 1 where there are only zeros.

    Non-finite weights count as zeros, because the packing method reports them.
    """
    magnitudes = rows.double().abs().nan_to_num_(0.0, 0.0, 0.0)
    found = torch.ones(magnitudes.shape[1], dtype=torch.float64)
    for _ in range(ROUNDS if magnitudes.numel() else 0):
        own = _positive(magnitudes @ (1 / found) / len(found))
        found = _positive((1 / own) @ magnitudes / len(magnitudes))
    return found


def row_magnitudes(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the row factors [N] of rows [N, C] for known column factors [C], float64; 1 for rows of zeros."""
    inverse, height = 1 / columns, max(1, IN_CACHE // max(len(columns), 1))
    found = torch.zeros(len(rows), dtype=torch.float64)
    for first in range(0, len(rows), height):
        magnitudes = rows[first : first + height].abs().double().nan_to_num_(0.0, 0.0, 0.0)
        found[first : first + height] = magnitudes @ inverse
    return _positive(found / max(len(columns), 1))


def _rows(tensor: Matrices, columns: Tensor) -> Tensor:
    """Return row factors [E, R] for known column factors."""
    experts, rows, width = tensor.shape
    if not width:
        return torch.ones(experts, rows)
    height = max(CHUNK // width, 1)
    found = torch.ones(experts, rows)
    for expert in range(experts):
        own, matrix = 1 / columns[expert % len(columns)], tensor.expert(expert)
        for first in range(0, rows, height):
            found[expert, first : first + height] = (matrix[first : first + height].abs().float() @ own) / width
    return _positive(found)


def _positive(means: Tensor) -> Tensor:
    """Replace zeros by 1."""
    return torch.where(means == 0, 1.0, means)

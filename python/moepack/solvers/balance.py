"""The magnitudes of the rows and columns of matrices.

Factors a of rows and b of columns *balance* a matrix W where the mean magnitude of W[i, j] / (a[i] b[j]) is 1 over each
row and each column (Sinkhorn and Knopp, 1967). One function can be written with rows and columns of any scale, against
the gain of a norm or the outputs of the layer before. Such scales change a and b, and leave the balanced matrix as it
is. Decisions on balanced matrices do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Balance", "Matrices", "balance"]

EXPERTS, ROWS = 16, 256
"""Matrices of a tensor, and rows of a matrix, about, that tell the magnitudes of columns."""

ROUNDS = 8
"""Rounds over rows and columns: magnitudes then change by less than a hundredth."""

CHUNK = 1 << 22
"""Weights that are looked at together."""


@dataclass(frozen=True)
class Matrices:
    """Matrices of one shape, read one at a time.

    Attributes:
        shape: of all of them, experts, rows and columns.
        expert: gives matrix i, [R, C], in any floating type.
    """

    shape: tuple[int, int, int]
    expert: Callable[[int], Tensor]


@dataclass(frozen=True)
class Balance:
    """Mean magnitudes, 1 where there are no weights or none but zeros.

    Attributes:
        rows: [E, R] float32.
        columns: [1, C] float32 where all matrices share them, else [E, C].
    """

    rows: Tensor
    columns: Tensor


def balance(tensors: Sequence[Matrices]) -> list[Balance]:
    """Balance the matrices of tensors that read the same input: all of them share the factors of columns.

    A tensor alone has factors of columns for each of its matrices. Weights that are not finite give such factors.
    """
    if len(tensors) == 1:
        (tensor,) = tensors
        columns = [_columns([_sampled(tensor.expert(expert))]) for expert in range(tensor.shape[0])]
        shared = torch.stack(columns) if columns else torch.ones(0, tensor.shape[2])
    else:
        shared = _columns([rows for tensor in tensors for rows in _samples(tensor)])[None]
    return [Balance(_rows(tensor, shared), shared) for tensor in tensors]


def _samples(tensor: Matrices) -> Iterator[Tensor]:
    """Rows of some matrices."""
    experts = tensor.shape[0]
    for number in range(min(experts, EXPERTS)):
        yield _sampled(tensor.expert(number * experts // min(experts, EXPERTS)))


def _sampled(matrix: Tensor) -> Tensor:
    """The magnitudes of some rows of a matrix, at even distances, float32."""
    return matrix[:: max(1, len(matrix) // ROWS)].float().abs()


def _columns(samples: Sequence[Tensor]) -> Tensor:
    """The factors of columns [C] that balance magnitudes [N, C] below one another."""
    magnitudes = torch.cat(list(samples))
    found = torch.ones(magnitudes.shape[1])
    if not magnitudes.numel():
        return found
    for _ in range(ROUNDS):
        rows = _positive((magnitudes / found).mean(1, keepdim=True))
        found = _positive((magnitudes / rows).mean(0))
    return found


def _rows(tensor: Matrices, columns: Tensor) -> Tensor:
    """Factors of rows [E, R] for known factors of columns."""
    experts, rows, width = tensor.shape
    if not width:
        return torch.ones(experts, rows)
    height = max(CHUNK // width, 1)
    found = torch.ones(experts, rows)
    for expert in range(experts):
        own, matrix = 1 / columns[expert % len(columns)], tensor.expert(expert)
        for first in range(0, rows, height):
            found[expert, first : first + height] = (matrix[first : first + height].float().abs() @ own) / width
    return _positive(found)


def _positive(means: Tensor) -> Tensor:
    """Means, and 1 for zero."""
    return torch.where(means == 0, 1.0, means)

"""Sums of squared gradients over the rows and the columns of matrices.

A gradient of a matrix [R, C] is given whole, or by factors left [n, R] and right [n, C] of n rows of a window, as
left^T right. With factors b of the columns, the sum over columns of squares is a quadratic form in each row's entries:

    sum over c of b_c^2 (left^T right)_rc^2 = left_r^T (right diag(b)^2 right^T) left_r,

and likewise over rows. Few rows need less work than the matrix (`Sums.add_factors`), and no memory of its size.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Sums"]

CHUNK = 1 << 17
"""Elements of a matrix that are squared and summed at a time: half a megabyte, which caches hold."""

PASS = 128
"""Multiplications that take as long as forming an element of a gradient, squaring it and adding it to three sums."""


class Sums:
    """Sums of the squares of matrices [E, R, C].

    Attributes:
        rows: [E, R], squared factors of the rows.
        columns: [E, C], squared factors of the columns.
        total: the sum of all squares, float64.
        by_row: [E, R], sums over the columns, times `columns`.
        by_column: [E, C], sums over the rows, times `rows`.
    """

    def __init__(self, rows: Tensor, columns: Tensor) -> None:
        """Start sums for squared factors of rows [E, R] and of columns, [E, C] or [1, C]."""
        self.rows, self.columns = rows, columns.expand(len(rows), -1)
        self.total = torch.zeros((), dtype=torch.float64, device=rows.device)
        self.by_row, self.by_column = torch.zeros_like(rows), rows.new_zeros(self.columns.shape)

    def add(self, matrices: Tensor) -> None:
        """Add the matrices [E, R, C]."""
        for expert, matrix in enumerate(matrices):
            self.add_matrix(expert, matrix)

    def add_matrix(self, expert: int, matrix: Tensor) -> None:
        """Add one matrix [R, C].

        A chunk of rows is squared and summed while it is in the cache, so that a matrix is read from memory once.
        """
        by_row, by_column, rows, columns = (
            each[expert] for each in (self.by_row, self.by_column, self.rows, self.columns)
        )
        if matrix.stride(-1) != 1 and matrix.stride(-2) == 1:  # stored by columns
            by_column, by_row, columns, rows, matrix = by_row, by_column, rows, columns, matrix.mT
        for part in _chunks(matrix, matrix.shape[-1]):
            squares = matrix[part].square()
            self.total += squares.sum().double()
            by_row[part].addmv_(squares, columns)
            by_column.addmv_(squares.T, rows[part])

    def add_factors(self, expert: int, left: Tensor, right: Tensor) -> None:
        """Add left^T right for left [n, R] and right [n, C]."""
        (count, height), width = left.shape, right.shape[1]
        if 3 * count * count * (height + width) > (count + PASS) * height * width:
            self.add_matrix(expert, left.mT @ right)
            return
        self.total += (_gram(left) * _gram(right)).sum().double()
        _add_forms(self.by_row[expert], left, _gram(right, self.columns[expert]))
        _add_forms(self.by_column[expert], right, _gram(left, self.rows[expert]))

    def add_stack(self, left: Tensor, right: Tensor) -> None:
        """Add left^T right for left [E, n, R] and right [E, n, C], in a few operations for all matrices."""
        ours, theirs = left @ left.mT, right @ right.mT
        self.total += (ours * theirs).sum((1, 2)).double().sum()
        form = (right * self.columns[:, None]) @ right.mT
        self.by_row += (form @ left).mul_(left).sum(1).clamp_(min=0)
        form = (left * self.rows[:, None]) @ left.mT
        self.by_column += (form @ right).mul_(right).sum(1).clamp_(min=0)

    def add_rows(self, rows: Tensor, values: Tensor) -> None:
        """Add a matrix with the values [n, C] in different rows [n], and zeros elsewhere; for one matrix."""
        squares = values.square()
        self.total += squares.sum().double()
        self.by_row[0].index_add_(0, rows, squares @ self.columns[0])
        self.by_column[0].addmv_(squares.T, self.rows[0, rows])


def _chunks(matrix: Tensor, width: int) -> list[slice]:
    """Return consecutive parts of a length, of rows with `width` elements; a single part except on the CPU."""
    length = matrix.shape[0]
    step = max(1, (CHUNK if matrix.device.type == "cpu" else length * width) // max(width, 1))
    return [slice(first, first + step) for first in range(0, length, step)]


def _gram(values: Tensor, squares: Tensor | None = None) -> Tensor:
    """Return values diag(squares) values^T, [n, n], for values [n, A]."""
    if squares is None:
        return values @ values.mT
    found = values.new_zeros(len(values), len(values))
    for part in _chunks(values.mT, len(values)):
        found.addmm_(values[:, part] * squares[part], values[:, part].mT)
    return found


def _add_forms(sums: Tensor, values: Tensor, form: Tensor) -> None:
    """Add the quadratic form of each column of values [n, A] to sums [A]; rounding may not make one negative."""
    for part in _chunks(values.mT, len(values)):
        own = values[:, part]
        sums[part] += (form @ own).mul_(own).sum(0).clamp_(min=0)

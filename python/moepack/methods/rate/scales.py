"""Factors of rows and columns that give all weights of a model equal importance, so that one step serves them all.

Weights are multiplied by the factors of their row and column and rounded to the step. The inverse factors are stored: a
scale per row and a scale per column (docs/format.md, section 9). Factors proportional to the root of F, the squared
gradient, would minimize the expected loss at high rates; factors proportional to the inverse magnitude would give every
row and column the same bits. The factors used lie halfway (docs/methods/sensitivity.md): on *balanced* weights, whose
rows and columns have equal magnitudes, they are proportional to F^(SHARE / 2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moepack.calibration.fisher import Sensitivity
from moepack.solvers.balance import Balance

__all__ = ["Scales", "scales_of"]

SHARE = 0.5
"""How far factors follow F, from equal bits (0) to equal loss (1)."""

LEAST = 0.0025
"""Minimum importance of a row or column, relative to the mean of its tensor."""

UNSEEN = 0.5
"""Added to the importance of a token's row, relative to the mean of its tensor, because other texts have other
tokens."""

RARE = 0.1
"""Minimum importance of an expert, relative to the mean of its layer, distributed evenly over its rows and columns,
because other texts choose other experts and a few tokens give little information about rows. More important experts
receive less of it."""

OCTAVE = 8
"""Factor steps per octave. Finer steps would exceed their precision: the last bits of sums depend on the number of
threads."""

BITS = 16
"""Bits of a stored scale, a bfloat16."""


@dataclass(frozen=True)
class Scales:
    """Factors of a tensor.

    Attributes:
        rows: [E, R] float32.
        columns: [E, C] float32, or [1, C] if experts share them; each is the inverse of a bfloat16.
    """

    rows: Tensor
    columns: Tensor

    @property
    def bits(self) -> int:
        """Stored size in bits."""
        return BITS * (self.rows.numel() + self.columns.numel())

    def of(self, experts: range) -> tuple[Tensor, Tensor]:
        """Return the factors of some experts' rows [G, R] and columns [G or 1, C]."""
        group = slice(experts.start, experts.stop)
        return self.rows[group], self.columns if len(self.columns) == 1 else self.columns[group]

    def scaled(self, expert: int, matrix: Tensor, some: slice = slice(None)) -> Tensor:
        """Return the matrix [R, C] of an expert, or some rows of it, times the factors, float32."""
        rows, columns = self.of(range(expert, expert + 1))
        # The factors are float32, and so is the product; a copy in float32 would cost a pass.
        return torch.mul(matrix[some], rows[0, some, None]).mul_(columns[0])

    def stored(self, worth: float | Tensor, experts: range | None = None) -> tuple[Tensor, Tensor]:
        """Return the stored scales of rows [G, R] and columns [G or 1, C] of some or all experts.

        `worth` is the value of one code step in scaled weights. A weight is (row * code) * column, evaluated in this
        order.
        """
        rows, columns = self.of(range(len(self.rows)) if experts is None else experts)
        # The inverse of a column factor is a bfloat16 up to the rounding of the two divisions.
        return (worth / rows).bfloat16().float(), (1 / columns).bfloat16().float()

    def reordered(self, order: Tensor, axis: int) -> Scales:
        """Return a copy with rows (axis 0) or columns (axis 1) of each expert in another order, [E, n]."""
        if axis == 0:
            return replace(self, rows=self.rows.gather(1, order))
        return replace(self, columns=self.columns.expand(len(order), -1).gather(1, order))

    def coarser(self, rows: Tensor) -> Scales:
        """Return a copy with other row factors."""
        return replace(self, rows=rows)


def scales_of(
    balance: Balance, known: Sensitivity | float, inputs: Tensor | None = None, *, tokens: bool = False
) -> Scales:
    """Return factors with which a squared error of a weight has weight 1 on average.

    Args:
        balance: balance of the tensor.
        known: F, or, if it was not measured, the weight of a squared error of a balanced weight.
        inputs: [C] column F if tensors share their column factors; None uses the tensor's own.
        tokens: whether rows are tokens. Their factors follow F fully, because the format's tables belong to rows.
    """
    rows, columns = 1 / balance.rows, 1 / balance.columns
    if not isinstance(known, Sensitivity):
        rows = rows * known**0.5
    elif (mean := float(known.rows.mean())) > 0:
        own = known.rows.mean(1, keepdim=True) / (RARE * mean)
        lacking = RARE * mean / own.clamp(min=1).square()
        by_row = (known.rows + lacking) / mean
        by_row = (by_row + UNSEEN) / (1 + UNSEEN) if tokens else by_row
        by_column = known.columns + lacking if inputs is None else inputs[None]
        by_column = by_column / by_column.mean(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        of_rows = by_row**0.5 if tokens else by_row.clamp(min=LEAST) ** (SHARE / 2)
        of_columns = by_column.clamp(min=LEAST) ** (SHARE / 2)
        counts = mean * float((by_row / of_rows.square()).mean()) * float((by_column / of_columns.square()).mean())
        rows, columns = (rows * of_rows * counts**0.5).float(), (columns * of_columns).float()
    # The stored scale is exact, so rounding it does not change weights.
    return Scales(_stepped(rows), 1 / _stepped(1 / columns).bfloat16().float())


def _stepped(factors: Tensor) -> Tensor:
    """Round to an eighth of an octave."""
    return 2.0 ** (torch.log2(factors).mul(OCTAVE).round() / OCTAVE)

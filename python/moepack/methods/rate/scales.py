"""Factors of rows and columns that make all weights of a model count alike, so that one step serves them.

Weights are multiplied by the factors of their row and their column, rounded to the step, and stored with one over the
factors: a scale a row and a scale a column (docs/format.md, section 9). In proportion to the root of F, the squared
gradient, factors would make the expected loss least at high rates; in proportion to one over the magnitude, they would
give every row and column the same bits. They go halfway (docs/methods/sensitivity.md): on *balanced* weights, whose
rows and columns have equal magnitudes, they are in proportion to F^(SHARE / 2).
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
"""What a row or column counts at least, of the mean of its tensor."""

UNSEEN = 0.5
"""What is added to what the row of a token counts, over the mean of its tensor: other texts have other tokens."""

RARE = 0.1
"""What an expert counts at least, of the mean of its layer, evenly over its rows and columns: other texts choose other
experts, and a few tokens say little of which rows count. Less is added to experts that count more."""

OCTAVE = 8
"""Factors of an octave: finer than they are known, for the last bits of sums depend on the number of threads."""

BITS = 16
"""Bits of a stored scale, a bfloat16."""


@dataclass(frozen=True)
class Scales:
    """Factors of a tensor.

    Attributes:
        rows: [E, R] float32.
        columns: [E, C] float32, or [1, C] where experts share them; each is one over a bfloat16.
    """

    rows: Tensor
    columns: Tensor

    @property
    def bits(self) -> int:
        """Bits that they take."""
        return BITS * (self.rows.numel() + self.columns.numel())

    def of(self, experts: range) -> tuple[Tensor, Tensor]:
        """The factors of some experts' rows [G, R] and columns [G or 1, C]."""
        group = slice(experts.start, experts.stop)
        return self.rows[group], self.columns if len(self.columns) == 1 else self.columns[group]

    def scaled(self, expert: int, matrix: Tensor) -> Tensor:
        """The matrix [R, C] of an expert times the factors, float32."""
        rows, columns = self.of(range(expert, expert + 1))
        return matrix.float() * rows[0, :, None] * columns[0]

    def stored(self, worth: float | Tensor, experts: range | None = None) -> tuple[Tensor, Tensor]:
        """What is stored where a code is worth so much of the scaled weights: the scales of rows [G, R] and of columns
        [G or 1, C] of some experts or all. A weight is (row * code) * column, in this order."""
        rows, columns = self.of(range(len(self.rows)) if experts is None else experts)
        # One over a factor of columns is a bfloat16 but for the rounding of the two divisions.
        return (worth / rows).bfloat16().float(), (1 / columns).bfloat16().float()

    def reordered(self, order: Tensor, axis: int) -> Scales:
        """With rows (axis 0) or columns (axis 1) in another order [E, n], expert by expert."""
        if axis == 0:
            return replace(self, rows=self.rows.gather(1, order))
        return replace(self, columns=self.columns.expand(len(order), -1).gather(1, order))

    def coarser(self, rows: Tensor) -> Scales:
        """With other factors of rows."""
        return replace(self, rows=rows)


def scales_of(
    balance: Balance, known: Sensitivity | float, inputs: Tensor | None = None, *, tokens: bool = False
) -> Scales:
    """Factors with which a squared error of a weight counts 1 on average.

    Args:
        balance: of the tensor.
        known: F; or, where it was not measured, what a squared error of a balanced weight counts.
        inputs: [C] what F of columns is where tensors share their factors; None for the tensor's own.
        tokens: whether rows are tokens; their factors follow F in full, for tables of the format follow rows.
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
    # The stored scale is exact; what was rounded away moves no weight.
    return Scales(_stepped(rows), 1 / _stepped(1 / columns).bfloat16().float())


def _stepped(factors: Tensor) -> Tensor:
    """To an eighth of an octave."""
    return 2.0 ** (torch.log2(factors).mul(OCTAVE).round() / OCTAVE)

"""Integers with one uniform step under error compensation: GPTQ whose decisions account for code length.

A weight v, compensated for the errors of the columns before it, becomes the integer q that minimizes

    c p_j^2 (v - step q)^2 + price * bits(q),

where c p_j^2 is the loss per unit of squared error in its column (`gptq`; c is the mean diagonal of the expert's
Hessian): the increase of the damped output error plus the cost of the code. At one price, the last bit of every row,
column and expert saves the same error. Lengths are those of an entropy coder whose tables follow runs of rows; they
depend on the codes and are found by repeating the pass.

*Dependent* codes (docs/format.md, section 9) form a trellis path in each lane, which consists of every fourth column.
A `Search` finds it, and distributes the errors of each surviving path as GPTQ does (`rust/core/src/solvers/trellis`;
`moepack.backends.gpu.trellis` finds the same codes on a GPU).

Invariants: as for :mod:`moepack.solvers.gptq`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack import _core
from moepack.solvers.gptq import GptqResult, GptqSettings, gptq, reports_of, without_compensation
from moepack.solvers.priced import (
    EXCEPTION_BITS,
    LARGEST,
    MOST,
    WORTH,
    WORTH_OF_DEPENDENT,
    symbols_of,
)
from moepack.solvers.problem import Problem

__all__ = [
    "CodeLengths", "Search", "UniformProblem", "UniformSettings", "in_core", "sampled_lengths", "step_of",
]  # fmt: skip

Search = Callable[..., tuple[Tensor, Tensor]]
"""Finds dependent codes: arguments and results as for `_core.solve_dependent`, as tensors on one device."""

PRIOR = 64.0
"""Weight, in codes, of the frequencies over all rows when the frequencies of a run are estimated."""

LANES = 4
"""Number of sequences of dependent codes in a row: each takes every fourth column."""

ROUNDS = 3
"""Rounds of rounding and counting without compensation."""


@dataclass(frozen=True)
class UniformSettings:
    """Settings of the solver.

    Attributes:
        damping: damping of the Hessians, relative to their mean diagonal. Codes that follow the calibration set's
            covariance too closely do not generalize to other text: 0.2 loses a quarter more there than 0.5 or 1.
        shift: share of the accumulated error of earlier layers that is corrected by moving the weights, 0 to 1.
        shift_damping: damping of that regression.
        worth: squared steps per bit.
        largest: the largest magnitude with its own code length.
        dependent: whether codes may be dependent.
        even: whether errors of all matrices have equal weight because their importance is in their scale. Otherwise the
            Hessians determine the weight.
    """

    damping: float = 0.5
    shift: float = 0.5
    shift_damping: float = 0.2
    worth: float = WORTH
    largest: int = LARGEST
    dependent: bool = False
    even: bool = False


@dataclass(frozen=True)
class CodeLengths:
    """Bits of the symbols of runs of rows: of integers, or of the indices of dependent codes.

    Attributes:
        table: [N, 2 L + 3] float32, bits of the symbols from -L - 1 to L + 1 by run: those with their own code length,
            and one on either side for all beyond.
        runs: [E, R] int64, the run of each row.
        totals: [N] float64, the bits of the counted codes of each run.
    """

    table: Tensor
    runs: Tensor
    totals: Tensor

    @classmethod
    def counted(cls, codes: Tensor, runs: Tensor, largest: int = LARGEST, *, dependent: bool = False) -> CodeLengths:
        """Return lengths from int32 codes [E, R, C] and the runs [E, R] of their rows, numbered from 0."""
        counts = _counts(codes, runs, largest, dependent)
        every = counts.sum(0) + 0.5
        frequencies = counts + PRIOR * every / every.sum()
        bits = -torch.log2(frequencies / frequencies.sum(1, keepdim=True))
        bits[:, [0, -1]] += EXCEPTION_BITS
        return cls(bits.float(), runs, (counts * bits).sum(1))

    def of(self, codes: Tensor) -> Tensor:
        """Return bits of integers [E, R], one per row, or [E, R, C]."""
        runs = self.runs if codes.dim() == 2 else self.runs[..., None]
        width = self.table.shape[1]
        places = _symbols(codes, width // 2 - 1) + runs * width
        return self.table.view(-1).index_select(0, places.flatten()).view(codes.shape)


def _counts(codes: Tensor, runs: Tensor, largest: int, dependent: bool) -> Tensor:
    """Return the counts of the symbols of each run, [N, 2 L + 3] float64."""
    number, width = int(runs.max()) + 1 if runs.numel() else 1, 2 * largest + 3
    if codes.device.type == "cpu":
        given = codes.contiguous().numpy(), runs.contiguous().numpy()
        return torch.from_numpy(_core.count_symbols(*given, number=number, largest=largest, dependent=dependent))
    places = (_symbols(symbols_of(codes, dependent), largest) + runs[..., None] * width).flatten()
    return torch.bincount(places, minlength=number * width).view(number, width).double()


def _symbols(codes: Tensor, largest: int) -> Tensor:
    """Return the positions of integers in a run's table, int64."""
    return codes.clamp(-largest - 1, largest + 1).long() + (largest + 1)


def _cheapest(exact: Tensor, prices: Tensor, lengths: CodeLengths) -> Tensor:
    """Choose the cheapest of the nearest integer, the next one towards zero, and zero.

    Args:
        exact: [E, R] or [E, R, C], in steps.
        prices: broadcastable to `exact`, squared steps per bit.
        lengths: bits of the codes.

    Returns:
        Integers of the shape and dtype of `exact`.
    """
    best = exact.round().clamp_(-MOST, MOST)
    inner, least = best - best.sign(), (exact - best).square_().addcmul_(prices, lengths.of(best))
    for other in (inner, torch.zeros_like(exact)):
        cost = (exact - other).square_().addcmul_(prices, lengths.of(other))
        cheaper = cost < least
        best, least = torch.where(cheaper, other, best), torch.where(cheaper, cost, least)
    return best


def sampled_lengths(exact: Tensor, prices: Tensor, largest: int = LARGEST, *, dependent: bool = False) -> CodeLengths:
    """Return code lengths of values rounded without compensation, by alternating rounding and counting.

    Args:
        exact: [E, R, C] float32 on the CPU, in steps; each expert is a run.
        prices: [E], squared steps per bit.
        largest: the largest magnitude with its own code length.
        dependent: whether codes are dependent.
    """
    runs = torch.arange(len(exact))[:, None].expand(exact.shape[:2])
    codes = exact.round().clamp_(-MOST, MOST).int()
    lengths = CodeLengths.counted(codes, runs, largest)
    given, costs = exact.contiguous().numpy(), prices.float().numpy()
    for _ in range(ROUNDS):
        table = lengths.table[: len(exact), 1:-1].contiguous().numpy()
        codes = torch.from_numpy(_core.round_samples(given, table, costs, dependent=dependent))
        lengths = CodeLengths.counted(codes, runs, largest, dependent=dependent)
    return lengths


def step_of(price: float, curvature: float, worth: float) -> float:
    """Return the step, a bfloat16, at which a bit is worth `worth` squared steps.

    Args:
        price: loss per bit.
        curvature: loss per unit of squared error.
        worth: squared steps per bit.
    """
    return max(float(torch.tensor((price / (worth * curvature)) ** 0.5).bfloat16()), torch.finfo(torch.bfloat16).tiny)


class _UniformGrid:
    """Multiples of a step, chosen by error and length: a `moepack.solvers.grids.Grid`."""

    group_size: int | None = None

    def __init__(self, step: float, prices: Tensor, lengths: CodeLengths) -> None:
        """Create the grid; prices [E] are squared steps per bit at curvature 1."""
        self.step, self.prices, self.lengths = step, prices, lengths

    def fit(self, weights: Tensor) -> None:
        """Do nothing: the step is given."""

    def enter(self, start: int, weights: Tensor) -> None:
        """Do nothing: there are no groups."""

    def quantize(self, values: Tensor, columns: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the cheapest integer."""
        codes = _cheapest(values / self.step, (self.prices / curvature)[:, None], self.lengths)
        return codes.int(), codes * self.step


class UniformProblem(Problem):
    """A batch of matrices to round to multiples of a step or to dependent codes.

    Attributes:
        curvature: [E], loss per unit of squared weight error: `importance` times the mean of the Hessian's factors.
    """

    def __init__(
        self,
        weights: Tensor,
        hessians: Tensor,
        drift: Tensor | None = None,
        settings: UniformSettings | None = None,
        *,
        dependent: bool = False,
        search: Search | None = None,
    ) -> None:
        """Factorize the Hessians and move the weights; arguments as for `Problem`.

        Dependent codes are solved lane by lane (docs/format.md, section 9), by `search` (`in_core`, by default).
        """
        self.settings, self.dependent, self.search = settings or UniformSettings(), dependent, search or in_core
        super().__init__(weights, hessians, drift, self.settings, LANES if dependent else 1)
        self.curvature = self.importance * self.factors.pivots.square().mean(1)
        if self.settings.even:
            self.importance, self.curvature = self.importance / self.curvature, torch.ones_like(self.curvature)

    def solve(self, step: float, price: float, lengths: CodeLengths) -> GptqResult:
        """Quantize all rows.

        Args:
            step: the value of one integer, or of four dependent codes.
            price: output error per bit.
            lengths: expected bits of the symbols.

        Returns:
            Codes [E, R, C] int32, their values, and reports of the experts.
        """
        prices = (price / (step * step * self.importance)).float()
        if self.dependent:
            return self._solve_dependent(step, prices * (WORTH_OF_DEPENDENT / WORTH), lengths)
        grid, settings = _UniformGrid(step, prices, lengths), GptqSettings(self.settings.damping)
        return gptq(self.weights, self.hessians, grid, settings, factors=self.factors)

    def _solve_dependent(self, step: float, prices: Tensor, lengths: CodeLengths) -> GptqResult:
        factors, fixed = self.factors, (prices, lengths.table, lengths.runs)
        while True:
            codes, loss = self.search(self.weights, factors.upper, factors.pivots, *fixed, step=step)
            losses = loss * (step / 4) ** 2
            if not without_compensation(factors, losses):
                break
        return GptqResult(codes, codes * (step / 4), reports_of(factors, losses))


def in_core(*given: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """Search on the CPU: a `Search` for tensors on any device."""
    device = given[0].device
    codes, losses = _core.solve_dependent(*(each.cpu().contiguous().numpy() for each in given), step=step)
    return torch.from_numpy(codes).to(device), torch.from_numpy(losses).to(device)

"""Rounding of the embedding and the head: the error of a column is compensated in the metric of their rows.

The embedding and the head have one row per token and no inputs that a layer could be solved on. Their errors still add
up along the columns, because final hidden states and gradients are far from uncorrelated
(`moepack.calibration.metrics`). Rows are solved as those of other tensors are (`moepack.solvers.uniform`), with the
metric in place of the Hessian. Rows do not depend on each other, so blocks of them are solved one after the other, and
memory beyond the metric does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moepack.methods.rate.sample import stream_rows
from moepack.methods.rate.scales import Scales
from moepack.solvers.priced import WORTH, Lengths, round_priced
from moepack.solvers.uniform import CodeLengths, UniformProblem, UniformSettings

__all__ = ["DAMPING", "solved_rows"]

BLOCK = 1 << 21
"""Weights of a block of rows. It does not depend on the machine, because code lengths depend on it slightly."""

DAMPING = 0.1
"""Damping of the metric, relative to its mean diagonal. Every token of the text contributes to it, so it needs less
than the Hessians of layers (docs/methods/sensitivity.md)."""

DTYPES = (torch.int8, torch.int16, torch.int32)


def solved_rows(
    matrix: Tensor,
    scales: Scales,
    metric: Tensor,
    step: float,
    lengths: Lengths,
    settings: UniformSettings,
    advance: Callable[[int], None] = lambda _: None,
) -> Tensor:
    """Return the codes of a matrix, [R, C] in the narrowest signed dtype of 8 to 32 bits that holds them.

    Args:
        matrix: [R, C] weights.
        scales: their factors.
        metric: [C, C] metric of the rows of `matrix`.
        step: step of the scaled weights.
        lengths: code lengths of rounded weights, from which those of the codes are found.
        settings: settings of the solver.
        advance: callback for the number of weights just solved.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    rows, columns = matrix.shape
    codes = torch.empty(rows, columns, dtype=torch.int8)
    run = stream_rows(columns)
    height = max(BLOCK // max(columns, 1) // run, 1) * run
    per = scales.columns[0, :, None] * scales.columns[0]
    problem: UniformProblem | None = None
    for first in range(0, rows, height):
        weights = scales.scaled(0, matrix, slice(first, first + height))[None]
        runs = (torch.arange(weights.shape[1]) // run)[None]
        rounded = round_priced(weights[0], step, lengths, lengths.worth)[None]
        known = CodeLengths.counted(rounded, runs, settings.largest, dependent=lengths.dependent)
        if problem is None:
            problem = UniformProblem(weights, (metric / per)[None], None, settings, dependent=lengths.dependent)
        problem.weights = weights
        block = problem.solve(step, WORTH * step * step, known).codes[0]
        wide = [each for each in DTYPES if int(block.abs().max()) <= torch.iinfo(each).max]
        codes = codes.to(torch.promote_types(codes.dtype, wide[0]))
        codes[first : first + height] = block
        advance(block.numel())
    return codes

"""Solves a stage on the inputs that a text gives it: integers in groups of columns, or a codebook per row.

Hessians weight each token by the effect of an error on the block's output, and have a ridge where experts saw few
tokens. The weights of experts are moved to undo a share of the error of earlier layers; linear layers outside the
experts lose less without this (docs/methods/qmoe.md).

The minimizer of the output error shrinks outputs, and a model suffers more from lost energy than from the same error
elsewhere. So each row is finally multiplied by the factor that restores its output's energy: mixtral-25m at 2 bits then
loses 0.86 and 0.84 times as much on two texts, with 0.9 times the divergence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from moepack.backends.gpu import columns
from moepack.backends.gpu.device import supports
from moepack.errors import InvalidTensorError
from moepack.methods.base import Solution, Stage, Weights
from moepack.solvers.codebooks import ClusterSettings, cluster, look_up
from moepack.solvers.drift import corrected
from moepack.solvers.energy import energy_factors
from moepack.solvers.fixed_point import fixed_point
from moepack.solvers.integers import IN_TORCH, IntegerSettings, solve_integers
from moepack.solvers.ridge import with_ridge

__all__ = ["Grid", "book_settings", "solve_on_inputs", "solve_without_inputs"]

Grid = IntegerSettings | ClusterSettings
"""How a tensor is stored, and the settings of its solver."""

DAMPING, CENTROID_BITS = 0.5, 16
"""Damping of the Hessians of codebooks, as of `IntegerSettings`; bits of a centroid."""

SHIFT, SHIFT_DAMPING = 0.25, 0.2
"""Share of the accumulated error of earlier layers that is corrected by moving the weights; damping of that
regression, relative to the mean diagonal of the Hessian."""


def book_settings(bits: int) -> ClusterSettings:
    """Return the settings of a codebook of 2^bits centroids per row."""
    return ClusterSettings(bits, damping=DAMPING)


def solve_on_inputs(stage: Stage, grid_of: Callable[[Weights], Grid]) -> dict[str, Solution]:
    """Quantize the tensors of a stage, which share the Hessians."""
    assert stage.inputs is not None
    moments = stage.moments(drift=not stage.dense)
    hessians, drift = with_ridge(moments.hessians, stage.inputs.tokens), moments.drift
    found = {}
    for name, weights in stage.weights.items():
        own = stage.tensors[name]
        try:
            found[name] = _solved(weights, hessians, drift, grid_of(own), stage.experts)
        except InvalidTensorError as cause:
            raise InvalidTensorError(cause.detail, tensor=own.name) from cause
        stage.advance(weights.numel())
    return found


def solve_without_inputs(stage: Stage, settings: ClusterSettings) -> dict[str, Solution]:
    """Cluster one tensor that no text reaches, expert by expert; every column has equal weight."""
    ((name, weights),) = stage.tensors.items()
    experts, _, columns = weights.shape
    none = torch.zeros(1, columns, columns)
    parts = []
    for expert in range(experts):
        parts.append(_clustered(weights.expert(expert).float()[None], none, settings, (expert,)).parts)
        stage.advance(weights.shape[1] * columns)
    return {name: Solution({key: torch.cat([part[key] for part in parts]) for key in parts[0]})}


def _solved(weights: Tensor, hessians: Tensor, drift: Tensor | None, grid: Grid, experts: Iterable[int]) -> Solution:
    target = weights if drift is None else corrected(weights, hessians, drift, SHIFT, SHIFT_DAMPING)
    if isinstance(grid, ClusterSettings):
        return _clustered(target, hessians, grid, experts)
    loops = columns.LOOPS if supports(target.device) else IN_TORCH
    solved = solve_integers(target, hessians, grid, loops)
    matched = solved.grid.scaled(energy_factors(target, solved.values, hessians))
    parts = {"codes": solved.codes, "scales": matched.scales}
    if matched.offsets is not None:
        parts["offsets"] = matched.offsets
    values = matched.values(solved.codes.float())
    return Solution(parts, values, rounded=_named(experts, (report.reason for report in solved.reports)))


def _clustered(target: Tensor, hessians: Tensor, settings: ClusterSettings, experts: Iterable[int]) -> Solution:
    found = cluster(target, hessians, torch.zeros_like(hessians), settings)
    factors = energy_factors(target.cpu(), look_up(found.codes, found.centroids, None), hessians.cpu())
    books = fixed_point(found.centroids * factors[..., None, None], CENTROID_BITS).values()
    parts = {"codes": found.codes, "centroids": books, "objectives": found.objectives}
    return Solution(parts, look_up(found.codes, books, None), rounded=_named(experts, found.reasons))


def _named(experts: Iterable[int], reasons: Iterable[str | None]) -> dict[int, str]:
    """Return the experts that were rounded without their inputs, with the reason."""
    return {expert: reason for expert, reason in zip(experts, reasons, strict=True) if reason is not None}

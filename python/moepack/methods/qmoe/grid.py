"""Solves a layer's stages on the form's own grid, with calibration (QMoE, section 3.2) or by rounding only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.backends.gpu import columns
from moepack.backends.gpu.device import supports
from moepack.calibration import Stage
from moepack.methods.qmoe.forms import Form
from moepack.solvers.drift import corrected
from moepack.solvers.energy import energy_factors
from moepack.solvers.gptq import ExpertReport, GptqSettings, gptq
from moepack.solvers.grids import AffineGrid, TernaryGrid
from moepack.solvers.refit import refit_groups

__all__ = ["GridSolver", "Rounding"]

Solved = tuple[Tensor, Tensor, Tensor, tuple[ExpertReport, ...]]
"""Codes [G, R, C], stored parameters [G, R, P], values [G, R, C], and reports of the experts (empty for rounding)."""

#: Damping of the regression that undoes the drift, relative to the mean diagonal of the Hessian.
DRIFT_DAMPING = 0.2


class Rounding:
    """Rounds to nearest."""

    def solve(self, stage: Stage, form: Form) -> Solved:
        """Quantize a stage."""
        weights = torch.cat(list(stage.weights.values()), dim=1)
        grid = form.grid()
        none = torch.zeros_like(weights[:, :1]).expand(-1, weights.shape[2], -1)
        result = gptq(weights, none, grid)
        return result.codes, form.parameters(grid), result.values, ()


@dataclass(frozen=True)
class GridSolver:
    """GPTQ, with corrections that make its result generalize to the whole model and other texts.

    See `Qmoe` for settings.
    """

    settings: GptqSettings
    drift: float
    weigh_tokens: bool
    refit: bool
    match_energy: bool

    def solve(self, stage: Stage, form: Form) -> Solved:
        """Quantize a stage. Its projections share the Hessians, so their rows form one problem."""
        weights = torch.cat(list(stage.weights.values()), dim=1)
        hessians, wanted = self._target(stage, weights)
        grid = form.grid()
        rounder = columns.round_columns if isinstance(grid, TernaryGrid) and supports(wanted.device) else None
        result = gptq(wanted, hessians, grid, self.settings, rounder=rounder)
        values = result.values
        if self.refit and isinstance(grid, AffineGrid):
            values = refit_groups(wanted, result.codes, hessians, grid, self.settings.damping)
        parameters = form.parameters(grid)
        if self.match_energy:
            parameters = form.scaled(parameters, energy_factors(weights, values, hessians))
            values = form.values(result.codes, parameters)
        return result.codes, parameters, values, result.reports

    def _target(self, stage: Stage, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Hessians, and the weights to approximate."""
        if not self.weigh_tokens and not self.drift:
            return stage.hessians(), weights
        moments = stage.moments(drift=bool(self.drift))
        hessians = moments.hessians if self.weigh_tokens else stage.hessians()
        if moments.drift is None:
            return hessians, weights
        return hessians, corrected(weights, moments.hessians, moments.drift, self.drift, DRIFT_DAMPING)

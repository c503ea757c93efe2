"""A batch of matrices with Hessians, ready for error compensation: the common base of the rate-constrained solvers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moepack.allocation.importance import curvatures
from moepack.solvers.drift import corrected
from moepack.solvers.gptq import Factors, factorize

__all__ = ["Damping", "Problem", "visits"]


class Damping(Protocol):
    """The settings that `Problem` reads.

    Attributes:
        damping: damping of the Hessians, relative to their mean diagonal.
        shift: share of the accumulated error of earlier layers that is corrected by moving the weights, 0 to 1.
        shift_damping: damping of that regression.
    """

    @property
    def damping(self) -> float: ...  # noqa: D102
    @property
    def shift(self) -> float: ...  # noqa: D102
    @property
    def shift_damping(self) -> float: ...  # noqa: D102


class Problem:
    """A batch of matrices with factorized Hessians, to be solved at different prices.

    Attributes:
        weights: [E, R, C] float32, moved to correct earlier layers' errors.
        hessians: [E, C, C].
        factors: factors of the damped Hessians, with columns in processing order.
        importance: [E], mean diagonal of each expert's Hessian: its output error per unit of squared weight error.
    """

    def __init__(
        self, weights: Tensor, hessians: Tensor, drift: Tensor | None, settings: Damping, lanes: int = 1
    ) -> None:
        """Factorize the Hessians and move the weights.

        Args:
            weights: [E, R, C], finite.
            hessians: [E, C, C], sums of a x^T x over the input tokens x of the compressed model's layer, weighted by
                the sensitivity a of the model's output to each.
            drift: [E, C, C], sums of a (x' - x)^T x, where x' are the inputs in the original model; or `None`.
            settings: settings of the solver.
            lanes: number of lanes, each of every `lanes`-th column, that are processed one after another.
        """
        self.weights, self.hessians = weights.float(), hessians
        if drift is not None and settings.shift:
            self.weights = corrected(self.weights, hessians, drift, settings.shift, settings.shift_damping)
        self.factors: Factors = factorize(_by_lane(hessians, lanes), settings.damping)
        self.importance = curvatures(torch.tensor(self.factors.scale, device=self.weights.device))


def visits(columns: int, lanes: int) -> Tensor:
    """Return the columns in the order in which they are processed: lane after lane."""
    return torch.cat([torch.arange(lane, columns, lanes) for lane in range(lanes)])


def _by_lane(hessians: Tensor, lanes: int) -> Tensor:
    """Return Hessians [E, C, C] with their rows and columns in the order of `lanes` lanes."""
    if lanes == 1:
        return hessians
    experts, columns, _ = hessians.shape
    if columns % lanes == 0:  # a copy of a view takes a tenth of the time of a gather
        parts = hessians.reshape(experts, columns // lanes, lanes, columns // lanes, lanes)
        return parts.permute(0, 2, 1, 4, 3).reshape(hessians.shape)
    order = visits(columns, lanes).to(hessians.device)
    return hessians[:, order][:, :, order]

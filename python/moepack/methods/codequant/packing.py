"""The tensors of a layer on their way from solver to blob."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from moepack import _core
from moepack.calibration.moments import Moments
from moepack.codebook import centroid_bits, fixed_point
from moepack.errors import InvalidTensorError
from moepack.methods.base import PackedTensor, Shape, Weights
from moepack.solvers.activations import Rounding, turned
from moepack.solvers.codebooks import Clustered, ClusterSettings, cluster, look_up

__all__ = ["Packed", "Solving", "packed_bytes"]

WHOLE_ROW = 1 << 20
"""To the core a block wider than any row means the row."""


def packed_bytes(shape: Shape, bits: int, block: int | None, activation_bits: int) -> int:
    """Size of a codebook tensor (docs/format.md, section 7); `activation_bits` are 4 or 8, or 0 for no rounding."""
    specification = {"bits": bits, "block_size": block or WHOLE_ROW, "activation_bits": activation_bits}
    return _core.packed_bytes("codebook", shape, **specification)


class Packed:
    """A layer whose values are known."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.values = values

    def solve(self, weights: Mapping[str, Tensor], experts: range, *_: Any) -> dict[str, Tensor]:
        """Return the values of a stage's experts."""
        group = slice(experts.start, experts.stop)
        return {name: self.values[name][group].to(given.device) for name, given in weights.items()}


class Solving:
    """A layer being clustered: codes and codebooks of all its tensors, filled stage by stage.

    Attributes:
        rounded: experts (as text) whose inputs could not be used, with the reason.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        rounding: Rounding,
        layer: Mapping[str, Weights],
        advance: Callable[[int], None],
    ) -> None:
        self.settings, self.rounding, self.layer, self.advance = settings, rounding, layer, advance
        self.codes = {name: torch.empty(w.shape, dtype=torch.uint8) for name, w in layer.items()}
        self.centroids = {name: torch.empty(self._books(w.shape)) for name, w in layer.items()}
        self.objectives: dict[str, Tensor] = {}
        self.rounded: dict[str, str] = {}

    def _books(self, shape: Shape) -> tuple[int, ...]:
        blocks = -(-shape[2] // (self.settings.block or max(shape[2], 1)))
        return (*shape[:2], blocks, 1 << self.settings.bits)

    def solve(
        self,
        weights: Mapping[str, Tensor],
        experts: range,
        moments: Callable[[], Moments] | None,
        hessians: Callable[[], Tensor] | None,
    ) -> dict[str, Tensor]:
        """Cluster a stage: its tensors share the inputs, so their rows are one problem.

        Args:
            weights: [G, R, C] by name.
            experts: which of the tensors' experts.
            moments: computes what the objective is made of.
            hessians: computes the Hessians where `moments` is None; the drift is then zero.
        """
        self._check(weights, experts)
        if moments is not None:
            sums = moments()
        else:
            assert hessians is not None
            found = hessians()
            sums = Moments(found, torch.zeros_like(found))
        stacked = torch.cat(list(weights.values()), 1)
        width = self.rounding.width(next(iter(weights)), stacked.shape[-1])
        turned_hessians, turned_drift = (
            turned(turned(part, width).mT, width).mT for part in (sums.hessians, sums.drift)
        )
        clustered = cluster(turned(stacked, width), turned_hessians, turned_drift, self.settings)
        for expert, reason in zip(experts, clustered.reasons, strict=True):
            if reason is not None:
                self.rounded.setdefault(str(expert), reason)
        values = turned(look_up(clustered.codes, clustered.centroids, self.settings.block), width)
        return self._keep(weights, experts, clustered, values)

    def _keep(
        self, weights: Mapping[str, Tensor], experts: range, clustered: Clustered, values: Tensor
    ) -> dict[str, Tensor]:
        group = slice(experts.start, experts.stop)
        answer, first = {}, 0
        for name, given in weights.items():
            rows = slice(first, first + given.shape[1])
            first = rows.stop
            self.codes[name][group].copy_(clustered.codes[:, rows])
            self.centroids[name][group].copy_(clustered.centroids[:, rows])
            so_far = self.objectives.setdefault(name, torch.zeros(clustered.objectives.shape[1], dtype=torch.float64))
            so_far += clustered.objectives.sum(0)
            answer[name] = values[:, rows].to(given.device)
            self.advance(given.numel())
        return answer

    def _check(self, weights: Mapping[str, Tensor], experts: range) -> None:
        for name, given in weights.items():
            finite = torch.isfinite(given).flatten(1).all(1)
            if not bool(finite.all()):
                expert = experts[int((~finite).nonzero()[0])]
                raise InvalidTensorError("holds NaN or infinite weights", tensor=self.layer[name].sources[expert])

    def pack(self, details: Mapping[str, Any]) -> Iterator[tuple[str, PackedTensor]]:
        """Pack all tensors; the first one carries the layer's `details`."""
        for position, (name, weights) in enumerate(self.layer.items()):
            yield name, self._pack(name, weights, details if position == 0 else {})

    def _pack(self, name: str, weights: Weights, details: Mapping[str, Any]) -> PackedTensor:
        stored = fixed_point(self.centroids.pop(name), centroid_bits(self.rounding.bits))
        blob = _core.encode_codebook(
            self.codes.pop(name).numpy(), stored.centroids.numpy(), stored.scales.numpy(), bits=self.settings.bits,
            block=self.settings.block or WHOLE_ROW, ndim=weights.ndim, activation_bits=self.rounding.bits,
            hadamard=self.rounding.width(name, weights.shape[-1]),
        )  # fmt: skip
        mean = self.objectives[name] / max(weights.shape[0], 1)
        own = {"objective": [float(f"{value:.5e}") for value in mean.tolist()]}
        return PackedTensor("codebook", blob, {**_core.PackedTensor(blob).details(), **own, **details})

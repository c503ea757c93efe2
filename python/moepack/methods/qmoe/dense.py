"""Linear layers outside the experts (`--dense-bits`): symmetric groups as `finequant` stores them, rounded by GPTQ.

Attention, shared experts and dense feed-forward layers are solved stage by stage in the order in which the block runs
them, on inputs that have passed through everything that was quantized before; every token counts alike, for every token
visits them. They are not moved to undo the drift of earlier layers, as experts are: that was measured, and with eight
bits the models lost by it (docs/methods/qmoe.md). Routers, norms, embeddings and the output head stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack import _core
from moepack.calibration import LinearStage
from moepack.errors import InvalidTensorError
from moepack.methods.base import PackedTensor, Weights
from moepack.methods.qmoe.forms import groupwise_details
from moepack.solvers.gptq import GptqSettings, gptq
from moepack.solvers.grids import SymmetricGrid

__all__ = ["DenseSettings", "PackedLinears", "SolvingLinears"]


@dataclass(frozen=True)
class DenseSettings:
    """How linear layers are quantized.

    Attributes:
        bits: by role; only these roles are packed.
        group_size: columns that share a scale.
        gptq: settings of the solver; None rounds to nearest, with the largest magnitude's scale.
    """

    bits: Mapping[str, int]
    group_size: int
    gptq: GptqSettings | None


class PackedLinears:
    """Linear layers of a block whose values are known."""

    def __init__(self, packed: Mapping[str, PackedTensor]) -> None:
        blobs = {path: _core.PackedTensor(tensor.data) for path, tensor in packed.items()}
        self.values = {path: torch.from_numpy(blob.dequantize()) for path, blob in blobs.items()}

    def solve(self, stage: LinearStage) -> dict[str, Tensor]:
        """Return the values of a stage."""
        return {path: self.values[path].to(given.device) for path, given in stage.weights.items()}


class SolvingLinears:
    """Linear layers of a block being quantized."""

    def __init__(self, settings: DenseSettings, layer: Mapping[str, Weights], advance: Callable[[int], None]) -> None:
        self.settings, self.layer, self.advance = settings, layer, advance
        self.codes: dict[str, Tensor] = {}
        self.scales: dict[str, Tensor] = {}
        self.rounded: dict[str, str] = {}

    def solve(self, stage: LinearStage) -> dict[str, Tensor]:
        """Quantize layers that read the same input; those of equal bits are one problem."""
        for path, given in stage.weights.items():
            if not bool(torch.isfinite(given).all()):
                raise InvalidTensorError("holds NaN or infinite weights", tensor=self.layer[path].sources[0])
        weights = torch.cat(list(stage.weights.values()), dim=1)
        hessians = weights.new_zeros((1, weights.shape[2], weights.shape[2]))
        if self.settings.gptq is not None:
            hessians = stage.moments().hessians
        rows = [given.shape[1] for given in stage.weights.values()]
        wanted = dict(zip(stage.weights, torch.split(weights, rows, dim=1), strict=True))
        return {path: self._solve(path, part, hessians) for path, part in wanted.items()}

    def _solve(self, path: str, weights: Tensor, hessians: Tensor) -> Tensor:
        settings = self.settings
        solver = settings.gptq or GptqSettings()
        grid = SymmetricGrid(
            settings.bits[self.layer[path].role], settings.group_size,
            static=solver.act_order, search=settings.gptq is not None,
        )  # fmt: skip
        result = gptq(weights, hessians, grid, solver)
        reason = result.reports[0].reason
        if settings.gptq is not None and reason is not None:
            self.rounded[path] = reason
        self.codes[path], self.scales[path] = result.codes.cpu(), grid.scales.cpu()
        self.advance(weights.numel())
        return result.values

    def pack(self) -> Iterator[tuple[str, PackedTensor]]:
        """Pack all layers; one that was only rounded says why."""
        for path, weights in self.layer.items():
            blob = _core.encode_groupwise(
                self.codes.pop(path).numpy(), self.scales.pop(path).numpy(), None,
                bits=self.settings.bits[weights.role], group_size=self.settings.group_size, ndim=weights.ndim,
            )  # fmt: skip
            reason = self.rounded.get(path)
            yield (
                path,
                PackedTensor(
                    "groupwise", blob, {**groupwise_details(blob), **({} if reason is None else {"rounded": reason})}
                ),
            )

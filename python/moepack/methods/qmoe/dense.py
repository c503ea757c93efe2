"""Linear layers outside the experts (`--dense-bits`): symmetric groups in `finequant`'s format, rounded by GPTQ.

Attention, shared experts and dense feed-forward layers are solved stage by stage in execution order, on inputs that
have passed through all previously quantized layers. Every token has equal weight, because every token visits these
layers. Unlike experts, they are not moved to undo the drift of earlier layers: measured at eight bits, this increased
the loss (docs/methods/qmoe.md). Routers, norms, embeddings and the output head are copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack import _core
from moepack.methods.base import PackedBytes, Solution, Stage, Weights
from moepack.methods.qmoe.forms import groupwise_details
from moepack.solvers.gptq import GptqSettings, gptq
from moepack.solvers.grids import SymmetricGrid

__all__ = ["DenseSettings", "pack_linear", "solve_linears"]


@dataclass(frozen=True)
class DenseSettings:
    """Quantization settings of linear layers.

    Attributes:
        bits: bits by role; only these roles are packed.
        group_size: columns that share a scale.
        gptq: settings of the solver; None rounds to nearest, with scales from the largest magnitude.
    """

    bits: Mapping[str, int]
    group_size: int
    gptq: GptqSettings | None


def solve_linears(stage: Stage, settings: DenseSettings) -> dict[str, Solution]:
    """Quantize layers that read the same input; they share the Hessian."""
    columns = next(iter(stage.weights.values())).shape[2]
    if settings.gptq is None:
        hessians = torch.zeros(1, columns, columns, device=next(iter(stage.weights.values())).device)
    else:
        hessians = stage.moments(drift=False).hessians
    return {path: _solve(stage, settings, path, weights, hessians) for path, weights in stage.weights.items()}


def _solve(stage: Stage, settings: DenseSettings, path: str, weights: Tensor, hessians: Tensor) -> Solution:
    solver = settings.gptq or GptqSettings()
    bits = settings.bits[stage.tensors[path].role]
    grid = SymmetricGrid(bits, settings.group_size, static=solver.act_order, search=settings.gptq is not None)
    result = gptq(weights, hessians, grid, solver)
    reason = None if settings.gptq is None else result.reports[0].reason
    stage.advance(weights.numel())
    parts = {"codes": result.codes, "scales": grid.scales}
    return Solution(parts, result.values, rounded={} if reason is None else {0: reason})


def pack_linear(weights: Weights, parts: Mapping[str, Tensor], settings: DenseSettings) -> PackedBytes:
    """Pack a layer."""
    blob = _core.encode_groupwise(
        parts["codes"].numpy(), parts["scales"].numpy(), None,
        bits=settings.bits[weights.role], group_size=settings.group_size, ndim=weights.ndim,
    )  # fmt: skip
    return PackedBytes("groupwise", blob, groupwise_details(blob))

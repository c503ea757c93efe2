"""Solves and packs codebook tensors, and computes their size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moepack import _core
from moepack.calibration.moments import Moments
from moepack.methods.base import PackedBytes, Shape, Solution, Stage, Weights
from moepack.solvers.activations import Rounding, rotated
from moepack.solvers.codebooks import ClusterSettings, cluster, look_up
from moepack.solvers.fixed_point import centroid_bits, fixed_point

__all__ = ["pack", "packed_bytes", "solve"]

WHOLE_ROW = 1 << 20
"""A block width that exceeds any row; the core treats it as the whole row."""


def packed_bytes(shape: Shape, bits: int, block: int | None, activation_bits: int) -> int:
    """Return the size of a codebook tensor in bytes (docs/format.md, section 7).

    `activation_bits` is 4 or 8, or 0 for no rounding.
    """
    specification = {"bits": bits, "block_size": block or WHOLE_ROW, "activation_bits": activation_bits}
    return _core.packed_bytes("codebook", shape, **specification)


def solve(stage: Stage, settings: ClusterSettings, rounding: Rounding, weigh_tokens: bool) -> dict[str, Solution]:
    """Cluster a stage. Its tensors share the inputs, so their rows form one problem.

    Args:
        stage: a stage with calibration.
        settings: settings of the solver.
        rounding: how packed layers round their inputs.
        weigh_tokens: use moments weighted by token; False uses the plain Hessians, without drift.
    """
    moments = stage.moments() if weigh_tokens else _unweighted(stage.hessians())
    stacked = torch.cat(list(stage.weights.values()), 1)
    width = rounding.width(next(iter(stage.tensors)), stacked.shape[-1])
    assert moments.drift is not None
    hessians, drift = (rotated(rotated(part, width).mT, width).mT for part in (moments.hessians, moments.drift))
    clustered = cluster(rotated(stacked, width), hessians, drift, settings)
    values = rotated(look_up(clustered.codes, clustered.centroids, settings.block), width)
    reasons = zip(stage.experts, clustered.reasons, strict=True)
    rounded = {} if stage.dense else {expert: reason for expert, reason in reasons if reason is not None}
    found, first = {}, 0
    for name, given in stage.weights.items():
        rows = slice(first, first := first + given.shape[1])
        parts = {"codes": clustered.codes[:, rows], "centroids": clustered.centroids[:, rows]}
        found[name] = Solution({**parts, "objectives": clustered.objectives}, values[:, rows], rounded=rounded)
        stage.advance(given.numel())
    return found


def _unweighted(hessians: Tensor) -> Moments:
    return Moments(hessians, torch.zeros_like(hessians))


def pack(weights: Weights, parts: Mapping[str, Tensor], settings: ClusterSettings, rounding: Rounding) -> PackedBytes:
    """Pack the codes and centroids of a tensor."""
    stored = fixed_point(parts["centroids"], centroid_bits(rounding.bits))
    blob = _core.encode_codebook(
        parts["codes"].numpy(), stored.centroids.numpy(), stored.scales.numpy(), bits=settings.bits,
        block=settings.block or WHOLE_ROW, ndim=weights.ndim, activation_bits=rounding.bits,
        hadamard=rounding.width(weights.name.removesuffix(".weight"), weights.shape[-1]),
    )  # fmt: skip
    mean = parts["objectives"].sum(0) / max(weights.shape[0], 1)
    objective = [float(f"{value:.5e}") for value in mean.tolist()]
    return PackedBytes("codebook", blob, {**_core.PackedTensor(blob).details(), "objective": objective})

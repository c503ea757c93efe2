"""Times products of FloE's experts, sparse and dense: the command `product` of `benches.cpu.floe`."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from moepack import _core
from moepack.backends.cpu.backend import CpuBackend

CHANNELS, COLUMNS = 14336, 4096
SHARES = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Shares of skipped channels."""
CALLS = 12
"""Timed calls; the fastest counts."""
JUNK = np.zeros(24 << 20, np.float64)
"""Larger than any cache: written before each timed call."""


def fastest(call: Callable[[int], object], threads: int) -> float:
    """Milliseconds of the fastest of several calls with different numbers and cold caches."""
    clock, best = time.process_time if threads == 1 else time.perf_counter, math.inf
    for number in range(CALLS):
        JUNK.fill(number)
        start = clock()
        call(number)
        best = min(best, clock() - start)
    return 1e3 * best


def groupwise(rng: np.random.Generator, shape: tuple[int, int, int], bits: int) -> Any:
    """A group-wise tensor of random codes, with offsets if it has 2 bits."""
    groups = (*shape[:2], shape[2] // 64)
    codes, scales = rng.integers(0, 1 << bits, shape, np.uint8), np.full(groups, 2.0**-12, np.float32)
    offsets = np.full(groups, -1.5 * 2.0**-12, np.float32) if bits == 2 else None
    return _core.PackedTensor(_core.encode_groupwise(codes, scales, offsets, bits=bits, group_size=64, ndim=3))


def records(rng: np.random.Generator, bits: int) -> np.ndarray[Any, Any]:
    """Records of random values; gates are about 1, because SiLU of large negative values is subnormal and slow."""
    shape, thresholds = (1, CHANNELS, 2 * COLUMNS), np.zeros(1, np.float32)
    if bits == 16:
        values = COLUMNS**-0.5 * rng.standard_normal(shape, np.float32)
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
        return _core.encode_channels(values, thresholds, bits=16)
    scales = np.full((1, CHANNELS, 2 * COLUMNS // 64), 2.0**-8, np.float32)
    return _core.encode_channels((rng.integers(0, 1 << bits, shape, np.uint8), scales), thresholds, bits=bits)


def coded(rng: np.random.Generator, shape: tuple[int, int, int], step: float) -> Any:
    """A coded tensor of random values of about `shape[2] ** -0.5`, rounded to a step relative to this, with scales
    of rows and columns."""
    codes = np.rint(rng.standard_normal(shape, np.float32) / step).astype(np.int8)
    worth = torch.tensor(step * shape[2] ** -0.5).bfloat16().float().item()
    rows, columns = np.full(shape[:2], worth, np.float32), np.ones((1, shape[2]), np.float32)
    return _core.PackedTensor(_core.encode_coded(codes, rows, ndim=3, columns=columns))


def product(options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds by bits of records, activations of up, and share of skipped channels."""
    _core.set_threads(options.threads)
    rng, figures = np.random.default_rng(0), {}
    x = rng.standard_normal((CALLS, COLUMNS), np.float32)
    up = groupwise(rng, (1, CHANNELS, COLUMNS), 2)
    sizes = np.abs(up.matmul_grouped(x, np.array([0, CALLS])))
    print(f"{'bits, up':>12}{'dense':>9}" + "".join(f"{share:>9.0%}" for share in SHARES) + "   8 tokens, 80 %")
    for bits in (4, 8, 16):
        data = records(rng, bits)
        channels, thresholds, dense = _core.PackedTensor(data), data[128:132].view(np.float32), None
        if bits < 16:
            gate, down = (groupwise(rng, shape, bits) for shape in ((1, CHANNELS, COLUMNS), (1, COLUMNS, CHANNELS)))
            dense = partial(_core.gated_experts, gate, up, down)
        for mode in ("int8", "exact"):
            row = by_share(x, sizes, partial(_core.sparse_experts, up, channels), thresholds, mode, options.threads)
            if dense is not None:
                row["dense"] = alone(x, dense, ("exact", mode, "exact"), options.threads)
            figures[f"{bits}, {mode}"] = row
            keys = "dense", *map("{:.1f}".format, SHARES), "8 tokens"
            cells = "".join(f"{row.get(key, math.nan):>9.2f}" for key in keys)
            print(f"{bits:>5}, {mode:>5}{cells}", flush=True)
    figures["coarse"] = refined(rng, x, options.threads)
    return figures


def alone(x: np.ndarray[Any, Any], layer: Callable[..., object], mode: object, threads: int) -> float:
    """Milliseconds of a layer of one expert for a token."""
    experts, weights = np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32)
    return fastest(lambda number: layer(x[number : number + 1], experts, weights, mode), threads)


def by_share(
    x: np.ndarray[Any, Any],
    sizes: np.ndarray[Any, Any],
    layer: Callable[..., object],
    thresholds: np.ndarray[Any, Any],
    mode: str,
    threads: int,
) -> dict[str, float]:
    """Milliseconds of a sparse layer by the share of skipped channels, and per token of eight tokens."""
    row = {}
    for share in SHARES:
        thresholds[0] = np.quantile(sizes, share)
        row[f"{share:.1f}"] = alone(x, layer, mode, threads)
    thresholds[0] = np.quantile(sizes, 0.8)
    eight = np.zeros((8, 1), np.int64), np.ones((8, 1), np.float32)
    row["8 tokens"] = fastest(lambda number: layer(x[:8], *eight, mode), threads) / 8
    return row


def refined(rng: np.random.Generator, x: np.ndarray[Any, Any], threads: int) -> dict[str, float]:
    """Milliseconds of 2-bit coarse copies and 4-bit residuals by the share of channels that are not refined."""
    shapes, data = ((1, CHANNELS, COLUMNS),) * 2 + ((1, COLUMNS, CHANNELS),), records(rng, 4)
    matrices = (*map(partial(coded, rng), shapes, (1.0, 0.25, 1.0)), _core.PackedTensor(data))
    backend, thresholds, row = CpuBackend(), data[128:132].view(np.float32), {}
    index, weights = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    inner = backend.coarse_channels(
        matrices, torch.from_numpy(x), index.expand(CALLS, 1), weights.expand(CALLS, 1), None
    )
    for share in (0.8, 0.9, 1.0):
        thresholds[0] = np.quantile(inner.inner.abs().numpy(), share) if share < 1 else np.inf
        row[f"{share:.1f}"] = fastest(
            lambda n: backend.experts(matrices, torch.from_numpy(x[n : n + 1]), index, weights, functional.silu, None),
            threads,
        )
    print("coarse copies of 2 bits by the share that is not refined:", row, flush=True)
    return row

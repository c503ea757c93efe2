"""How fast compensated weights are multiplied and made (docs/methods/milo.md).

    python benches/compensated.py [--threads 2] [--only product quantize] [--json benches/results/compensated.json]

`product`: one token by 4096 x 14336, INT3 alone and INT3 with a compensator of rank 32, in both compute modes; four
experts in turn, so that the weights come from memory (103 MB), calls alternating, in arrays that are aligned as mapped
files are; the least and the median time. `quantize`: the joint
optimisation of matrices of Mixtral-8x7B's shapes with rank 32, Gaussian weights, and what it makes of the whole model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import machine
from moepack import _core
from moepack.methods.milo.joint import JointSettings, compensate
from moepack.solvers.affine import GroupSpec
from moepack.solvers.least_squares import LeastSquares

ROWS, COLUMNS, RANK, EXPERTS = 4096, 14336, 32, 4
MIXTRAL = {
    "experts": (ROWS, COLUMNS, 32 * 8 * 3),
    "attention": (4096, 4096, 32 * 2),
    "key and value": (1024, 4096, 32 * 2),
}
"""Rows, columns and how many matrices of that shape (or its transpose) Mixtral-8x7B has."""


def product(rounds: int) -> dict[str, Any]:
    """Milliseconds of a call, by mode."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 8, (EXPERTS, ROWS, COLUMNS), np.uint8)
    parameters = np.full((EXPERTS, ROWS, COLUMNS // 64), 0.0078125, np.float32)
    base = _core.encode_groupwise(codes, parameters, -parameters, bits=3, group_size=64, rank=3)
    del codes

    def factor(length: int) -> tuple[Any, Any]:
        size = (EXPERTS * RANK, length)
        return rng.integers(0, 8, size, np.uint8), np.full((size[0], length // 64), 0.015625, np.float32)

    whole = _core.encode_compensated(base, np.full(EXPERTS, RANK, np.int64), factor(COLUMNS), factor(ROWS), bits=3)
    blobs = {"int3": _core.GroupwiseBlob(aligned(base)), "int3 + rank 32": _core.CompensatedBlob(aligned(whole))}
    x = rng.normal(size=(1, COLUMNS)).astype(np.float32)
    figures: dict[str, Any] = {"bytes": {name: blob.nbytes for name, blob in blobs.items()}}
    for mode in ("exact", "int8"):
        times: dict[str, list[float]] = {name: [] for name in blobs}
        for call in range(rounds * EXPERTS):
            for name, blob in blobs.items():
                start = time.perf_counter()
                blob.matmul(x, call % EXPERTS, mode=mode)
                times[name].append(1e3 * (time.perf_counter() - start))
        figures[mode] = {}
        for what, of in (("least", min), ("median", statistics.median)):
            found = {name: round(of(values[EXPERTS:]), 3) for name, values in times.items()}
            figures[mode][what] = {**found, "ratio": round(found["int3 + rank 32"] / found["int3"], 3)}
        print(mode, figures[mode], flush=True)
    return figures


def aligned(data: Any) -> Any:
    """A copy that starts at a multiple of 64, as tensors of a mapped file do."""
    room = np.empty(len(data) + 64, np.uint8)
    first = -room.ctypes.data % 64
    room[first : first + len(data)] = data
    return room[first : first + len(data)]


def quantize() -> dict[str, Any]:
    """Seconds a matrix, and hours of the model."""
    figures: dict[str, Any] = {}
    total = 0.0
    for name, (rows, columns, count) in MIXTRAL.items():
        weights = torch.randn(1, rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02
        start = time.perf_counter()
        found = compensate(weights, RANK, GroupSpec(3, 64), LeastSquares(), JointSettings())
        seconds = time.perf_counter() - start
        total += seconds * count
        error = float((found.errors / weights.square().sum((1, 2))).sqrt())
        figures[name] = {
            "shape": [rows, columns],
            "seconds": round(seconds, 2),
            "rounds": found.rounds[0],
            "error": error,
        }
        print(name, figures[name], flush=True)
    return {**figures, "mixtral_8x7b_hours": round(total / 3600, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", choices=["product", "quantize"], default=["product", "quantize"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    _core.set_threads(options.threads)
    figures: dict[str, Any] = {}
    if "product" in options.only:
        figures["product"] = product(options.rounds)
    if "quantize" in options.only:
        figures["quantize"] = quantize()
    if options.json:
        machine.save(options.json, options.threads, figures)


if __name__ == "__main__":
    main()

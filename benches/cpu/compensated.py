"""Times products with compensated weights (docs/methods/milo.md).

    python -m benches.cpu.compensated [--threads 2] [--json benches/results/compensated.json]

One token times 4096 x 14336, INT3 alone and INT3 with a compensator of rank 32, in both compute modes. Four experts
alternate so that weights come from memory (103 MB), calls alternate, and arrays are aligned like mapped files. Prints
the minimum and the median time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benches.tools import machine
from moepack import _core

ROWS, COLUMNS, RANK, EXPERTS = 4096, 14336, 32, 4


def product(rounds: int) -> dict[str, Any]:
    """Milliseconds of a call, by mode."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 8, (EXPERTS, ROWS, COLUMNS), np.uint8)
    parameters = np.full((EXPERTS, ROWS, COLUMNS // 64), 0.0078125, np.float32)
    base = _core.encode_groupwise(codes, parameters, -parameters, bits=3, group_size=64, ndim=3)
    del codes

    def factor(length: int) -> tuple[Any, Any]:
        size = (EXPERTS * RANK, length)
        return rng.integers(0, 8, size, np.uint8), np.full((size[0], length // 64), 0.015625, np.float32)

    whole = _core.encode_compensated(base, np.full(EXPERTS, RANK, np.int64), factor(COLUMNS), factor(ROWS), bits=3)
    blobs = {"int3": _core.PackedTensor(aligned(base)), "int3 + rank 32": _core.PackedTensor(aligned(whole))}
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
    """A copy that starts at a multiple of 64, like the tensors of a mapped file."""
    room = np.empty(len(data) + 64, np.uint8)
    first = -room.ctypes.data % 64
    room[first : first + len(data)] = data
    return room[first : first + len(data)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    _core.set_threads(options.threads)
    figures = {"product": product(options.rounds)}
    if options.json:
        machine.save(options.json, options.threads, figures)


if __name__ == "__main__":
    main()

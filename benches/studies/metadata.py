"""Breaks down the bits of coded tensors into entropy of the codes and format overhead, by row length.

    python -m benches.studies.metadata MODEL [MODEL ...] [--rates 1.25 2.2 3.2] [--threads 1]
        [--out build/metadata.json]

Models are rounded to a rate without a text, experts only. In bits per weight: the stored size; the entropy of the codes
with separate frequencies for every stream, and with one set per tensor (the first is below the second if rows differ in
width, and not achievable, because frequencies must be stored); and the part of the rest taken by states and index
(`moepack.methods.rate.step_size.STREAM_BITS` per stream).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benches.tools import machine
from moepack import _core
from moepack.format import PackedDirectory
from moepack.methods import create
from moepack.methods.rate.sample import stream_rows
from moepack.methods.rate.step_size import stream_bits
from moepack.pipeline import compress


def entropy(codes: NDArray[np.int32]) -> float:
    """Bits of codes, entropy-coded with their own frequencies."""
    counts = np.unique(codes, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def parts(data: NDArray[np.uint8]) -> NDArray[np.float64]:
    """A tensor's weights and bits: stored, entropy per stream, entropy per tensor, states and index."""
    codes = _core.decode_coded(data)
    experts, rows, columns = codes.shape
    height = stream_rows(columns)
    streams = (codes[expert, row : row + height] for expert in range(experts) for row in range(0, rows, height))
    own = sum(map(entropy, streams))
    return np.array([codes.size, 8 * data.nbytes, own, entropy(codes), stream_bits((experts, rows, columns))])


def rows(model: Path, rate: float) -> Iterator[dict[str, Any]]:
    """One result per row length."""
    sums: dict[int, NDArray[np.float64]] = {}
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "packed"
        compress(model, out, method=create("rate", bits_per_weight=rate, roles="none", calibration="none"))
        packed = PackedDirectory.open(out)
        for name, record in packed.manifest.packed().items():
            sums[record.shape[-1]] = sums.get(record.shape[-1], np.zeros(5)) + parts(packed.tensor(name))
    for columns, (weights, *bits) in sorted(sums.items()):
        named = zip(("stored", "entropy of streams", "entropy of tensors", "states"), bits, strict=True)
        figures = {name: round(own / weights, 4) for name, own in named}
        yield {"model": model.name, "rate": rate, "columns": columns, "weights": int(weights), **figures}


def main() -> None:
    """Measure every model at every rate, print, and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--rates", nargs="+", type=float, default=[1.25, 2.2, 3.2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/metadata.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: list[dict[str, Any]] = []
    for model in options.models:
        for rate in options.rates:
            for row in rows(model, rate):
                found.append(row)
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            machine.save(options.out, options.threads, {"rows": found})


if __name__ == "__main__":
    main()

"""Compares the loss of every format with coded integers of equal size, to decide whether `auto` should propose it.

    python -m benches.studies.formats_at_equal_size MODEL [MODEL ...] [--weights 1048576] [--threads 1]
        [--out build/hull.json]

Uses one tensor of each projection and kind of linear layer, cut to whole rows. Prints one line per format: bits per
weight, and the minimum and maximum over all tensors of its squared error relative to coded integers of the same size. A
ratio below 1 would lie below their hull. Coded integers are rounded for the least error and coded, so their size is
exact; the other formats get optimistic assumptions:

- group-wise integers use `moepack.solvers.groupwise` with a search for the best scales;
- codebooks have the centroids of least error for each row, found by Lloyd's algorithm, 16 bits each;
- compensated integers have the best unrounded low-rank correction of their error, at 3.25 bits per number;
- ternary codes take the entropy of their symbols, and the best threshold and level for each row, 16 bits each.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benches.tools import machine
from moepack import _core
from moepack.checkpoint import Checkpoint, MoeModel, describe
from moepack.solvers.groupwise import group_values, quantize_groupwise
from moepack.solvers.priced import DENSE_LARGEST, Profile, coder_symbols, round_priced

Point = tuple[str, float, float]
"""A format, its bits per weight, and its squared error."""


def matrices(model: MoeModel, weights: int) -> Iterator[tuple[str, Tensor]]:
    """The experts of each projection of a layer and a matrix of each kind of linear layer, cut to a number of
    weights."""
    layer = model.layers[len(model.layers) // 2]
    found = {part.name: torch.cat([part.expert(each) for each in range(layer.experts)]) for part in layer.projections}
    for dense in model.dense:
        found |= {linear.name.rpartition(".")[2]: linear.matrix() for linear in dense.linears}
    for name, matrix in found.items():
        yield name, matrix[: max(weights // matrix.shape[1] // 16 * 16, 16)].float()


def coded(values: Tensor) -> list[tuple[float, float]]:
    """Bits and errors of coded integers at steps a quarter of an octave apart, in the order of decreasing bits."""
    profile = Profile(DENSE_LARGEST)
    profile.add(values, 1.0)
    spread, found = float(values.square().mean()) ** 0.5, []
    for octave in np.arange(-7.25, 1.5, 0.25):
        step = spread * 2.0**octave
        symbols = round_priced(values, step, profile.lengths(step))
        one = np.ones((1, 1), np.float32)
        blob = _core.encode_coded(
            symbols[None].numpy(), one, ndim=3, symbols=coder_symbols(DENSE_LARGEST, dependent=False)
        )
        found.append((8 * blob.nbytes / values.numel(), float((symbols * step - values).square().sum())))
    return found


def groupwise(values: Tensor) -> Iterator[Point]:
    """Integers in groups, symmetric and with offsets."""
    for bits in (2, 3, 4, 8):
        for size in (32, 64, 128):
            for symmetric in (True, False):
                groups = quantize_groupwise(values, bits, size, symmetric=symmetric, search=True, name="")
                error = float((group_values(groups, bits, size) - values).square().sum())
                kind = "scales" if symmetric else "scales and offsets"
                yield f"integers of {bits} bits, {kind}", bits + (16 if symmetric else 32) / size, error


def codebook(values: Tensor) -> Iterator[Point]:
    """Centroids of least error for each row."""
    for bits in (2, 3, 4):
        count = 1 << bits
        centroids = torch.quantile(values, (torch.arange(count) + 0.5) / count, dim=1).T.contiguous()
        for _ in range(20):
            edges = (centroids[:, 1:] + centroids[:, :-1]) / 2
            codes = torch.searchsorted(edges.contiguous(), values)
            sums = torch.zeros_like(centroids).scatter_add_(1, codes, values)
            counts = torch.zeros_like(centroids).scatter_add_(1, codes, torch.ones_like(values))
            centroids = torch.where(counts > 0, sums / counts.clamp(min=1), centroids).sort(1).values
        error = float((centroids.gather(1, codes) - values).square().sum())
        yield f"codebook of {bits} bits", bits + 16 * count / values.shape[1], error


def compensated(values: Tensor) -> Iterator[Point]:
    """Integers with the best low-rank correction of their error."""
    rows, columns = values.shape
    for bits in (2, 3, 4):
        groups = quantize_groupwise(values, bits, 64, symmetric=False, search=True, name="")
        tails = torch.linalg.svdvals(values - group_values(groups, bits, 64)).square().flip(0).cumsum(0).flip(0)
        for rank in (8, 16, 32):
            if rank < len(tails):
                size = bits + 0.5 + 3.25 * rank * (rows + columns) / values.numel()
                yield f"integers of {bits} bits, rank {rank}", size, float(tails[rank])


def ternary(values: Tensor) -> Iterator[Point]:
    """Three values per row, at several shares of zeros."""
    for zeros in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        kept = values.abs() > torch.quantile(values.abs(), zeros, dim=1, keepdim=True)
        level = (values.abs() * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)
        shares = np.array([zeros, (1 - zeros) / 2, (1 - zeros) / 2])
        error = float((values - values.sign() * level * kept).square().sum())
        yield f"ternary, {zeros:.0%} zeros", float(-(shares * np.log2(shares)).sum()) + 32 / values.shape[1], error


def main() -> None:
    """Print one line per format, and save the ratios by model and matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--weights", type=int, default=1 << 20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/hull.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ratios: dict[str, dict[str, float]] = {}
    sizes: dict[str, list[float]] = {}
    for path in options.models:
        for name, values in matrices(describe(Checkpoint.open(path)), options.weights):
            bits, errors = (np.array(each)[::-1] for each in zip(*coded(values), strict=True))
            for make in (groupwise, codebook, compensated, ternary):
                for kind, size, error in make(values):
                    here = float(np.exp(np.interp(size, bits, np.log(errors))))
                    place = ratios.setdefault(kind, {})
                    key = f"{path.name} {name}"
                    place[key] = min(place.get(key, np.inf), round(error / here, 4))
                    sizes.setdefault(kind, []).append(size)
    for kind, found in ratios.items():
        low, high = min(found.values()), max(found.values())
        print(f"{kind:40} {min(sizes[kind]):5.2f} to {max(sizes[kind]):5.2f} bits   {low:6.2f} to {high:6.2f}")
    lowest = min((ratio, kind, key) for kind, found in ratios.items() for key, ratio in found.items())
    print("lowest:", lowest)
    machine.save(options.out, options.threads, {"lowest": lowest, "ratios": ratios})


if __name__ == "__main__":
    main()

"""Compares batched GPTQ with GPTQ expert by expert: the gain of grouping experts (QMoE, table 1).

python -m benches.studies.gptq [--experts 64] [--rows 256] [--columns 128] [--device cpu]

Random weights and Hessians of 512 correlated tokens; the best of several rounds, both in the same process.
"""

import argparse
import time
from collections.abc import Callable

import torch

from moepack.solvers.gptq import gptq
from moepack.solvers.grids import AffineGrid, Grid, TernaryGrid


def best(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    seconds = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = min(seconds, time.perf_counter() - start)
    return seconds


def compare(name: str, grid: Callable[[], Grid], weights: torch.Tensor, hessians: torch.Tensor, rounds: int) -> None:
    device, experts = weights.device, len(weights)
    gptq(weights, hessians, grid())
    together = best(lambda: gptq(weights, hessians, grid()), device, rounds)
    alone = best(
        lambda: [gptq(weights[e : e + 1], hessians[e : e + 1], grid()) for e in range(experts)], device, rounds
    )
    rate = weights.numel() / together / 1e6
    print(f"| {name} | {alone:.3f} | {together:.3f} | {alone / together:.1f}x | {rate:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--columns", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    device = torch.device(options.device)
    generator = torch.Generator().manual_seed(0)
    shape = (options.experts, options.rows, options.columns)
    weights = torch.randn(shape, generator=generator).to(device)
    mixing = torch.randn(options.columns, options.columns, generator=generator)
    tokens = (torch.randn(options.experts, 512, options.columns, generator=generator) @ mixing).to(device)
    hessians = tokens.mT @ tokens
    print(f"{options.experts} experts of {options.rows}x{options.columns}; {device}, {torch.get_num_threads()} threads")
    print("| grid | one by one (s) | together (s) | gain | 10^6 weights/s |\n|---|---|---|---|---|")
    compare("ternary", TernaryGrid, weights, hessians, options.rounds)
    compare("2 bit, group 64", lambda: AffineGrid(2, 64), weights, hessians, options.rounds)
    compare("3 bit, row", lambda: AffineGrid(3), weights, hessians, options.rounds)


if __name__ == "__main__":
    main()

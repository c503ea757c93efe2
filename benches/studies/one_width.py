"""Compares the squared error of formats with one width per tensor and of coded integers of the same size.

    python -m benches.studies.one_width [--rows 512] [--columns 2048] [--seeds 4] [--out build/one-width.json]

Weights are independent and normal. Error compensation divides the error of every format by the same factor at high
rates, so the ratios also bound what a text can reach with one width. Formats:

- integers of 2, 3 and 4 bits in groups of 64 with searched 16-bit scales;
- codebooks with the centroids of least error for each row, 16 bits each (`formats_at_equal_size.codebook`).

Both are compared with plain and dependent coded integers, rounded as by `rate` and for the least error, and with
Shannon's bound, 4 to the power of minus the bits. All metadata counts. The step of coded integers is searched until
they take the same bits.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benches.studies.formats_at_equal_size import codebook
from benches.tools import machine
from moepack.methods.rate.step_size import encoded
from moepack.solvers.groupwise import group_values, quantize_groupwise
from moepack.solvers.priced import PRICE, Profile, round_priced, scale_of, worth_of

GROUP = 64

CODED = {
    "plain": (False, worth_of(False)),
    "plain, least error": (False, PRICE),
    "dependent": (True, worth_of(True)),
    "dependent, least error": (True, PRICE / 2),
}
"""Kinds of coded integers: whether codes are dependent, and the price of a bit in squared steps."""

ROUNDS, NEAR = 12, 0.002
"""Maximum number of steps that are tried, and the accepted difference in bits."""


def one_width(weights: Tensor) -> Iterator[tuple[str, float, float]]:
    """Yield the name, bits per weight and mean squared error of each format with one width."""
    for bits in (2, 3, 4):
        groups = quantize_groupwise(weights, bits, GROUP, symmetric=True, search=True, name="")
        error = (group_values(groups, bits, GROUP) - weights).square().mean()
        yield f"integers of {bits} bits, groups of {GROUP}", bits + 16 / GROUP, float(error)
    for name, bits, error in codebook(weights):
        yield f"{name} per row", bits, error / weights.numel()


def coded_error(weights: Tensor, profile: Profile, bits: float, kind: str) -> float:
    """Return the mean squared error of coded integers with the given bits."""
    dependent, price = CODED[kind]
    step = 4.13 * 2.0**-bits  # plain codes of normal weights at high rates; dependent ones search from here
    for _ in range(ROUNDS):
        lengths = profile.lengths(step, price, dependent)
        codes = round_priced(weights, step, lengths, price)
        own = 8 * encoded(codes[None], lengths.largest, dependent).nbytes / weights.numel()
        if abs(own - bits) < NEAR:
            break
        step *= 2.0 ** (own - bits)
    error = float((codes * scale_of(step, dependent) - weights).square().mean())
    return error * 4.0 ** (own - bits)


def compare(shape: tuple[int, int], seed: int) -> dict[str, dict[str, float]]:
    """Return by format its bits, its error in squared units of the weights, and its error over each coded kind's."""
    torch.manual_seed(seed)
    weights = torch.randn(shape)
    profile, found = Profile(), {}
    profile.add(weights, 1.0)
    for name, bits, error in one_width(weights):
        ratios = {kind: error / coded_error(weights, profile, bits, kind) for kind in CODED}
        found[name] = {"bits": bits, "error": error, **ratios, "Shannon's bound": error * 4.0**bits}
    return found


def main() -> None:
    """Print a table of means over seeds, and save them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("build/one-width.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [compare((options.rows, options.columns), seed) for seed in range(options.seeds)]
    means = {
        name: {key: statistics.fmean(run[name][key] for run in runs) for key in own} for name, own in runs[0].items()
    }
    heads = list(next(iter(means.values())))
    print(f"| | {' | '.join(heads)} |\n{'|---' * (len(heads) + 1)}|")
    for name, own in means.items():
        ratios = " | ".join(f"{own[key]:.2f}" for key in heads[2:])
        print(f"| {name} | {own['bits']:.3f} | {own['error']:.5f} | {ratios} |")
    rounded = {name: {key: round(value, 5) for key, value in own.items()} for name, own in means.items()}
    machine.save(options.out, 1, rounded)


if __name__ == "__main__":
    main()

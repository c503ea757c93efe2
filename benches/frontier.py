"""Loss over bits: what methods lose at the bits that they take, model by model, in one run.

    python benches/frontier.py MODEL [MODEL ...] --text FILE [--text FILE] [--rates 2.2 3.2 4.2] [--chars 100000]
        [--threads 1] [--device cpu] [--out build/frontier.json]

Measured are `rate` at the given bits a weight and `finequant` with 2, 3 and 4 bits, on the experts alone and without a
calibration text. Bits are those of the packed bytes, all metadata counted; losses are in nats a token over those of the
original.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import machine
from moepack.methods import Method, create
from yardstick import Yardstick


def contestants(rates: list[float]) -> dict[str, Method]:
    """The methods by the name that tables give them."""
    found = {f"rate {rate:g}": create("rate", bits_per_weight=rate, roles="none") for rate in rates}
    return found | {f"finequant {bits}": create("finequant", bits=bits) for bits in (2, 3, 4)}


def main() -> None:
    """Measure every method on every model; print a line for each, and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", action="append", type=Path, required=True)
    parser.add_argument("--rates", nargs="+", type=float, default=[2.2, 3.2, 4.2])
    parser.add_argument("--chars", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("build/frontier.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for path in options.models:
        model = Yardstick(path, options.text, options.chars, options.device)
        for name, method in contestants(options.rates).items():
            row = {"model": model.name, "method": name, **model.measure(method)}
            rises = "  ".join(f"{text} {rise:+.4f}" for text, rise in row["rise"].items())
            print(f"{model.name:18} {name:14} {row['bits_per_weight']:.3f} bits  {rises}", flush=True)
            rows.append(row)
            figures = {"chars": options.chars, "rows": rows}
            machine.save(options.out, options.threads, figures, options.device)


if __name__ == "__main__":
    main()

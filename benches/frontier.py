"""Loss over bits: what methods lose at the bits that they take, model by model, in one run.

    python benches/frontier.py MODEL [MODEL ...] --calibration FILE --text FILE [--text FILE] [--only gate_proj up_proj]
        [--methods free text ...] [--rates 1.25 1.6 2.2 3.2 4.2] [--samples 64] [--chars 100000] [--threads 1]
        [--device cpu] [--out build/frontier.json]

Measured are `rate` at the given bits a weight without a text (free) and with one (text), `finequant` with 2, 3 and 4
bits, `milo`, `qmoe` with two bits, and its ternary experts at the rates up to 2 (knob), on the experts alone or some of
their projections. Bits are those of the packed bytes, all metadata counted; losses are in nats a token over those of
the original. With --merge, figures of earlier runs are put in front.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import machine
from moepack.methods import Method, create
from yardstick import Yardstick

MOST_TERNARY = 2.0
"""Bits a weight that ternary experts may be given."""


def contestants(options: argparse.Namespace) -> Iterator[tuple[str, Method]]:
    """The methods by the name that tables give them."""
    seen = {"calibration": str(options.calibration), "samples": options.samples, "device": options.device}
    knobs = [rate for rate in options.rates if rate <= MOST_TERNARY]
    kinds: dict[str, Callable[[], Iterator[tuple[str, Method]]]] = {
        "free": lambda: (
            (f"rate {rate:g}", create("rate", bits_per_weight=rate, roles="none")) for rate in options.rates
        ),
        "text": lambda: (
            (f"rate {rate:g} with a text", create("rate", bits_per_weight=rate, roles="none", **seen))
            for rate in options.rates
        ),
        "finequant": lambda: ((f"finequant {bits}", create("finequant", bits=bits)) for bits in (2, 3, 4)),
        "milo": lambda: iter([("milo", create("milo"))]),
        "qmoe": lambda: iter([("qmoe 2", create("qmoe", bits="2", **seen))]),
        "knob": lambda: ((f"qmoe {rate:g}", create("qmoe", bits_per_weight=rate, **seen)) for rate in knobs),
    }
    for kind in options.methods:
        yield from kinds[kind]()


def main() -> None:
    """Measure every method on every model; print a line for each, and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", action="append", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="projections that are packed; all of them by default")
    parser.add_argument("--methods", nargs="+", default=["free", "text", "finequant", "milo", "qmoe", "knob"])
    parser.add_argument("--rates", nargs="+", type=float, default=[1.25, 1.6, 2.2, 3.2, 4.2])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--chars", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--merge", action="append", type=Path, default=[])
    parser.add_argument("--out", type=Path, default=Path("build/frontier.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for earlier in options.merge:
        rows += json.loads(earlier.read_text())["figures"]["rows"]
    for path in options.models:
        model = Yardstick(path, options.text, options.chars, options.device)
        for name, method in contestants(options):
            row = {"model": model.name, "method": name, "only": options.only, **model.measure(method, options.only)}
            rises = "  ".join(f"{text} {rise:+.4f}" for text, rise in row["rise"].items())
            print(f"{model.name:18} {name:20} {row['bits_per_weight']:.3f} bits  {rises}", flush=True)
            rows.append(row)
            figures = {"chars": options.chars, "samples": options.samples, "rows": rows}
            machine.save(options.out, options.threads, figures, options.device)


if __name__ == "__main__":
    main()

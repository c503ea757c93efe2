"""Compares calibrated and rounded experts: coded bits per weight and loss, as JSON and the table of
docs/methods/qmoe.md.

    python -m benches.quality.qmoe MODEL [MODEL ...] --calibration TEXT --text TEXT [--text TEXT] [--device cuda]

Each model is packed once per method and measured by `method_loss.py`: windows of 512 tokens for decoders, span
corruption for encoder-decoders.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benches.tools import machine
from benches.tools.method_loss import MethodLoss
from moepack.methods import Method, Qmoe, Ternary
from moepack.methods.qmoe import PUBLISHED

TERNARY, TWO_BIT = "RTN ternary", "RTN 2 bit, group 64"
ORDER = (
    TERNARY, "QMoE ternary, as published", "QMoE ternary",
    TWO_BIT, "QMoE 2 bit, group 64, as published", "QMoE 2 bit, group 64",
)  # fmt: skip
Rows = dict[str, dict[str, Any]]


def methods(options: argparse.Namespace) -> dict[str, Method]:
    """The rows of the table."""
    common = {"calibration": str(options.calibration), "samples": options.samples, "device": options.device}
    common["buffer"] = "device"
    table: dict[str, Method] = {
        TERNARY: Ternary(),
        "QMoE ternary, as published": Qmoe(**common, **PUBLISHED),
        "QMoE ternary": Qmoe(**common),
        TWO_BIT: Qmoe(**common, bits="2", solver="rtn"),
        "QMoE 2 bit, group 64, as published": Qmoe(**common, bits="2", **PUBLISHED),
        "QMoE 2 bit, group 64": Qmoe(**common, bits="2"),
    }
    return {name: method for name, method in table.items() if not options.only or name in options.only}


def measure(model: Path, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of one model by name, one after the other."""
    yardstick = MethodLoss(model, options.text, options.chars, options.device)
    for name, method in methods(options).items():
        row = {**yardstick.measure(method), "original": yardstick.original}
        print(model.name, name, json.dumps(row), flush=True)
        yield name, row


def table(figures: dict[str, Rows]) -> str:
    """Loss increases in nats per token and relative to rounding to equal bits, as Markdown."""
    texts = list(next(iter(next(iter(figures.values())).values()))["rise"])
    lines = [f"| model | method | bits per weight | {' | '.join(texts)} |", "|---|---|---|" + "---|" * len(texts)]
    for model, rows in figures.items():
        for name, row in sorted(rows.items(), key=lambda item: ORDER.index(item[0])):
            rounded = rows.get(TWO_BIT if "2 bit" in name else TERNARY, row)["rise"]
            cells = [_cell(rise, rounded[text], rounded is row["rise"]) for text, rise in row["rise"].items()]
            lines.append(f"| {model} | {name} | {row['bits_per_weight']:.3f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(rise: float, rounded: float, same: bool) -> str:
    return f"{rise:+.3f}" if same or rounded <= 0 else f"{rise:+.3f} ({rise / rounded:.2f}x)"


def main() -> None:
    """Measure every model, save, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--text", action="append", type=Path, default=[])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--chars", type=int, default=250_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="names of the table's rows to measure")
    parser.add_argument("--out", type=Path, default=Path("build/qmoe.json"))
    parser.add_argument("--merge", action="append", type=Path, default=[], help="earlier results to add or show")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, Rows] = {}
    for earlier in map(Path.read_text, options.merge):
        content = json.loads(earlier)
        for model, rows in content["figures"].items():
            figures.setdefault(model, {}).update(rows)
    if options.merge and not options.models:
        machine.write(options.out, content["machine"], figures)
    for model in options.models:
        rows = figures.setdefault(model.name, {})
        for name, row in measure(model, options):
            rows[name] = row
            machine.save(options.out, options.threads, figures, options.device)
    print(table(figures))


if __name__ == "__main__":
    main()

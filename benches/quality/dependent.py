"""Measures the gain of dependent codes: the loss of `rate` with dependent and with plain codes, at equal bits.

    python -m benches.quality.dependent MODEL [MODEL ...] --text FILE [--text FILE] [--calibration FILE] [--samples 64]
        [--rates 1.5 2.2 3.2 4.2] [--chars 30000] [--merge FILE] [--out FILE]

Only experts are packed, as by `moepack compress`, with a text if one is given. Bits are those of the packed bytes; loss
increases are in nats per token over the original.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benches.tools import machine
from benches.tools.method_loss import MethodLoss
from moepack.methods.rate import Rate

FREE = {"calibration": "none"}
"""Settings without a text."""


def compare(model: MethodLoss, rate: float, seen: dict[str, Any]) -> dict[str, Any]:
    """Measure both kinds of codes at a rate, with the calibration settings `seen`."""
    row: dict[str, Any] = {"model": model.name, "kind": "free" if seen == FREE else "text", "rate": rate}
    for codes in ("plain", "dependent"):
        row[codes] = model.measure(Rate(rate, roles="none", codes=codes, **seen))
    return row


def main() -> None:
    """Compare on every model; print a line for each rate, and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", action="append", type=Path, required=True)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--rates", nargs="+", type=float, default=[1.5, 2.2, 3.2, 4.2])
    parser.add_argument("--chars", type=int, default=30_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--merge", action="append", type=Path, default=[])
    parser.add_argument("--out", type=Path, default=Path("build/dependent.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for earlier in options.merge:
        rows += json.loads(earlier.read_text())["figures"]["rows"]
    seen = {"calibration": str(options.calibration), "samples": options.samples}
    for path in options.models:
        model = MethodLoss(path, options.text, options.chars)
        for rate in options.rates:
            rows.append(compare(model, rate, seen if options.calibration else FREE))
            print(_line(rows[-1]), flush=True)
            machine.save(
                options.out, options.threads, {"chars": options.chars, "samples": options.samples, "rows": rows}
            )


def _line(row: dict[str, Any]) -> str:
    """A readable row."""
    plain, dependent = row["plain"], row["dependent"]
    rises = "  ".join(
        f"{text} {rise:+.4f} -> {dependent['rise'][text]:+.4f} ({dependent['rise'][text] / rise:.2f})"
        for text, rise in plain["rise"].items()
    )
    bits = f"{plain['bits_per_weight']:.3f} -> {dependent['bits_per_weight']:.3f} bits"
    return f"{row['model']:16} {row['kind']:5} {bits}  {rises}  {plain['seconds']:.0f} -> {dependent['seconds']:.0f} s"


if __name__ == "__main__":
    main()

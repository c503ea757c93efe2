"""Calibrated against rounded experts: coded bits a weight and loss, as the Markdown table of docs/methods/qmoe.md.

    python benches/qmoe.py MODEL [MODEL ...] --calibration TEXT --evaluation TEXT [TEXT ...]

Each model is packed once for each method; losses come from `moepack.evaluation` (windows of 512 tokens; span corruption
for encoder-decoder models), bits from the packed bytes with all their metadata. The first line names the machine.
"""

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import torch

from moepack.evaluation import evaluate
from moepack.methods import Qmoe
from moepack.pipeline import compress


def methods(options: argparse.Namespace) -> dict[str, object]:
    common = {"calibration": options.calibration, "samples": options.samples, "device": options.device}
    table: dict[str, object] = {
        "RTN ternary": "ternary",
        "QMoE ternary, as published": Qmoe(**common, damping=0.1, match_energy=False),
        "QMoE ternary": Qmoe(**common),
    }
    if options.two_bit:
        table["RTN 2 bit, group 64"] = Qmoe(**common, bits="2", solver="rtn")
        table["QMoE 2 bit, group 64"] = Qmoe(**common, bits="2")
    return {name: method for name, method in table.items() if not options.only or name in options.only}


def measure(model: Path, options: argparse.Namespace) -> list[dict[str, object]]:
    texts = [Path(text) for text in options.evaluation]
    original = [evaluate(model, text, options.chars).loss for text in texts]
    rows: list[dict[str, object]] = []
    for name, method in methods(options).items():
        with tempfile.TemporaryDirectory() as directory:
            report = compress(model, Path(directory) / "out", method=method)
            losses = [evaluate(report.path, text, options.chars).loss for text in texts]
        increase = [loss - base for loss, base in zip(losses, original, strict=True)]
        row = {"model": model.name, "method": name, "bits": report.bits_per_weight, "increase": increase}
        rows.append({**row, "seconds": report.seconds, "original": original})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def show(rows: list[dict[str, object]], texts: list[str]) -> None:
    print(f"\n| model | method | bits a weight | {' | '.join(Path(t).stem for t in texts)} |")
    print("|---|---|---|" + "---|" * len(texts))
    for row in rows:
        figures = " | ".join(f"+{value:.3f}" for value in row["increase"])
        print(f"| {row['model']} | {row['method']} | {row['bits']:.3f} | {figures} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--evaluation", nargs="+", required=True)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--chars", type=int, default=250_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*", help="names of the table's rows to measure")
    parser.add_argument("--no-two-bit", dest="two_bit", action="store_false")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{options.samples} samples; {time.strftime('%Y-%m-%d')}", flush=True)
    rows = [row for model in options.models for row in measure(model, options)]
    show(rows, options.evaluation)


if __name__ == "__main__":
    main()

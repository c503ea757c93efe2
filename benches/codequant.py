"""CodeQuant beside rounding and k-means: increase of the loss by bits of weights and activations, as JSON and a table.

    python benches/codequant.py MODEL --calibration TEXT --text TEXT [--bits 4x8 4x4 ...] [--rows NAME ...]

Every row packs the model's experts and linear layers (attention, shared experts, dense feed-forward layers) and
measures the packed directory as it runs: with 8 or 4 activation bits the kernels round activations for each token and
multiply integers. Rows that are in the results file already are not measured again, so long runs can be cut.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import machine
import moepack
from moepack.format import PackedDirectory
from moepack.methods import CodeQuant
from moepack.pipeline import compress
from moepack.runtime.loading import open_model, open_tokenizer

ROUNDED = {"start": "uniform", "steps": 0, "rotation": "none"}
CLUSTERED = {"steps": 0, "rotation": "none"}
ROWS: dict[str, dict[str, Any]] = {
    "RTN": ROUNDED,
    "k-means": {**CLUSTERED, "weighted": False},
    "k-means, Hessian weights": CLUSTERED,
    "RTN, random rotation": {**ROUNDED, "rotation": "random"},
    "CodeQuant": {},
    "no rotation": {"rotation": "none"},
    "random rotation": {"rotation": "random"},
    "no Hessian weights": {"weighted": False},
    "no fine-tuning": {"steps": 0},
    "equation 8": {"assignment": "diagonal"},
    "drift": {"drift": 0.75},
    "no permutation": {"permute": False},
    "tokens weighted equally": {"weigh_tokens": False},
}


def measure(model: Path, name: str, bits: str, options: argparse.Namespace) -> dict[str, Any]:
    """Pack and evaluate one row."""
    weight_bits, activation_bits = map(int, bits.split("x"))
    common = {"calibration": str(options.calibration), "samples": options.samples, "block": options.block}
    method = CodeQuant(**common, weight_bits=weight_bits, activation_bits=activation_bits, **ROWS[name])
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        report = compress(model, Path(directory) / "out", method=method)
        seconds = time.perf_counter() - start
        loss = moepack.evaluate(Path(directory) / "out", options.text, options.chars).loss
        records = PackedDirectory.open(Path(directory) / "out").manifest.packed().values()
        objectives = [record.details["objective"] for record in records]
    return {
        "loss": loss,
        "bits_per_weight": report.bits_per_weight,
        "seconds": round(seconds, 1),
        "objective": [
            sum(o[0] for o in objectives) / len(objectives),
            sum(o[-1] for o in objectives) / len(objectives),
        ],
    }


def table(figures: dict[str, Any]) -> str:
    """Nats a token above the original model, a column for each pair of bits, as Markdown."""
    lines = []
    for model, rows in figures.items():
        columns = sorted({key.split(" ", 1)[0] for key in rows if key != "original"}, reverse=True)
        lines += [
            f"| {model} | {' | '.join('W' + c.replace('x', ' A') for c in columns)} |",
            "|---|" + "---|" * len(columns),
        ]
        for name in ROWS:
            cells = [rows.get(f"{column} {name}") for column in columns]
            if any(cells):
                shown = [f"{cell['loss'] - rows['original']:+.4f}" if cell else "" for cell in cells]
                lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing, save after each row, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--chars", type=int, default=100_000)
    parser.add_argument("--block", default="row")
    parser.add_argument("--bits", nargs="*", default=["4x8", "4x4"], help="weight bits x activation bits")
    parser.add_argument("--rows", nargs="*", default=list(ROWS)[:5])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/codequant.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = json.loads(options.out.read_text())["figures"] if options.out.exists() else {}
    for model in options.models:
        rows = figures.setdefault(model.name, {})
        if "original" not in rows:
            original, tokenizer = open_model(model, torch.float32), open_tokenizer(model)
            rows["original"] = moepack.evaluate(original, options.text, options.chars, tokenizer=tokenizer).loss
        for bits in options.bits:
            for name in options.rows:
                if f"{bits} {name}" not in rows:
                    rows[f"{bits} {name}"] = found = measure(model, name, bits, options)
                    print(model.name, bits, name, f"{found['loss'] - rows['original']:+.4f}", found, flush=True)
                    machine.save(options.out, options.threads, figures)
    print(table(figures))


if __name__ == "__main__":
    main()

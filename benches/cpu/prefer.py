"""Compares the values of `auto --prefer`: tokens per second and loss.

    python -m benches.cpu.prefer MODEL [MODEL ...] --calibration FILE --text FILE [--bits 3 4 5] [--samples 64]
        [--chars 100000] [--device cpu] [--target FILE] [--threads 2] [--rounds 7] [--tokens 32]
        [--out build/prefer.json]

All have the same size and text. Models decode on the CPU, alternating round by round. Prints medians, and the speed
that the plan expected. --device is where the text is read and losses are measured.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

import moepack
from benches.cpu.decode import PROMPT, decode
from benches.tools import machine
from moepack.backends.speeds import speeds_here
from moepack.backends.threads import set_threads
from moepack.comparison import Comparison
from moepack.methods import Auto
from moepack.pipeline.estimate import estimate


def compare(path: Path, bits: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per preference."""
    compared = Comparison(path, options.text, options.chars, options.device)
    loaded: dict[str, Any] = {}
    rows = []
    for prefer in ("quality", "balance", "speed"):
        method = Auto(
            bits_per_weight=bits, prefer=prefer, calibration=options.calibration, samples=options.samples,
            device=options.device, target=options.target,
        )  # fmt: skip

        def keep(packed: Path, prefer: str = prefer) -> Path:
            loaded[prefer] = moepack.load(packed)
            return packed

        expected = estimate(path, Path("/nonexistent-moepack"), method).tokens_per_second
        point = compared.point(prefer, method, then=keep)
        rows.append({"model": path.name, "bits": bits, "expected_tokens_per_second": expected, **point.to_json()})
    for row, speed in zip(rows, tokens_per_second(list(loaded.values()), options), strict=True):
        row["tokens_per_second"] = speed
    return rows


def tokens_per_second(models: list[Any], options: argparse.Namespace) -> list[float]:
    """Medians over rounds that alternate between the models."""
    prompt = torch.arange(PROMPT)[None] * 31 % (models[0].config.vocab_size - 3) + 3
    times: list[list[float]] = [[] for _ in models]
    for _ in range(options.rounds + 1):
        for model, own in zip(models, times, strict=True):
            own.append(decode(model, prompt, options.tokens))
    return [1 / statistics.median(own[1:]) for own in times]


def main() -> None:
    """Print and save a row for each model, size and preference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--calibration")
    parser.add_argument("--text", action="append", type=Path, default=[])
    parser.add_argument("--bits", nargs="+", type=float, default=[3, 4, 5])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--chars", type=int, default=100_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--target")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("build/prefer.json"))
    options = parser.parse_args()
    set_threads(options.threads)
    speeds, rows = speeds_here().to_json(), []
    for path in options.models:
        for bits in options.bits:
            for row in compare(path, bits, options):
                rows.append(row)
                rise = "  ".join(f"{text} {value:+.4f}" for text, value in row["rise"].items())
                print(
                    f"{row['model']:16} {row['bits']:4.2f} bits  {row['method']:8} {row['tokens_per_second']:7.1f} "
                    f"tokens/s (expected {row['expected_tokens_per_second']:.0f})  {rise}",
                    flush=True,
                )
            machine.save(options.out, options.threads, {"speeds": speeds, "rows": rows}, options.device)


if __name__ == "__main__":
    main()

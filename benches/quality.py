"""Compresses models and scores them: size, loss and speed of each method beside the original, as a Markdown table.

    python benches/quality.py MODEL [MODEL ...] --text FILE [--text FILE] [--code fsv8] [--out build/quality.json]

Sizes come from the directories, losses from `moepack.evaluate`: the same windows for the original and the packed
model.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import machine
import moepack


def score(model: Path, texts: list[Path], code: str, chars: int) -> dict[str, Any]:
    """One model: its ternary directory beside the original."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "packed"
        report = moepack.compress(model, out, method="ternary", code=code)
        row: dict[str, Any] = {
            "model": model.name,
            "code": code,
            "bits_per_weight": report.bits_per_weight,
            "expert_ratio": 16 / report.bits_per_weight,
            "seconds": report.seconds,
        }
        for text in texts:
            original = moepack.evaluate(model, text, chars=chars)
            packed = moepack.evaluate(out, text, chars=chars)
            row[text.stem] = {"original": original.loss, "packed": packed.loss}
        return row


def table(rows: list[dict[str, Any]], texts: list[Path]) -> str:
    """The rows as Markdown."""
    names = [text.stem for text in texts]
    head = ["model", "bits a weight", "smaller than bf16", *(f"{name}: bf16 → packed, nats" for name in names)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [row["model"], f"{row['bits_per_weight']:.3f}", f"{row['expert_ratio']:.1f}x"]
        cells += [f"{row[name]['original']:.3f} → {row[name]['packed']:.3f}" for name in names]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Score every model and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", action="append", type=Path, required=True)
    parser.add_argument("--code", default="fsv8")
    parser.add_argument("--chars", type=int, default=250_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/quality.json"))
    args = parser.parse_args()
    rows = [score(model, args.text, args.code, args.chars) for model in args.models]
    print(table(rows, args.text))
    machine.save(args.out, args.threads, rows)


if __name__ == "__main__":
    main()

"""Compares leaving experts out with fewer bits, at equal bytes of all safetensors files.

    python -m benches.quality.prune MODEL [MODEL ...] --calibration FILE --text FILE [--text FILE] [--bits 1.5 2.5]
        [--shares 0 0.125 0.25 auto] [--ways drop merge] [--samples 12] [--chars 20000] [--calibrated] [--threads 1]
        [--out build/prune.json]

Every variant is packed by `auto` to the same size: bits per weight of the whole, unpruned checkpoint. A pruned model
therefore has more bits for each remaining weight. Without --calibrated, the text serves only to choose the experts.
The share "auto" is what `--prune auto` chooses; it requires --calibrated.
Prints the loss increase over the unpacked, unpruned model in nats per token by text, measured by `moepack.evaluate`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

import moepack
from benches.tools import machine
from moepack.evaluation import evaluate
from moepack.methods import create
from moepack.methods.auto.target import weight_count
from moepack.pipeline.pruning import AUTO, Pruning
from moepack.pipeline.share import leave_out
from moepack.pipeline.source import opened

Share = float | None
"""None stands for the share that `--prune auto` chooses."""


def share_of(text: str) -> Share:
    """Parse a share."""
    return None if text == AUTO else float(text)


def variants(shares: list[Share], ways: list[str]) -> list[tuple[Share, str]]:
    """Return the prunings to compare; a share of 0 prunes nothing."""
    return [(share, way) for share in shares for way in (ways[:1] if share == 0 else ways)]


def measured(
    model: Path, bits: float, share: Share, way: str, given: argparse.Namespace, before: dict[str, float]
) -> dict[str, Any]:
    """Pack a model with or without pruning; return its size and its loss increase."""
    size = int(weight_count(moepack.Checkpoint.open(model)) * bits / 8)
    text: dict[str, Any] = {"calibration": str(given.calibration), "samples": given.samples}
    packing = text if given.calibrated else {"calibration": "none"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "packed"
        with opened(model, out) as source:
            leave_out(source, None if share == 0 else Pruning(share, way), create("auto", size=size, **text), out)
            left_out = 0.0 if source.pruning is None else source.pruning.share
            notes = source.checkpoint.notes
            moepack.compress(source, out, size=size, check=False, **packing)
        stored = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        rise = {text.stem: evaluate(out, text, given.chars).loss - before[text.stem] for text in given.text}
    losses = ", ".join(f"{name} {loss:+.4f}" for name, loss in rise.items())
    chosen = AUTO if share is None else ""
    print(
        f"{model.name:<16} {bits:g} bits, {chosen:4} {left_out:6.1%} {way:<6} {stored:>10,} bytes, {losses}", flush=True
    )
    return {
        "model": model.name, "bits": bits, "share": AUTO if share is None else share, "left_out": left_out, "way": way,
        "calibrated": given.calibrated, "bytes": stored, "rise": rise, "notes": notes,
    }  # fmt: skip


def main() -> None:
    """Measure all variants of all models; save after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, action="append")
    parser.add_argument("--calibrated", action="store_true")
    parser.add_argument("--bits", type=float, nargs="+", default=[1.5, 2.5])
    parser.add_argument("--shares", type=share_of, nargs="+", default=[0.0, 0.125, 0.25])
    parser.add_argument("--ways", nargs="+", default=["drop", "merge"])
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--chars", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/prune.json"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    for model in given.models:
        before = {text.stem: evaluate(model, text, given.chars).loss for text in given.text}
        for bits in given.bits:
            for share, way in variants(given.shares, given.ways):
                rows.append(measured(model, bits, share, way, given, before))
                machine.save(given.out, given.threads, rows)


if __name__ == "__main__":
    main()

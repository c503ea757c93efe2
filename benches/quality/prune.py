"""Compares leaving experts out with fewer bits, at equal bytes of all safetensors files.

    python -m benches.quality.prune MODEL [MODEL ...] --calibration FILE --text FILE [--text FILE] [--bits 1.5 2.5]
        [--shares 0 0.125 0.25] [--ways drop merge] [--samples 12] [--chars 20000] [--calibrated] [--threads 1]
        [--out build/prune.json]

Every variant is packed by `auto` to the same size: bits per weight of the whole, unpruned checkpoint. A pruned model
therefore has more bits for each remaining weight. Without --calibrated, the text serves only to choose the experts.
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
from moepack.pipeline.pruning import Pruning
from moepack.pipeline.source import opened


def variants(shares: list[float], ways: list[str]) -> list[tuple[float, str]]:
    """Return the prunings to compare; a share of 0 prunes nothing."""
    return [(share, way) for share in shares for way in (ways if share else ways[:1])]


def measured(
    model: Path, bits: float, share: float, way: str, given: argparse.Namespace, before: dict[str, float]
) -> dict[str, Any]:
    """Pack a model with or without pruning; return its size and its loss increase."""
    size = int(weight_count(moepack.Checkpoint.open(model)) * bits / 8)
    text: dict[str, Any] = {"calibration": str(given.calibration), "samples": given.samples}
    packing = text if given.calibrated else {"calibration": "none"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "packed"
        with opened(model, out) as source:
            source.prune(Pruning(share, way) if share else None, create("auto", **text))
            moepack.compress(source, out, size=size, check=False, **packing)
        stored = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        rise = {text.stem: evaluate(out, text, given.chars).loss - before[text.stem] for text in given.text}
    losses = ", ".join(f"{name} {loss:+.4f}" for name, loss in rise.items())
    print(f"{model.name:<16} {bits:g} bits, {share:6.1%} {way:<6} {stored:>10,} bytes, {losses}", flush=True)
    return {
        "model": model.name, "bits": bits, "share": share, "way": way, "calibrated": given.calibrated, "bytes": stored,
        "rise": rise,
    }  # fmt: skip


def main() -> None:
    """Measure all variants of all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, action="append")
    parser.add_argument("--calibrated", action="store_true")
    parser.add_argument("--bits", type=float, nargs="+", default=[1.5, 2.5])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.125, 0.25])
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
            rows += [measured(model, bits, *each, given, before) for each in variants(given.shares, given.ways)]
    machine.save(given.out, given.threads, rows)


if __name__ == "__main__":
    main()

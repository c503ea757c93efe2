"""Measures what the built-in text, the default of `rate` and `finequant`, gains or loses on kinds of held-out texts.

    python -m benches.quality.default_text MODEL [MODEL ...] --texts FILE FILE ... [--methods rate finequant auto]
        [--bits 3] [--samples 128] [--windows 8] [--threads 1] [--device cpu] [--results build/default-text.json]

Each method packs MODEL at the given bits with `--calibration none` and with its default. `rate` packs all linear layers
and embeddings; `finequant` the experts and, with 8 bits, the other linear layers, in groups of 64. Prints the loss
increase in nats per token, the divergence from the original, and the seconds of both.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import moepack
from benches.tools import machine
from benches.tools.scores import SCORED, Scores
from moepack.methods import create

SETTINGS: dict[str, dict[str, Any]] = {"finequant": {"dense_bits": 8}, "rate": {}, "auto": {}}
"""Settings besides the bits and the text."""


def packed(model: Path, name: str, text: dict[str, Any], options: argparse.Namespace, scores: Scores) -> dict[str, Any]:
    """Pack a model; return seconds, bits per weight and scores."""
    key = "bits" if name == "finequant" else "bits_per_weight"
    bits = int(options.bits) if name == "finequant" else options.bits
    method = create(name, **{key: bits}, **SETTINGS[name], **text, device=options.device)
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        report = moepack.compress(model, Path(folder) / "out", method=method, check=False)
        seconds = time.process_time() - start
        found = scores.of(moepack.load(report.path, dtype="float32"))
    row = {"model": model.name, "method": name, "text": text.get("calibration", "built-in")}
    return {**row, "bits": round(report.bits_per_weight, 3), "processor_seconds": round(seconds, 1), "scores": found}


def main() -> None:
    """Measure every model, method and text; save after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="evaluation texts, one per kind")
    parser.add_argument("--methods", nargs="+", choices=SETTINGS, default=["rate", "finequant"])
    parser.add_argument("--bits", type=float, default=3.0)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--windows", type=int, default=SCORED)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=Path("build/default-text.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for model in options.models:
        scores = Scores(model, options.texts, "cpu", options.windows)
        for name in options.methods:
            for text in ({"calibration": "none"}, {"samples": options.samples}):
                rows.append(packed(model, name, text, options, scores))
                print(rows[-1], flush=True)
                machine.save(options.results, options.threads, rows)


if __name__ == "__main__":
    main()

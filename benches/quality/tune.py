"""Measures the gain of `moepack tune` on coded integers: loss before and after, and that of a directory of equal bits.

    python -m benches.quality.tune MODEL [MODEL ...] --tuning FILE --text FILE [--text FILE] [--calibration FILE]
        [--rates 2.2]
        [--roles none] [--samples 64] [--tokens 256] [--steps 100] [--batch 8] [--learning 5e-4] [--long 512]
        [--chars 60000] [--threads 1] [--device cpu] [--out build/tune.json]

Directories are packed by the method `rate`, without a text or, with --calibration, solved on its samples. They are
fine-tuned on samples with the given number of tokens of another text, or of the same one. Each line has the bits per
packed weight, including metadata, and the loss increase over the original in nats per token. Fine-tuned rows with at
least --long columns have their own scales; "as many bits" is a directory compressed directly to the resulting bits.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benches.tools import machine
from moepack import evaluate
from moepack.format import PackedDirectory
from moepack.methods import create
from moepack.pipeline import compress
from moepack.pipeline.tune import tune
from moepack.tuning import TuneSettings, tensors


class Bench:
    """One model."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.path, self.options = path, options
        self.original = self.losses(path)

    def losses(self, path: Path) -> dict[str, float]:
        """Nats per token by text."""
        options = self.options
        return {text.stem: evaluate(path, text, options.chars, mode="exact").loss for text in options.text}

    def compressed(self, out: Path, rate: float) -> Path:
        """Compress to the given bits per weight."""
        options = self.options
        seen = {"calibration": str(options.calibration), "samples": options.samples}
        seen = seen if options.calibration else {"calibration": "none"}
        compress(self.path, out, method=create("rate", bits_per_weight=rate, roles=options.roles, **seen))
        return out

    def figures(self, name: str, path: Path) -> dict[str, Any]:
        """Bits and increase of the loss of a directory."""
        records = PackedDirectory.open(path).manifest.packed().values()
        bits = 8 * sum(record.nbytes for record in records) / sum(math.prod(record.shape) for record in records)
        rise = {text: loss - self.original[text] for text, loss in self.losses(path).items()}
        print(self.path.name, name, f"{bits:.3f}", *(f"{text} {more:+.4f}" for text, more in rise.items()), flush=True)
        return {"model": self.path.name, "name": name, "bits": bits, "rise": rise}

    def rows(self, rate: float) -> Iterator[dict[str, Any]]:
        """Before, after, and at equal bits."""
        options = self.options
        settings = TuneSettings(options.steps, options.learning, batch=options.batch)
        with tempfile.TemporaryDirectory() as directory:
            packed, tuned = self.compressed(Path(directory) / "packed", rate), Path(directory) / "tuned"
            yield (before := self.figures(f"rate {rate:g}", packed))
            tune(
                packed, self.path, tuned, calibration=str(options.tuning), sequence_length=options.tokens,
                samples=options.tune_samples, settings=settings, device=options.device,
            )  # fmt: skip
            yield (after := self.figures(f"rate {rate:g}, tuned", tuned))
            if after["bits"] > before["bits"]:
                more = self.compressed(Path(directory) / "more", rate + after["bits"] - before["bits"])
                yield self.figures(f"rate {rate:g}, as many bits", more)


def main() -> None:
    """Measure every model at every rate, print, and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--tuning", type=Path, required=True, help="text for fine-tuning")
    parser.add_argument("--calibration", type=Path, help="calibration text; default: none")
    parser.add_argument("--text", action="append", type=Path, required=True)
    parser.add_argument("--rates", nargs="+", type=float, default=[2.2])
    parser.add_argument("--roles", default="none")
    parser.add_argument("--samples", type=int, default=64, help="of the calibration")
    parser.add_argument("--tune-samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256, help="of a sample that is fine-tuned on")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--learning", type=float, default=TuneSettings.rate)
    parser.add_argument("--long", type=int, default=tensors.LONG)
    parser.add_argument("--chars", type=int, default=60_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("build/tune.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tensors.LONG = options.long
    rows: list[dict[str, Any]] = []
    for path in options.models:
        bench = Bench(path, options)
        for rate in options.rates:
            rows += bench.rows(rate)
    given = {name: value for name, value in vars(options).items() if name not in ("out", "models", "text")}
    named = {name: value.name if isinstance(value, Path) else str(value) for name, value in given.items()}
    machine.save(options.out, options.threads, {"settings": named, "rows": rows}, options.device)


if __name__ == "__main__":
    main()

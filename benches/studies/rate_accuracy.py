"""Measures how closely `rate` meets the requested bits over everything it packs, including all metadata.

    python -m benches.studies.rate_accuracy MODEL [MODEL ...] [--rates 0.9 1.25 1.6 2.2 3.2 4.2 6]
        [--calibration FILE] [--samples 64] [--roles all] [--threads 1] [--out build/rate-accuracy.json]

Each line has the requested bits, the packed bits, and the deviation in percent. `within` is the largest deviation of a
model.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

import torch

from benches.tools import machine
from moepack.format import PackedDirectory
from moepack.methods import create
from moepack.pipeline import compress


def landed(model: Path, rate: float, options: argparse.Namespace) -> float:
    """Bits per weight of a directory that was compressed to a requested rate."""
    seen = {"calibration": str(options.calibration), "samples": options.samples}
    seen = seen if options.calibration else {"calibration": "none"}
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "packed"
        compress(model, out, method=create("rate", bits_per_weight=rate, roles=options.roles, **seen))
        records = PackedDirectory.open(out).manifest.packed().values()
        return 8 * sum(record.nbytes for record in records) / sum(math.prod(record.shape) for record in records)


def main() -> None:
    """Measure every model at every rate, print, and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--rates", nargs="+", type=float, default=[0.9, 1.25, 1.6, 2.2, 3.2, 4.2, 6])
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--roles", default="all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/rate-accuracy.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for model in options.models:
        for rate in options.rates:
            bits = landed(model, rate, options)
            rows.append({"model": model.name, "asked": rate, "bits": bits, "off": 100 * (bits / rate - 1)})
            print(f"{model.name:18} {rate:g} asked, {bits:.4f} taken, {rows[-1]['off']:+.2f} %", flush=True)
        within = max(abs(row["off"]) for row in rows if row["model"] == model.name)
        print(f"{model.name:18} within {within:.2f} %", flush=True)
        figures = {"calibrated": options.calibration is not None, "roles": options.roles, "rows": rows}
        machine.save(options.out, options.threads, figures)


if __name__ == "__main__":
    main()

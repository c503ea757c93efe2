"""Compares all methods by size of the whole checkpoint and loss, for docs/methods/compare.png.

    python -m benches.quality.compare MODEL [MODEL ...] --calibration TEXT --text TEXT [--text TEXT] [--device cuda]

Every point is a directory written by `moepack.compress`. Its size is that of all its safetensors files, so that methods
that do not pack attention are comparable with methods that do. Its loss is that of the plain checkpoint that
`moepack.export` writes, or, if products round activations, of the packed model itself. The points of lines that end in
", tuned" are then fine-tuned (`moepack tune`). Parts can run separately with `--only` and be combined with `--merge`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benches.tools import machine
from benches.tools.pictures import LOSS, TEXTS, logarithmic, panels, write
from moepack.comparison import Comparison
from moepack.methods import Method, create
from moepack.pipeline.tune import tune

CALIBRATED = ("qmoe", "codequant")
CPU = ("finequant",)
"""Methods that have no setting for a device."""
POINTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "qmoe": [(f"{rate} bits", {"bits_per_weight": rate}) for rate in (0.87, 1.05, 1.25, 1.45)]
    + [("2 bits, group 64", {"bits": "2"})],
    "qmoe, dense layers packed": [
        ("2 bits, group 64, dense 8 bits", {"bits": "2", "dense_bits": 8}),
        ("1.25 bits, dense 8 bits", {"bits_per_weight": 1.25, "dense_bits": 8}),
        ("2 bits, group 64, dense 4 bits", {"bits": "2", "dense_bits": 4}),
        ("0.87 bits, dense 8 bits", {"bits_per_weight": 0.87, "dense_bits": 8}),
    ],
    "finequant": [
        (f"{bits} bits, group 64", {"bits": bits, "dense_bits": 8, "calibration": "none"}) for bits in (2, 3, 4, 8)
    ],
    "milo": [
        (f"{bits} bits, {more} % compensators", {"bits": bits, "rank": f"budget:{more}"})
        for bits in (2, 3, 4)
        for more in (5, 12)
    ],
    "codequant": [(f"{bits} bits a row", {"weight_bits": bits}) for bits in (2, 3, 4)],
    **{
        f"codequant, 8-bit activations{more}": [
            (f"{bits} bits a row", {"weight_bits": bits, "activation_bits": 8}) for bits in (2, 3, 4)
        ]
        for more in ("", ", tuned")
    },
}
"""Settings by line of the picture: a method and its distinguishing settings; all others are defaults."""

Rows = dict[str, dict[str, Any]]


class Bench:
    """One model, compared by the settings of `POINTS`."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.path, self.options = path, options
        self.compared = Comparison(path, options.text, options.chars, options.device)

    def point(self, method: Method, tuned: bool) -> dict[str, Any]:
        """Compress and measure: size relative to the original, loss increase, seconds of compression."""
        start = time.perf_counter()
        found = self.compared.point(method.name, method, then=self._tuned if tuned else lambda packed: packed)
        seconds = time.perf_counter() - start if tuned else found.seconds
        return {"size": found.size / self.compared.size, "rise": found.rise, "seconds": round(seconds, 1)}

    def _tuned(self, packed: Path) -> Path:
        """Fine-tune with the command's settings, on more samples."""
        out, options = packed.with_name("tuned"), self.options
        samples = {"calibration": str(options.calibration), "samples": options.tune_samples}
        tune(packed, self.path, out, device=options.device, **samples)
        return out

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The name and figures of every setting."""
        options = self.options
        calibration = {"calibration": str(options.calibration), "samples": options.samples}
        for name in options.only or POINTS:
            method = name.split(",")[0]
            common = {
                **(calibration if method in CALIBRATED else {}),
                **({} if method in CPU else {"device": options.device}),
            }
            for label, settings in POINTS[name] if options.point is None else POINTS[name][options.point :][:1]:
                yield f"{name}: {label}", self.point(create(method, **common, **settings), name.endswith(", tuned"))


def table(figures: dict[str, Rows]) -> str:
    """Size in percent of the original and loss increase by text, as Markdown."""
    texts = list(next(iter(next(iter(figures.values())).values()))["rise"])
    lines = [
        "| method | " + " | ".join(f"{model}: size | {' | '.join(texts)}" for model in figures) + " |",
        "|---|" + "---|" * (len(figures) * (1 + len(texts))),
    ]
    names = [f"{method}: {label}" for method, points in POINTS.items() for label, _ in points]
    for name in [name for name in names if any(name in rows for rows in figures.values())]:
        cells = [name]
        for rows in figures.values():
            row = rows.get(name)
            cells += [f"{100 * row['size']:.1f} %"] if row else ["-"]
            cells += [f"{row['rise'][text]:+.3f}" if row else "-" for text in texts]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(figures: dict[str, Rows], file: Path) -> None:
    """Draw the loss increase on the first text over size: one panel per model, one line per method."""
    figure, axes = panels(len(figures))
    for axis, (model, rows) in zip(axes, figures.items(), strict=True):
        for method in POINTS:
            points = sorted(
                (100 * row["size"], max(next(iter(row["rise"].values())), 1e-4))
                for name, row in rows.items()
                if name.startswith(f"{method}:")
            )
            if points:
                axis.plot(*zip(*points, strict=True), "o-", markersize=4, label=method)
        axis.set(title=model, xlabel="size of the checkpoint, % of bf16")
        logarithmic(axis)
    text = next(iter(next(iter(next(iter(figures.values())).values()))["rise"]))
    write(figure, axes, f"{LOSS} on {TEXTS.get(text, text)}", file)


def main() -> None:
    """Measure every model, save, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--text", action="append", type=Path, default=[])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tune-samples", type=int, default=512)
    parser.add_argument("--chars", type=int, default=250_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=POINTS, help="lines of the picture to measure")
    parser.add_argument("--point", type=int, help="measure only the setting with this index of each method")
    parser.add_argument("--out", type=Path, default=Path("build/compare.json"))
    parser.add_argument("--merge", action="append", type=Path, default=[], help="earlier results to add or show")
    parser.add_argument("--plot", type=Path, help="PNG file for the picture; needs matplotlib")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, Rows] = {}
    for earlier in map(Path.read_text, options.merge):
        content = json.loads(earlier)
        where = f"{content['machine']['processor']}, {content['machine']['device']}"
        for model, rows in content["figures"].items():
            named = {name: {"measured_on": where, **row} for name, row in rows.items()}
            figures.setdefault(model, {}).update(named)
    if options.merge and not options.models:
        machine.write(options.out, content["machine"], figures)
    for path in options.models:
        rows = figures.setdefault(path.name, {})
        for name, row in Bench(path, options).rows():
            print(path.name, name, json.dumps(row), flush=True)
            rows[name] = row
            machine.save(options.out, options.threads, figures, options.device)
    print(table(figures))
    if options.plot:
        draw(figures, options.plot)


if __name__ == "__main__":
    main()

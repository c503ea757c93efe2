"""Plots loss over bits per weight: the rate setting and GPTQ with scaled levels, as JSON, a Markdown table and a PNG.

    python -m benches.quality.rate_distortion MODEL [MODEL ...] --calibration FILE --text FILE [--text FILE]
        [--device cuda]

Scaled levels: GPTQ on the paper's grid with both levels of every row scaled by one factor, which also trades bits for
loss. Rate control: `moepack compress --method qmoe --bits-per-weight X`. Both use the same samples and the same
calibration, and are measured by `method_loss.py`. The picture requires matplotlib.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benches.tools import machine
from benches.tools.method_loss import MethodLoss
from benches.tools.pictures import LOSS, TEXTS, logarithmic, panels, write
from moepack.methods import Method, Qmoe
from moepack.methods.qmoe import PUBLISHED
from moepack.methods.qmoe.forms import TernaryForm
from moepack.solvers.grids import TernaryGrid

SCALES = (1.5, 1.2, 1.0, 0.85, 0.7, 0.55)
RATES = (0.6, 0.87, 1.05, 1.25, 1.45, 1.6)
SCALED, CONTROL = "scaled levels", "rate control"
"""Names of the two curves of a model, in the results and in the picture."""


class ScaledGrid(TernaryGrid):
    """The paper's grid with its levels times a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def fit(self, weights: Tensor) -> None:
        """Scale the row's minimum and maximum."""
        super().fit(weights)
        self.levels = (self.levels * self.factor).bfloat16().float()


@dataclass(frozen=True)
class ScaledForm(TernaryForm):
    """Ternary rows on the scaled grid."""

    factor: float = 1.0

    def grid(self) -> ScaledGrid:
        """Return a grid with scaled levels."""
        return ScaledGrid(self.factor)


def scaled(factor: float, common: dict[str, Any]) -> Method:
    """The paper's setting on scaled levels."""
    method = Qmoe(**common, **PUBLISHED)
    method._form = ScaledForm(factor=factor)
    return method


def interpolated(points: list[dict[str, Any]], bits: float, text: str) -> float:
    """The loss increase of scaled levels at a rate: linear in bits and in the logarithm of the increase."""
    points = sorted(points, key=lambda p: p["bits_per_weight"])
    rises = [np.log(max(p["rise"][text], 1e-3)) for p in points]
    return float(np.exp(np.interp(bits, [p["bits_per_weight"] for p in points], rises)))


def table(figures: dict[str, Any]) -> str:
    """Rate control and scaled levels at the same coded bits, as Markdown."""
    heads = ("model", "bits per weight", "text", f"{SCALED}, nats", f"{CONTROL}, nats", "ratio")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for model, curves in figures.items():
        for point in curves[CONTROL] if curves[SCALED] else []:
            bits = point["bits_per_weight"]
            for text, rise in point["rise"].items():
                other = interpolated(curves[SCALED], bits, text)
                lines.append(f"| {model} | {bits:.3f} | {text} | +{other:.3f} | +{rise:.3f} | {rise / other:.2f} |")
    return "\n".join(lines)


def draw(figures: dict[str, Any], file: Path) -> None:
    """Draw one panel per model: loss increase over bits, one colour per text."""
    figure, axes = panels(len(figures))
    for axis, (model, curves) in zip(axes, figures.items(), strict=True):
        for colour, text in zip(("C0", "C1", "C2", "C3"), curves[CONTROL][0]["rise"], strict=False):
            for name, style in ((SCALED, "o--"), (CONTROL, "o-")):
                points = sorted((p["bits_per_weight"], p["rise"][text]) for p in curves[name])
                label = f"{name}, {TEXTS.get(text, text)}"
                axis.plot(*zip(*points, strict=True), style, color=colour, markersize=4, label=label)
        axis.set(title=model, xlabel="bits per weight, all metadata counted", xlim=(0.5, 1.75))
        logarithmic(axis)
    write(figure, axes, LOSS, file)


def main() -> None:
    """Measure every model, then print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--text", action="append", type=Path, default=[])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--chars", type=int, default=250_000)
    parser.add_argument("--rates", type=float, nargs="*", default=list(RATES))
    parser.add_argument("--scales", type=float, nargs="*", default=list(SCALES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/rate_distortion.json"))
    parser.add_argument("--merge", action="append", type=Path, default=[], help="earlier results to add or draw")
    parser.add_argument("--no-picture", action="store_true", help="do not draw a picture; matplotlib is not needed")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    figures: dict[str, Any] = {}
    for earlier in map(Path.read_text, args.merge):
        content = json.loads(earlier)
        for model, curves in content["figures"].items():
            for name, points in curves.items():
                figures.setdefault(model, {SCALED: [], CONTROL: []})[name] += points
    if args.merge and not args.models:
        machine.write(args.out, content["machine"], figures)
    common = {"calibration": str(args.calibration), "samples": args.samples, "device": args.device, "buffer": "device"}
    for path in args.models:
        curves = figures.setdefault(path.name, {SCALED: [], CONTROL: []})
        yardstick = MethodLoss(path, args.text, args.chars, args.device)
        jobs = [(CONTROL, rate, Qmoe(**common, bits_per_weight=rate)) for rate in args.rates]
        jobs += [(SCALED, scale, scaled(scale, common)) for scale in args.scales]
        for name, setting, method in jobs:
            point = {"setting": setting, **yardstick.measure(method)}
            print(path.name, name, json.dumps(point), flush=True)
            curves[name].append(point)
            machine.save(args.out, args.threads, figures, args.device)
    print(table(figures))
    if not args.no_picture:
        draw(figures, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()

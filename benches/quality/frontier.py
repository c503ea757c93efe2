"""Measures loss over bits of all methods, model by model, in one run.

    python -m benches.quality.frontier MODEL [MODEL ...] --calibration FILE --text FILE [--text FILE]
        [--only gate_proj up_proj]
        [--methods free text ...] [--rates 1.25 1.6 2.2 3.2 4.2] [--samples 64] [--chars 100000] [--threads 1]
        [--device cpu] [--out build/frontier.json] [--picture build/frontier.png]

Measured are `rate` at the given bits per weight without a text (free) and with one (text), `finequant` with 2, 3 and 4
bits, `milo`, `qmoe` with two bits and with ternary experts at the rates up to 2 (knob), and ggml's types with an
importance matrix from the same samples (ggml: if llama-cpp-python or xllamacpp is installed, on projections with
multiples of 256 columns), on the experts alone or on some of their projections. Bits are those of the packed bytes,
including all metadata; losses are in nats per token over those of the original. --merge prepends figures of earlier
runs. --shares compares the losses of `rate` with those of ggml at equal bits; losses between ggml's types are
interpolated log-linearly, without types that another type beats with fewer bits.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benches.tools import machine
from benches.tools.ggml_types import TYPES, GgmlTypes, importances
from benches.tools.method_loss import MethodLoss
from benches.tools.pictures import LOSS, TEXTS, logarithmic, panels, write
from moepack.calibration.load import load_samples
from moepack.methods import Method, create

Row = dict[str, Any]

MOST_TERNARY = 2.0
"""Maximum bits per weight of ternary experts."""

SAMPLE_TOKENS = 512
"""Tokens per calibration sample, the methods' default."""

LEAST = 1e-5
"""Lower bound of a loss before its logarithm is taken."""


GGML = "ggml "
"""Prefixes of the names of ggml's types."""


def methods(options: argparse.Namespace) -> Iterator[tuple[str, Method]]:
    """The methods by their names in tables."""
    seen = {"calibration": str(options.calibration), "samples": options.samples, "device": options.device}
    knobs = [rate for rate in options.rates if rate <= MOST_TERNARY]
    kinds: dict[str, Callable[[], Iterator[tuple[str, Method]]]] = {
        "free": lambda: (
            (f"rate {rate:g}", create("rate", bits_per_weight=rate, roles="none", calibration="none"))
            for rate in options.rates
        ),
        "text": lambda: (
            (f"rate {rate:g} with a text", create("rate", bits_per_weight=rate, roles="none", **seen))
            for rate in options.rates
        ),
        "finequant": lambda: (
            (f"finequant {bits}", create("finequant", bits=bits, calibration="none")) for bits in (2, 3, 4)
        ),
        "milo": lambda: iter([("milo", create("milo"))]),
        "qmoe": lambda: iter([("qmoe 2", create("qmoe", bits="2", **seen))]),
        "knob": lambda: ((f"qmoe {rate:g}", create("qmoe", bits_per_weight=rate, **seen)) for rate in knobs),
    }
    for kind in options.methods:
        yield from kinds[kind]() if kind in kinds else ()


def contestants(model: MethodLoss, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and figures; ggml comes first, because its importances are those of the original."""
    if "ggml" in options.methods:
        peer, windows = GgmlTypes(), load_samples(model.checkpoint, options.calibration, options.samples, SAMPLE_TOKENS)
        seen = importances(model.model, [layer.name for layer in model.layout.layers], windows.inputs)
        for kind in TYPES:

            def rounded(layer: str, _: str, stack: Tensor, kind: str = kind) -> Tensor:
                return peer.rounded(kind, stack, seen[layer])

            yield f"{GGML}{kind}", model.replace(peer.bits(kind), rounded, options.only)
    for name, method in methods(options):
        yield name, model.measure(method, options.only)


def hull(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Bits and losses in the order of bits, without points that another point with fewer bits beats."""
    kept: list[tuple[float, float]] = []
    for bits, loss in sorted(points):
        if not kept or loss < kept[-1][1]:
            kept.append((bits, max(loss, LEAST)))
    return kept


def between(points: list[tuple[float, float]], bits: float) -> float:
    """The loss at a number of bits: log-linear interpolation, or extrapolation from the last two points."""
    at = min(max(bisect([point[0] for point in points], bits), 1), len(points) - 1)
    (low, first), (high, second) = points[at - 1 : at + 1]
    return float(first * (second / first) ** ((bits - low) / (high - low)))


def reaching(points: list[tuple[float, float]], loss: float) -> float:
    """The bits at which `between` finds a loss."""
    at = min(max(sum(point[1] > loss for point in points), 1), len(points) - 1)
    (low, first), (high, second) = points[at - 1 : at + 1]
    return low + (high - low) * math.log(max(loss, LEAST) / first) / math.log(second / first)


def matching(rows: list[Row], kind: str) -> float:
    """The bits at which `rate` with a text has the loss of a ggml type, averaged over models and texts."""
    found = []
    for peer in (row for row in rows if row["method"] == GGML + kind):
        ours = [row for row in rows if re.fullmatch(r"rate .* with a text", row["method"]) and alike(row, peer)]
        for text, rise in peer["rise"].items():
            points = hull((row["bits_per_weight"], row["rise"][text]) for row in ours)
            found += [reaching(points, rise)] if len(points) > 1 else []
    if not found:
        raise ValueError(f"no losses of {kind} and of rate with a text on the same model")
    return statistics.mean(found)


def shares(rows: list[Row]) -> Iterator[str]:
    """A line for each figure of `rate` on models with ggml figures: its loss relative to theirs."""
    for row in (row for row in rows if row["method"].startswith("rate")):
        peers = [peer for peer in rows if peer["method"].startswith(GGML) and alike(peer, row)]
        if len(peers) < 2:
            continue
        bits, cells = row["bits_per_weight"], []
        for text, rise in row["rise"].items():
            theirs = between(hull((peer["bits_per_weight"], peer["rise"][text]) for peer in peers), bits)
            cells.append(f"{text} {rise:+.4f} of {theirs:.4f}: {rise / theirs:.2f}")
        yield f"{row['model']:18} {row['method']:20} {bits:.3f} bits  {'  '.join(cells)}"


def alike(one: Row, other: Row) -> bool:
    """Whether two rows have the same model and projections."""
    return bool(one["model"] == other["model"] and one["only"] == other["only"])


def draw(rows: list[Row], file: Path) -> None:
    """Draw the loss increase on the first text over bits: one panel per model, one line per kind of method."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = panels(len(models))
    for axis, model in zip(axes, models, strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in (row for row in rows if row["model"] == model):
            kind = re.sub(r" [\dIQ][\w.]*", "", row["method"])
            lines.setdefault(kind, []).append((row["bits_per_weight"], max(next(iter(row["rise"].values())), LEAST)))
        for kind, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), "o-", markersize=4, label=kind)
        axis.set(title=model, xlabel="bits per weight, all metadata counted")
        logarithmic(axis)
    text = next(iter(rows[0]["rise"]))
    write(figure, axes, f"{LOSS} on {TEXTS.get(text, text)}", file)


def main() -> None:
    """Measure every method on every model; print a line for each, and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--text", action="append", type=Path, default=[])
    parser.add_argument("--only", nargs="+", help="projections to pack; default: all")
    parser.add_argument("--methods", nargs="+", default=["free", "text", "finequant", "milo", "qmoe", "knob"])
    parser.add_argument("--rates", nargs="+", type=float, default=[1.25, 1.6, 2.2, 3.2, 4.2])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--chars", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--merge", action="append", type=Path, default=[])
    parser.add_argument("--shares", action="store_true", help="print the losses of rate relative to ggml's")
    parser.add_argument("--out", type=Path, default=Path("build/frontier.json"))
    parser.add_argument("--picture", type=Path, help="PNG file for loss over bits")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    for earlier in options.merge:
        rows += json.loads(earlier.read_text())["figures"]["rows"]
    for path in options.models:
        model = MethodLoss(path, options.text, options.chars, options.device)
        for name, found in contestants(model, options):
            row = {"model": model.name, "method": name, "only": options.only, **found}
            rises = "  ".join(f"{text} {rise:+.4f}" for text, rise in row["rise"].items())
            print(f"{model.name:18} {name:20} {row['bits_per_weight']:.3f} bits  {rises}", flush=True)
            rows.append(row)
            figures = {"chars": options.chars, "samples": options.samples, "rows": rows}
            machine.save(options.out, options.threads, figures, options.device)
    if options.shares:
        print("\n".join(shares(rows)))
    if options.picture:
        draw([row for row in rows if row["only"] == options.only], options.picture)


if __name__ == "__main__":
    main()

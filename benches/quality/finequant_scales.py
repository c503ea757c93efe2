"""Measures the remaining gain of better scales at four bits: the loss by algorithm for scales and codes.

    python -m benches.quality.finequant_scales MODEL... --calibration TEXT --evaluation TEXT
        [TEXT ...] --rows rows.jsonl

Only experts are replaced. Each row has the loss and divergence from the original model and two relative errors: of the
weights, and of the experts' outputs on the calibration text, sum of (w - q) H (w - q)^T over that of w H w^T,
H = X^T X. `weighted` minimizes the error weighted by the diagonal of H. `GPTQ` uses all of H and moves the errors of a
column to later ones; it needs a text and shows the potential of the format. Bits per weight include 16 bits for each
scale and offset. Rows are appended as they are measured and are not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benches.quality.finequant import Original
from benches.tools.dequantized import Dequantized
from moepack.calibration import CalibrationSettings, Calibrator
from moepack.calibration.load import load_samples
from moepack.checkpoint import Checkpoint, describe
from moepack.evaluation import evaluate
from moepack.integrations.loading import open_tokenizer
from moepack.solvers.gptq import GptqSettings, gptq
from moepack.solvers.grids import AffineGrid, SymmetricGrid
from moepack.solvers.groupwise import group_values, quantize_groupwise

BITS = 4
Quantize = Callable[[Tensor, Tensor], Tensor]
"""Weights [E, R, C] and Hessians [E, C, C] to values."""


def plain(weights: Tensor, hessians: Tensor, size: int, symmetric: bool = True, search: bool = True) -> Tensor:
    """The method itself, without Hessians."""
    flat = weights.flatten(0, 1)
    found = quantize_groupwise(flat, BITS, size, symmetric=symmetric, search=search)
    return group_values(found, BITS, size).view(weights.shape)


def laddered(weights: Tensor, hessians: Tensor, size: int, weighted: bool) -> Tensor:
    """Symmetric groups on a ladder of 51 steps instead of 11, with column errors weighted by the diagonal of H or
    equally."""
    half, columns = 2 ** (BITS - 1), weights.shape[-1]
    diagonal = hessians.diagonal(dim1=1, dim2=2)
    counts = diagonal + 0.01 * diagonal.mean(1, keepdim=True) if weighted else torch.ones_like(diagonal)
    padding = (0, -columns % size)
    groups = torch.nn.functional.pad(weights, padding).unflatten(-1, (-1, size))
    counts = torch.nn.functional.pad(counts, padding).unflatten(-1, (-1, size))[:, None]
    unit = groups.abs().amax(-1).clamp(min=1e-20)
    best = torch.zeros_like(unit)
    scale = torch.zeros_like(unit)
    for step in torch.linspace(0.8, 1.8, 51).tolist():
        for sign in (-1.0, 1.0):
            codes = (groups * (sign * step * half / unit)[..., None]).round_().clamp_(-half, half - 1)
            energy = (counts * codes.square()).sum(-1).clamp_(min=1e-30)
            share = (counts * codes * groups).sum(-1)
            better = share.square() / energy > best
            scale = torch.where(better, share / energy, scale)
            best = torch.where(better, share.square() / energy, best)
    scale = scale.half().float()[..., None]
    codes = (groups / torch.where(scale != 0, scale, torch.inf)).round_().clamp_(-half, half - 1)
    return (codes * scale).flatten(-2)[..., :columns]


def compensated(weights: Tensor, hessians: Tensor, size: int, symmetric: bool) -> Tensor:
    """GPTQ on groups with searched scales."""
    grid = SymmetricGrid(BITS, size) if symmetric else AffineGrid(BITS, size, search=True)
    return gptq(weights, hessians, grid, GptqSettings(damping=0.01)).values


VARIANTS: dict[str, tuple[int, bool, Quantize]] = {
    "scale from the largest weight": (64, True, partial(plain, size=64, search=False)),
    "searched (default)": (64, True, partial(plain, size=64)),
    "searched on a ladder five times as fine": (64, True, partial(laddered, size=64, weighted=False)),
    "searched, weighted by activations": (64, True, partial(laddered, size=64, weighted=True)),
    "with offset, groups of 128": (128, False, partial(plain, size=128, symmetric=False)),
    "with offset": (64, False, partial(plain, size=64, symmetric=False)),
    "searched, groups of 32": (32, True, partial(plain, size=32)),
    "searched, groups of 16": (16, True, partial(plain, size=16)),
    "GPTQ": (64, True, partial(compensated, size=64, symmetric=True)),
    "GPTQ with offset, groups of 128": (128, False, partial(compensated, size=128, symmetric=False)),
}
"""Group size, whether it is symmetric, and the quantizer, by name."""


class Bench:
    """One model with the Hessians of its experts."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.path, self.options = path, options
        self.tokenizer = open_tokenizer(path)
        self.plain = Dequantized(path, options.device)
        checkpoint = Checkpoint.open(path)
        self.layout = describe(checkpoint)
        self.hessians: dict[tuple[str, str], list[Tensor]] = {}
        samples = load_samples(checkpoint, str(options.calibration), options.samples, 512)
        settings = CalibrationSettings(routing="compressed", device=torch.device(options.device))
        for run in Calibrator(checkpoint, self.layout, samples, settings).layers():
            for stage in run:
                hessians = stage.hessians()
                for name in stage.weights:
                    self.hessians.setdefault((stage.layer, name), []).append(hessians)
                run.answer(stage.weights)

    @torch.no_grad()
    def replaced(self, quantize: Quantize) -> tuple[Any, dict[str, float]]:
        """The model with quantized experts, and its errors."""
        model, sums = self.plain.original(), torch.zeros(4, dtype=torch.float64)
        for layer in self.layout.layers:
            module = model.get_submodule(layer.name)
            gate, up = module.gate_up_proj.chunk(2, 1)
            for name, target in (("gate_proj", gate), ("up_proj", up), ("down_proj", module.down_proj)):
                weights, hessians = target.clone(), torch.cat(self.hessians[layer.name, name])
                values = quantize(weights, hessians)
                error = values - weights
                sums += torch.stack(
                    [x.double().sum().cpu() for x in (error.square(), weights.square(), (error @ hessians) * error,
                                                      (weights @ hessians) * weights)]
                )  # fmt: skip
                target.copy_(values)
        return model, {"weight_error": float(sums[0] / sums[1]), "output_error": float(sums[2] / sums[3])}

    def bits(self, size: int, symmetric: bool) -> float:
        """Bits per weight of the experts."""
        parts = [p.shape for layer in self.layout.layers for p in layer.projections]
        weights = sum(e * r * c for e, r, c in parts)
        groups = sum(e * r * -(-c // size) for e, r, c in parts)
        return BITS + 16 * (1 if symmetric else 2) * groups / weights

    def run(self, rows: list[dict[str, Any]]) -> None:
        """Measure the missing rows."""
        for text in self.options.evaluation:
            original = Original(self.path, self.options.device)
            for label, (size, symmetric, quantize) in VARIANTS.items():
                key = {"model": self.path.name, "text": text.stem, "chars": self.options.chars, "label": label}
                if any(key.items() <= row.items() for row in rows):
                    continue
                model, errors = self.replaced(quantize)
                report = evaluate(model, text, self.options.chars, original, tokenizer=self.tokenizer)
                assert report.reference_loss is not None
                figures = {"increase": report.loss - report.reference_loss, "kl": report.kl, **errors}
                row = {**key, "bits_per_weight": self.bits(size, symmetric), **figures, "device": self.options.device}
                print(json.dumps(row), flush=True)
                rows.append(row)
                with self.options.rows.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")


def tables(rows: list[dict[str, Any]]) -> None:
    """A Markdown table for each text."""
    for text in dict.fromkeys(row["text"] for row in rows):
        mine = [row for row in rows if row["text"] == text]
        models = list(dict.fromkeys(row["model"] for row in mine))
        print(f"\n| {text} | " + " | ".join(models) + " |\n|" + "---|" * (len(models) + 1))
        for label in VARIANTS:
            cells = [
                f"{row['increase']:+.4f} ({row['kl']:.4f}), {100 * row['output_error']:.2f} %" if row else "-"
                for model in models
                for row in [next((r for r in mine if (r["model"], r["label"]) == (model, label)), None)]
            ]
            print(f"| {label} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--evaluation", nargs="*", type=Path, default=[])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--chars", type=int, default=250_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--tables", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []
    for path in options.models:
        Bench(path, options).run(rows)
    if options.tables:
        tables(rows)


if __name__ == "__main__":
    main()

"""Loss over bits a weight: the rate knob beside GPTQ with scaled levels, as JSON, a Markdown table and a PNG.

    python benches/rate_distortion.py MODEL [MODEL ...] --calibration FILE --text FILE [--text FILE] [--device cuda]

The frontier is GPTQ on the paper's grid with both levels of every row scaled by one factor, which trades bits for loss
as well; the knob is what `moepack compress --method qmoe --bits-per-weight X` does. Both see the same samples through
the same calibration, and the bits of both are those of the coded tensors. Losses are measured with the quantized values
in transformers' model, over the windows of `moepack.evaluate`. Needs matplotlib for the picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import machine
from moepack import _core
from moepack.calibration import CalibrationSettings, Calibrator, Stage
from moepack.calibration.load import load_samples
from moepack.checkpoint import Checkpoint, describe
from moepack.methods.qmoe.forms import TernaryForm
from moepack.methods.qmoe.rate import RateSolver
from moepack.solvers.gptq import GptqSettings, gptq
from moepack.solvers.grids import TernaryGrid

WINDOW = 512
SCALES = (1.5, 1.2, 1.0, 0.85, 0.7, 0.55)
RATES = (0.6, 0.87, 1.05, 1.25, 1.45, 1.6)
Solved = tuple[Tensor, Tensor, Tensor]
Coded = dict[str, tuple[Tensor, Tensor]]


class Scaled(TernaryGrid):
    """The paper's grid with its levels times a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def fit(self, weights: Tensor) -> None:
        """Scale the row's minimum and maximum."""
        super().fit(weights)
        self.levels = (self.levels * self.factor).bfloat16().float()


class Bench:
    """One model with its calibration set and its texts."""

    def __init__(self, path: Path, calibration: Path, texts: list[Path], args: argparse.Namespace) -> None:
        self.checkpoint = Checkpoint.open(path)
        self.moe = describe(self.checkpoint)
        self.device = torch.device(args.device)
        self.samples = load_samples(self.checkpoint, calibration, args.samples, WINDOW)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(self.device).eval()
        tokenizer = AutoTokenizer.from_pretrained(path)
        self.texts = {}
        for text in texts:
            ids = tokenizer(text.read_text(encoding="utf-8")[: args.chars], add_special_tokens=False, verbose=False)
            ids = torch.tensor(ids.input_ids)
            self.texts[text.stem] = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)[: args.windows].to(self.device)
        self.original = self.losses()

    @torch.inference_mode()
    def losses(self) -> dict[str, float]:
        """Nats a token of the model as it is, by text."""
        result = {}
        for name, windows in self.texts.items():
            total = 0.0
            for batch in windows.split(8):
                logits = self.model(input_ids=batch).logits[:, :-1].flatten(0, 1)
                total += F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum").item()
            result[name] = total / (windows.shape[0] * (WINDOW - 1))
        return result

    def run(self, solver: Callable[[int], Any]) -> dict[str, Any]:
        """Quantize with what `solver` makes for each layer's number of experts; bits and loss increases."""
        work = _Layers(solver)
        settings = CalibrationSettings(device=self.device)
        bits = weights = 0
        for layer, _ in Calibrator(self.checkpoint, self.moe, self.samples, settings).layers(work.solve, work.plan):
            for codes, levels in work.coded.values():
                bits += 8 * _core.encode_ternary(codes.numpy(), levels.numpy(), rank=3, code="fsv8").nbytes
                weights += codes.numel()
            self._put(layer.name, work.finish())
        measured = self.losses()
        rise = {name: measured[name] - self.original[name] for name in measured}
        return {"bits_per_weight": bits / weights, "rise": rise}

    def _put(self, name: str, values: dict[str, Tensor]) -> None:
        experts = self.model.get_submodule(name)
        experts.gate_up_proj.data = torch.cat([values["gate_proj"], values["up_proj"]], 1).to(self.device)
        experts.down_proj.data = values["down_proj"].to(self.device)


class _Layers:
    """Solves stages, and keeps what came out of the layer at hand."""

    def __init__(self, solver: Callable[[int], Any]) -> None:
        self.make, self.solver = solver, None
        self.coded: Coded = {}
        self.values: dict[str, Tensor] = {}

    def _solver(self, stage: Stage) -> Any:
        if self.solver is None:
            self.solver = self.make(stage.layer.experts)
        return self.solver

    def plan(self, stage: Stage) -> None:
        self._solver(stage).plan(stage)

    def solve(self, stage: Stage) -> dict[str, Tensor]:
        codes, levels, values, _ = self._solver(stage).solve(stage, TernaryForm())
        rows = [w.shape[1] for w in stage.weights.values()]
        pieces = [torch.split(tensor, rows, dim=1) for tensor in (codes, levels, values)]
        result = {}
        for name, part, pair, value in zip(stage.weights, *pieces, strict=True):
            old = self.coded.get(name, (torch.empty(0, dtype=torch.int8), torch.empty(0)))
            self.coded[name] = torch.cat([old[0], part.cpu()]), torch.cat([old[1], pair.cpu()])
            self.values[name] = torch.cat([self.values.get(name, torch.empty(0)), value.cpu()])
            result[name] = value
        return result

    def finish(self) -> dict[str, Tensor]:
        """The layer's values; ready for the next layer."""
        values, self.values, self.coded, self.solver = self.values, {}, {}, None
        return values


class _Frontier:
    """GPTQ as the paper runs it, on scaled levels."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def plan(self, stage: Stage) -> None:
        pass

    def solve(self, stage: Stage, form: TernaryForm) -> tuple[Tensor, Tensor, Tensor, Any]:
        grid = Scaled(self.factor)
        weights = torch.cat(list(stage.weights.values()), dim=1)
        result = gptq(weights, stage.hessians(), grid, GptqSettings(damping=0.1))
        return result.codes, grid.levels, result.values, result.reports


def interpolated(points: list[dict[str, Any]], bits: float, text: str) -> float:
    """The frontier's loss increase at a rate: linear in bits of the logarithm."""
    points = sorted(points, key=lambda p: p["bits_per_weight"])
    rises = [np.log(max(p["rise"][text], 1e-3)) for p in points]
    return float(np.exp(np.interp(bits, [p["bits_per_weight"] for p in points], rises)))


def table(figures: dict[str, Any]) -> str:
    """The knob beside the frontier at the same coded bits, as Markdown."""
    lines = ["| model | bits a weight | text | frontier, nats | knob, nats | ratio |", "|---|---|---|---|---|---|"]
    for model, curves in figures.items():
        for point in curves["knob"] if curves["frontier"] else []:
            bits = point["bits_per_weight"]
            for text, rise in point["rise"].items():
                other = interpolated(curves["frontier"], bits, text)
                lines.append(f"| {model} | {bits:.3f} | {text} | +{other:.3f} | +{rise:.3f} | {rise / other:.2f} |")
    return "\n".join(lines)


def draw(figures: dict[str, Any], file: Path) -> None:
    """One picture a model: loss increase over bits, one colour a text."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(figures), figsize=(5 * len(figures), 4), squeeze=False)
    for axis, (model, curves) in zip(axes[0], figures.items(), strict=True):
        for colour, text in zip(("C0", "C1", "C2", "C3"), curves["knob"][0]["rise"], strict=False):
            for name, style in (("frontier", "o--"), ("knob", "o-")):
                points = sorted((p["bits_per_weight"], p["rise"][text]) for p in curves[name])
                axis.plot(*zip(*points, strict=True), style, color=colour, markersize=4, label=f"{text}, {name}")
        axis.set(title=model, xlabel="bits a weight, all metadata counted", yscale="log", xlim=(0.5, 1.75))
        axis.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel("loss over bf16, nats a token")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    """Measure every model, then print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--text", action="append", type=Path, default=[])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--chars", type=int, default=250_000)
    parser.add_argument("--windows", type=int, default=None, help="windows a text, at most")
    parser.add_argument("--rates", type=float, nargs="*", default=list(RATES))
    parser.add_argument("--scales", type=float, nargs="*", default=list(SCALES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/rate_distortion.json"))
    parser.add_argument("--merge", action="append", type=Path, default=[], help="earlier results to add, or only draw")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    figures: dict[str, Any] = {}
    for earlier in args.merge:
        figures |= json.loads(earlier.read_text())["figures"]
    for path in args.models:
        curves = figures[path.name] = {"frontier": [], "knob": [], "device": str(args.device)}
        bench = Bench(path, args.calibration, args.text, args)
        jobs = [("knob", rate, lambda n, rate=rate: RateSolver(rate, n)) for rate in args.rates]
        jobs += [("frontier", scale, lambda _, scale=scale: _Frontier(scale)) for scale in args.scales]
        for name, setting, solver in jobs:
            point = {"setting": setting, **bench.run(solver)}
            print(path.name, name, json.dumps(point), flush=True)
            curves[name].append(point)
            machine.save(args.out, args.threads, figures)
    machine.save(args.out, args.threads, figures)
    print(table(figures))
    draw(figures, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()

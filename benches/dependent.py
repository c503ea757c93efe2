"""What dependent quantization is worth: the loss of trellis-coded integers beside that of `rate` at equal bits.

    python benches/dependent.py MODEL [MODEL ...] --calibration FILE --text FILE [--text FILE] [--rates 1.5 2.2 3.2 4.2]
        [--kinds free text whole] [--states 8] [--zero] [--worth 0.5] [--samples 64] [--chars 30000] [--out FILE]

Every tensor is first solved as the method does: without a text (free), with a text that the original model reads once
(text), or with one that the model reads while it is packed, as the method has it (whole; minutes a rate). Then it is
solved again by dependent quantization (`trellis.py`), at the step at which its codes take the same bits. The experts
alone are packed.
Bits are those of the coder for the integers of the method; for dependent codes, that times the ratio of both by the
model of the coder in `trellis.py`. Increases are in nats a token over the original; "error" is the ratio of the squared
error of weights (free) or of the damped output error that GPTQ makes least (otherwise), both stage by stage.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import machine
import trellis
from dependent_stages import damped
from moepack.calibration import LayerRun
from moepack.checkpoint import MoeLayer
from moepack.methods import Solution, Stage
from moepack.methods.rate.layer import LayerSolver, _by_tensor, _runs
from moepack.methods.rate.method import Rate
from moepack.methods.rate.sample import stream_rows
from moepack.pipeline import Assignment
from moepack.pipeline.solving import LayerPacker
from moepack.solvers.gptq import factorize
from moepack.solvers.priced import WORTH, largest_at
from moepack.solvers.uniform import UniformProblem
from yardstick import Yardstick


class Ledger:
    """Bits and errors of both ways, summed over stages."""

    def __init__(self) -> None:
        self.scalar = self.dependent = 0.0
        self.errors: list[float] = []

    def add(self, bits: tuple[float, float], error: float) -> None:
        """Note the bits of the integers and of the dependent codes of a stage, and the ratio of their errors."""
        self.scalar, self.dependent = self.scalar + bits[0], self.dependent + bits[1]
        self.errors.append(error)


class Solver(LayerSolver):
    """Solves each stage as the method does, then again by a trellis with the same bits."""

    def __init__(self, plain: LayerSolver, design: trellis.Design, worth: float, ledger: Ledger) -> None:
        super().__init__(plain._bits, plain._settings)
        self.design, self.worth, self.ledger = design, worth, ledger

    def _problem(self, stage: Stage) -> UniformProblem:
        self.last = super()._problem(stage)
        return self.last

    def solve(self, stage: Stage) -> dict[str, Solution]:
        """Quantize a stage; values are those of the dependent codes."""
        plain = super().solve(stage)
        problem, runs = self.last, _runs(stage)
        step = float(next(iter(plain.values())).parts["step"][0, 0])
        codes = torch.cat([plain[name].parts["symbols"] for name in stage.weights], 1)
        order = trellis.lane_order(problem.weights.shape[2])
        hessians = problem.hessians[:, order][:, :, order]
        factors = factorize(hessians, self._settings.damping)
        price = self._settings.worth * step * step * float(self._outlooks[" ".join(stage.weights)].curvature.mean())
        prices = self.worth * 4 * (price / (step * step * problem.importance)).float()
        matrices = trellis.Matrices(problem.weights[:, :, order], runs, prices, factors.upper, factors.pivots)
        found = trellis.solved_alike(matrices, codes[:, :, order], step, self.design, self._settings.largest)
        values = torch.empty_like(problem.weights)
        values[:, :, order] = found.values
        change = [damped(problem, each) for each in (values, codes * step)]
        self.ledger.add(found.bits, change[0] / change[1])
        return _solutions(_by_tensor(stage, values), found.unit / 2)


def _solutions(values: dict[str, Tensor], unit: float) -> dict[str, Solution]:
    found = {}
    for name, each in values.items():
        integers = (each / unit).round().int()
        steps = torch.full((len(each), 1), unit)
        found[name] = Solution({"symbols": integers, "step": steps}, integers * unit)
    return found


class Dependent(Rate):
    """The method with dependent codes. Packed bytes hold multiples of half a step; their length means nothing."""

    def using(self, design: trellis.Design, worth: float) -> Dependent:
        """Set the trellis, and what a bit is worth over what the method takes it for."""
        self.design, self.worth, self.ledger = design, worth, Ledger()
        return self

    def _layer_solver(self) -> LayerSolver:
        return Solver(super()._layer_solver(), self.design, self.worth, self.ledger)

    def _rounded(self, stage: Stage) -> dict[str, Solution]:
        ((name, weights),) = stage.tensors.items()
        plain = super()._rounded(stage)[name].parts
        codes, step = plain["symbols"].int(), float(plain["step"][0, 0])
        experts, rows, columns = weights.shape
        order = trellis.lane_order(columns)
        values = torch.stack([weights.expert(expert).float() for expert in range(experts)])
        height = stream_rows(columns)
        streams = torch.arange(rows) // height
        runs = streams + torch.arange(experts)[:, None] * (int(streams.max()) + 1)
        prices = torch.full((experts,), self.worth * 4 * WORTH)
        matrices = trellis.Matrices(values[:, :, order], runs, prices)
        found = trellis.solved_alike(matrices, codes[:, :, order], step, self.design, largest_at(self.bits_per_weight))
        scalar_error = (codes * step - values).square().sum(dtype=torch.float64)
        packed = torch.empty_like(values)
        packed[:, :, order] = found.values
        error = (packed - values).square().sum(dtype=torch.float64)
        self.ledger.add(found.bits, float(error / scalar_error))
        whole = _solutions({name: packed}, found.unit / 2)[name]
        return {name: Solution({"symbols": whole.parts["symbols"], "step": torch.tensor([[found.unit / 2]])})}


class Recorded(LayerRun):
    """A layer whose stages read what they read in the original model, however they are answered."""

    def __init__(self, layer: MoeLayer, run: LayerRun) -> None:
        """Go through a run of the original model."""
        super().__init__(layer)
        self.stages = []
        for stage in run:
            assert stage.inputs is not None
            moments = stage.moments()
            self.stages.append(replace(stage, inputs=replace(stage.inputs, moments=lambda moments=moments: moments)))
            run.answer(stage.weights)
        self.tokens = run.tokens

    def previews(self) -> Iterator[Stage]:
        """The stages as they are."""
        return iter(self.stages)

    def _stages(self) -> Iterator[Stage]:
        for stage in self.stages:
            yield stage
            self._take()


@torch.no_grad()
def recorded(model: Yardstick, method: Rate) -> list[Recorded]:
    """All layers, as the calibration of a method runs the original model."""
    packer = LayerPacker(model.checkpoint, model.layout, Assignment(method))
    return [Recorded(layer, run) for layer, run in zip(packer.layers, packer.runs(), strict=True)]


def compare(
    model: Yardstick, kind: str, rate: float, options: argparse.Namespace, runs: list[Recorded] | None
) -> dict[str, Any]:
    """Measure both ways at a rate, where layers are not recorded with the method's own calibration."""
    given = _settings(kind, rate, options)
    scalar = model.measure(Rate(**given), runs=runs)
    method = Dependent(**given).using(trellis.Design(options.states, not options.zero), options.worth)
    dependent = model.measure(method, runs=runs)
    ledger = method.ledger
    error = math.exp(sum(map(math.log, ledger.errors)) / len(ledger.errors))
    ratio = ledger.dependent / ledger.scalar
    ratios = {text: rise / scalar["rise"][text] for text, rise in dependent["rise"].items()}
    return {
        "model": model.name, "kind": kind, "rate": rate, "states": options.states, "zero": options.zero,
        "worth": options.worth,
        "scalar": scalar, "dependent": dependent["rise"], "seconds": dependent["seconds"],
        "bits": ratio, "error": error, "ratios": ratios,
    }  # fmt: skip


def _settings(kind: str, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = {"bits_per_weight": rate, "roles": "none"}
    if kind != "free":
        given |= {"calibration": str(options.calibration), "samples": options.samples, "group": 64}
    return given


def main() -> None:
    """Compare on every model; print a line for each rate, and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--text", action="append", type=Path, required=True)
    parser.add_argument("--rates", nargs="+", type=float, default=[1.5, 2.2, 3.2, 4.2])
    parser.add_argument("--kinds", nargs="+", default=["free", "text"])
    parser.add_argument("--states", type=int, choices=(4, 8), default=8)
    parser.add_argument("--zero", action="store_true", help="quantizers with a common zero, not mirrored ones")
    parser.add_argument(
        "--worth", type=float, default=trellis.WORTH_OF_DEPENDENT, help="of a bit, over what the method takes it for"
    )
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--chars", type=int, default=30_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--merge", action="append", type=Path, default=[])
    parser.add_argument("--out", type=Path, default=Path("build/dependent.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for earlier in options.merge:
        rows += json.loads(earlier.read_text())["figures"]["rows"]
    for path in options.models:
        model = Yardstick(path, options.text, options.chars)
        for kind in options.kinds:
            runs = recorded(model, Rate(**_settings(kind, 2.0, options))) if kind == "text" else None
            for rate in options.rates:
                rows.append(compare(model, kind, rate, options, runs))
                print(_line(rows[-1]), flush=True)
                figures = {"chars": options.chars, "samples": options.samples, "rows": rows}
                machine.save(options.out, options.threads, figures)


def _line(row: dict[str, Any]) -> str:
    """A row for people."""
    scalar = row["scalar"]
    rises = "  ".join(
        f"{text} {scalar['rise'][text]:+.4f} -> {rise:+.4f} ({row['ratios'][text]:.2f})"
        for text, rise in row["dependent"].items()
    )
    bits, seconds = scalar["bits_per_weight"], f"{scalar['seconds']:.0f} -> {row['seconds']:.0f} s"
    name = f"{row['model']:13} {row['kind']:5} {row['states']} states{', zero' * row['zero']}, worth {row['worth']}"
    return f"{name}: {bits:.3f} -> {bits * row['bits']:.3f} bits  error {row['error']:.3f}  {rises}  {seconds}"


if __name__ == "__main__":
    main()

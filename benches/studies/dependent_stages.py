"""Compares GPTQ's output error with dependent and plain codes, by stage of a model's first layer. Takes seconds.

    python -m benches.studies.dependent_stages MODEL [MODEL ...] --calibration FILE [--experts 1] [--rows 512]
        [--samples 4]

Some rows of some experts are solved as by `rate` with a text, at steps that give plain codes about 1.5, 2.1 and 3.1
bits, then with dependent codes at the steps that take the same bits in the coder's model. Prints the damped output
error, which GPTQ minimizes, relative to that of plain codes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from moepack.checkpoint import Checkpoint, describe
from moepack.methods import Stage
from moepack.methods.rate.method import Rate
from moepack.methods.rate.sample import stream_rows
from moepack.pipeline import Assignment
from moepack.pipeline.solving import LayerPacker
from moepack.solvers.priced import WORTH
from moepack.solvers.uniform import CodeLengths, UniformProblem, sampled_lengths

STEPS = (1.6, 1.0, 0.5)
"""Over the root mean square of the weights."""

ROUNDS = 5
"""Tries for a step: a step about twice as large takes a bit less."""


def stages(path: Path, options: argparse.Namespace) -> Iterator[tuple[str, UniformProblem]]:
    """The stages of the original model's first layer, cut to some experts and rows."""
    checkpoint = Checkpoint.open(path)
    method = Rate(2.0, roles="none", calibration=str(options.calibration), samples=options.samples, sequence_length=256)
    packer = LayerPacker(checkpoint, describe(checkpoint), Assignment(method).planned(checkpoint, describe(checkpoint)))
    run = next(packer.runs())
    assert run is not None
    for stage in run:
        yield " ".join(stage.weights), _problem(stage, options)
        run.answer(stage.weights)


def _problem(stage: Stage, options: argparse.Namespace) -> UniformProblem:
    weights = torch.cat(list(stage.weights.values()), dim=1)[: options.experts, : options.rows]
    return UniformProblem(weights, stage.moments().hessians[: options.experts])


def compare(problem: UniformProblem, over: float) -> list[str]:
    """The bits of plain integers with a step of `over` root mean squares, and the errors of dependent codes relative
    to theirs at these bits."""
    rows, columns = problem.weights.shape[1:]
    streams = torch.arange(rows) // stream_rows(columns)
    runs = streams + torch.arange(len(problem.weights))[:, None] * (int(streams.max()) + 1)
    step = float(problem.weights.square().mean().sqrt()) * over
    values, bits = _solved(problem, step, runs)
    path = UniformProblem(problem.weights, problem.hessians, dependent=True)
    for _ in range(ROUNDS):
        found, own = _solved(path, step, runs)
        step *= 2.0 ** ((own - bits) / values.numel())
    return [f"{bits / values.numel():.2f}", f"{damped(problem, found) / damped(problem, values):.3f}"]


def _solved(problem: UniformProblem, step: float, runs: Tensor) -> tuple[Tensor, float]:
    """Values and their bits, from the code lengths."""
    settings = problem.settings
    price = settings.worth * step * step * float(problem.curvature.mean())
    lengths = sampled_lengths(problem.weights / step, torch.full((len(runs),), WORTH))
    for _ in range(2):
        result = problem.solve(step, price, lengths)
        lengths = CodeLengths.counted(result.codes, runs, dependent=problem.dependent)
    return result.values, float(lengths.totals.sum())


def damped(problem: UniformProblem, values: Tensor) -> float:
    """The damped output error of a batch, summed by importance."""
    errors = torch.bmm(values - problem.weights, problem.factors.upper) * problem.factors.pivots[:, None]
    return float((errors.square().sum((1, 2), dtype=torch.float64) * problem.importance).sum())


@torch.no_grad()
def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=1)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--samples", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    head = ["model, stage", "bits", "dependent"]
    print("|", " | ".join(head), "|\n|" + "---|" * len(head))
    for path in options.models:
        for name, problem in stages(path, options):
            for over in STEPS:
                print("|", " | ".join([f"{path.name}, {name}", *compare(problem, over)]), "|", flush=True)


if __name__ == "__main__":
    main()

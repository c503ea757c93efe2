"""What dependent quantization leaves of the output error of GPTQ, stage by stage of a model's first layer: seconds.

    python benches/dependent_stages.py MODEL [MODEL ...] --calibration FILE [--experts 1] [--rows 512] [--samples 4]

Some rows of some experts are solved as `rate` does it with a text, at steps that give about 1.5, 2.1 and 3.1 bits, then
by dependent codes at the units at which these take the same bits. Printed are damped output errors over those of the
integers: of integers solved in the order of lanes, and of the designs of `trellis.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import trellis
from moepack.checkpoint import Checkpoint, describe
from moepack.methods import Stage
from moepack.methods.rate.method import Rate
from moepack.methods.rate.sample import stream_rows
from moepack.pipeline import Assignment
from moepack.pipeline.solving import LayerPacker
from moepack.solvers.gptq import factorize
from moepack.solvers.priced import LARGEST, WORTH
from moepack.solvers.uniform import CodeLengths, UniformProblem, priced_codes

STEPS = (1.6, 1.0, 0.5)
"""Over the root mean square of the weights."""


def stages(path: Path, options: argparse.Namespace) -> Iterator[tuple[str, UniformProblem]]:
    """The stages of a model's first layer, as the original model runs, cut to some experts and rows."""
    checkpoint = Checkpoint.open(path)
    method = Rate(2.0, roles="none", calibration=str(options.calibration), samples=options.samples, sequence_length=256)
    packer = LayerPacker(checkpoint, describe(checkpoint), Assignment(method))
    run = next(packer.runs())
    assert run is not None
    for stage in run:
        yield " ".join(stage.weights), _problem(stage, options)
        run.answer(stage.weights)


def _problem(stage: Stage, options: argparse.Namespace) -> UniformProblem:
    weights = torch.cat(list(stage.weights.values()), dim=1)[: options.experts, : options.rows]
    return UniformProblem(weights, stage.moments().hessians[: options.experts])


def compare(problem: UniformProblem, over: float) -> list[str]:
    """The bits, and errors over those of integers of a step, `over` root mean squares."""
    weights, settings = problem.weights, problem.settings
    experts, rows, columns = weights.shape
    streams = torch.arange(rows) // stream_rows(columns)
    runs = streams + torch.arange(experts)[:, None] * (int(streams.max()) + 1)
    step = float(weights.square().mean().sqrt()) * over
    price = settings.worth * step * step * float(problem.curvature.mean())
    order = trellis.lane_order(columns)
    hessians = problem.hessians[:, order][:, :, order]
    codes = _integers(problem, step, price, runs)
    by_lane = _integers(UniformProblem(weights[:, :, order], hessians), step, price, runs)
    prices = 4 * trellis.WORTH_OF_DEPENDENT * (price / (step * step * problem.importance)).float()
    factors = factorize(hessians, settings.damping)
    matrices = trellis.Matrices(weights[:, :, order], runs, prices, factors.upper, factors.pivots)
    scalar = damped(problem, codes * step)
    cells = [
        f"{trellis.Counts(codes, None, runs, LARGEST).stored() / weights.numel():.2f}",
        f"{damped(problem, _natural(by_lane, order) * step) / scalar:.3f}",
    ]
    for design in trellis.DESIGNS.values():
        found = trellis.solved_alike(matrices, codes[:, :, order], step, design, LARGEST)
        cells.append(f"{damped(problem, _natural(found.values, order)) / scalar:.3f}")
    return cells


def _integers(problem: UniformProblem, step: float, price: float, runs: Tensor) -> Tensor:
    lengths = priced_codes(problem.weights / step, torch.full((len(runs),), WORTH), runs)
    for _ in range(2):
        codes = problem.solve(step, price, lengths).codes
        lengths = CodeLengths.counted(codes, runs)
    return codes


def _natural(values: Tensor, order: Tensor) -> Tensor:
    found = torch.empty_like(values)
    found[:, :, order] = values
    return found


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
    head = ["model, stage", "bits", "integers by lane", *trellis.DESIGNS]
    print("|", " | ".join(head), "|\n|" + "---|" * len(head))
    for path in options.models:
        for name, problem in stages(path, options):
            for over in STEPS:
                print("|", " | ".join([f"{path.name}, {name}", *compare(problem, over)]), "|", flush=True)


if __name__ == "__main__":
    main()

"""Times MiLo's quantization (docs/methods/milo.md) and GPTQ, and extrapolates to Mixtral-8x7B.

    python -m benches.cpu.milo_time [--device cuda] [--threads 2] [--only milo gptq]
        [--json benches/results/milo-time.json]
    python -m benches.cpu.milo_time --only quality --models MODEL...

`milo`: matrices of Mixtral-8x7B's shapes (Gaussian) with rank 32 and INT3 factors; first the statistics that a budget
needs (both grids and the leading singular values of their residuals), then the joint optimization, one matrix alone
and, on a CPU, one per thread. `gptq`: the same matrices by this package's GPTQ with groups of 64: its Hessian from some
tokens, extrapolated to the 65,536 that an expert sees of 128 samples of 2,048 tokens (attention: all 262,144),
factorization and rounding. Passing the samples through the model, which GPTQ needs and MiLo does not, is not included.
`quality`: the error on a model's own matrices compared with the slow variant: torch's solver, decomposed anew each
round."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benches.tools import machine
from moepack import _core
from moepack.checkpoint import Checkpoint, describe
from moepack.methods.milo import joint
from moepack.methods.milo.joint import JointSettings, compensate
from moepack.methods.milo.planning import find_sources
from moepack.methods.milo.statistics import residual_spectrum
from moepack.methods.parallel import for_experts
from moepack.solvers.affine import GroupSpec, quantize_affine
from moepack.solvers.gptq import GptqSettings, gptq
from moepack.solvers.grids import AffineGrid
from moepack.solvers.least_squares import LeastSquares
from moepack.solvers.low_rank import truncated_svd

RANK, SPEC = 32, GroupSpec(3, 64)
EXPERT_TOKENS, ALL_TOKENS = 65_536, 262_144


@dataclass(frozen=True)
class Part:
    """Matrices of one shape: their number in Mixtral-8x7B, the number of different inputs, and tokens of each."""

    name: str
    rows: int
    columns: int
    matrices: int
    inputs: int
    tokens: int


MIXTRAL = (
    Part("down", 4096, 14336, 256, 256, EXPERT_TOKENS),
    Part("gate and up", 14336, 4096, 512, 256, EXPERT_TOKENS),
    Part("query and output", 4096, 4096, 64, 64, ALL_TOKENS),
    Part("key and value", 1024, 4096, 64, 0, ALL_TOKENS),
)


class Clock:
    """Times work on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, work: Callable[[], Any]) -> float:
        """Seconds."""
        self._wait()
        start = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def gaussian(part: Part, device: torch.device, seed: int = 0) -> torch.Tensor:
    shape = (1, part.rows, part.columns)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(device)


def milo(part: Part, device: torch.device, threads: int) -> dict[str, Any]:
    """Seconds per matrix, alone and with one matrix per thread."""
    clock, settings = Clock(device), JointSettings()
    weights = [gaussian(part, device, seed) for seed in range(threads if device.type == "cpu" else 1)]

    def plan() -> None:
        for spec in (SPEC, GroupSpec(3, 64, symmetric=True)):
            residual_spectrum(weights[0] - quantize_affine(weights[0], spec, LeastSquares()).values())

    found = []
    if device.type == "cuda":  # the libraries' first calls load them
        compensate(gaussian(Part("", 256, 256, 1, 1, 1), device), RANK, SPEC, LeastSquares(), settings)
    seconds = {"plan": clock(lambda: for_experts(lambda _: plan(), 1, lambda: None, alone=True))}

    def work(number: int) -> None:
        found.append(compensate(weights[number], RANK, SPEC, LeastSquares(), settings))

    seconds["joint"] = clock(lambda: for_experts(work, 1, lambda: None, alone=True))
    each = seconds["joint"]
    if len(weights) > 1:
        each = clock(lambda: for_experts(work, len(weights), lambda: None, alone=True)) / len(weights)
        seconds["joint, several at a time"] = each
    error = float((found[0].errors / weights[0].square().sum((1, 2))).sqrt())
    return {
        **{what: round(value, 3) for what, value in seconds.items()},
        "rounds": found[0].rounds[0],
        "error": round(error, 5),
        "model": part.matrices * (each + seconds["plan"] / max(len(weights), 1)),
    }


def by_gptq(part: Part, device: torch.device, tokens: int) -> dict[str, Any]:
    """Seconds per Hessian and per matrix."""
    clock, weights = Clock(device), gaussian(part, device)
    x = torch.randn(tokens, part.columns, device=device)
    hessian = torch.zeros(1, part.columns, part.columns, device=device)
    hessian[0].addmm_(x.T, x)
    hessian.zero_()
    gathering = clock(lambda: hessian[0].addmm_(x.T, x)) * part.tokens / tokens
    solving = clock(lambda: gptq(weights, hessian, AffineGrid(3, 64), GptqSettings(damping=0.01)))
    model = part.inputs * gathering + part.matrices * solving
    return {"hessian": round(gathering, 3), "matrix": round(solving, 3), "model": model}


def slowly(matrices: torch.Tensor, rank: int) -> torch.Tensor:
    """Errors of the alternation without shortcuts."""
    solver, fast = LeastSquares(), joint.decompose
    joint.decompose = lambda residual, rank, start=None: (truncated_svd(residual, rank), None)
    try:
        found = compensate(matrices, rank, SPEC, lambda x, spec, start: solver(x, spec, start), JointSettings())
    finally:
        joint.decompose = fast
    return found.errors


def quality(path: Path, experts: int = 4, tensors: int = 8) -> dict[str, Any]:
    """Relative differences of the errors, over some experts of the first tensors and the first dense layers."""
    sources = list(find_sources(describe(Checkpoint.open(path))))
    chosen = [s for dense in (False, True) for s in [s for s in sources if (s.layer is None) is dense][:tensors]]
    sums = {"fast": 0.0, "slow": 0.0}
    seconds = {"fast": 0.0, "slow": 0.0}
    for source in chosen:
        matrices = source.experts(range(min(experts, source.shape[0])), torch.device("cpu"))
        size = matrices.double().square().sum((1, 2))
        for rank in (16, 32):
            for name, errors in (
                ("fast", lambda m, r: compensate(m, r, SPEC, LeastSquares(), JointSettings()).errors),
                ("slow", slowly),
            ):
                start = time.perf_counter()
                sums[name] += float((errors(matrices, rank) / size).sqrt().sum())
                seconds[name] += time.perf_counter() - start
    found = {"difference": round(sums["fast"] / sums["slow"] - 1, 6)}
    return {**found, **{f"seconds {name}": round(value, 2) for name, value in seconds.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=["milo", "gptq", "quality"], default=["milo", "gptq"])
    parser.add_argument(
        "--parts", type=int, nargs="*", default=range(len(MIXTRAL)), help="indices of the shapes to measure"
    )
    parser.add_argument("--tokens", type=int, help="tokens of a measured Hessian; default 256, on a GPU 8192")
    parser.add_argument("--models", type=Path, nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    _core.set_threads(options.threads)
    device = torch.device(options.device)
    figures: dict[str, Any] = {}
    tokens = options.tokens or (256 if device.type == "cpu" else 8192)
    works = {
        "milo": lambda part: milo(part, device, options.threads),
        "gptq": lambda part: by_gptq(part, device, tokens),
    }
    for name in options.only:
        if name == "quality":
            figures[name] = {path.name: quality(path) for path in options.models}
            print(name, json.dumps(figures[name]), flush=True)
            continue
        figures[name] = {}
        for part in (MIXTRAL[number] for number in options.parts):
            figures[name][part.name] = found = works[name](part)
            print(name, part.name, json.dumps(found), flush=True)
        figures[name]["mixtral_8x7b_hours"] = round(sum(f["model"] for f in figures[name].values()) / 3600, 3)
        print(name, figures[name]["mixtral_8x7b_hours"], "hours", flush=True)
        if options.json:
            machine.save(options.json, options.threads, figures, options.device)
    if options.json:
        machine.save(options.json, options.threads, figures, options.device)


if __name__ == "__main__":
    main()

"""Simulates a calibrated job on a cluster from measured times of its tasks: 1.57 * 10^12 weights on 100 nodes.

    python -m benches.cpu.cluster [--nodes 100] [--cores 32] [--gigabits 25] [--experts 16] [--samples 8] [--group 4]
                                  [--methods qmoe rate] [--directory DIR] [--save FILE]

A job on a small checkpoint of Switch-base-128's shapes (`benches.cpu.scale`) runs through the executor that Ray jobs
use, with a cluster that runs each task at once in this process, in one thread. Processor seconds of every task, of the
work that stays on the driver, and bytes of everything that would pass through the object store are recorded. They are
then scaled to switch-c-2048 and its tasks are placed, wave by wave, on the slots of the cluster.

Assumptions are printed. The simulation has no failures, no stragglers and no start-up.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from ray import cloudpickle

from benches.cpu.scale import C2048, D_FF, D_MODEL, build, c2048_weights, solver_operations
from benches.tools import machine
from moepack.calibration.experts import ExpertsRun, waves_of
from moepack.calibration.stacks import Stack
from moepack.methods import create
from moepack.pipeline import compress
from moepack.pipeline.distributed import executor, remote
from moepack.pipeline.work import LayerWork


class Timed:
    """A cluster that runs each task in this process when it is submitted, and records its cost.

    Attributes:
        seconds: processor seconds by kind of task.
        sent, returned: bytes of the arguments and the results by kind of task.
        count: tasks by kind.
        shared: bytes of shared values.
    """

    slots = 1

    def __init__(self, address: str, threads: int, gpus: int = 0) -> None:
        self.seconds, self.sent, self.returned, self.count = (defaultdict[str, float](float) for _ in range(4))
        self.shared = 0.0
        self.results: list[Any] = []

    def check(self, stamps: Any) -> None:
        """Do nothing."""

    def share(self, value: Any) -> Any:
        """Return a copy."""
        data = cloudpickle.dumps(value)
        self.shared += len(data)
        return cloudpickle.loads(data)

    def submit(self, work: Callable[..., Any], *arguments: Any) -> int:
        """Run a task."""
        kind = work.__name__
        if kind == "solve_group" and not arguments[-1]:
            kind = "wave"
        self.sent[kind] += sum(len(cloudpickle.dumps(each)) for each in arguments[4:])
        started = time.process_time()
        found = work(1, *arguments)
        self.seconds[kind] += time.process_time() - started
        self.returned[kind] += len(cloudpickle.dumps(found))
        self.count[kind] += 1
        self.results.append(found)
        return len(self.results) - 1

    def result(self, task: int) -> Any:
        """Return a result once."""
        found, self.results[task] = self.results[task], None
        return found

    def close(self) -> None:
        """Do nothing."""


@contextmanager
def timed(seconds: dict[str, float], owner: type, *names: str) -> Iterator[None]:
    """Add the processor seconds of methods to `seconds`."""

    def wrapped(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            started = time.process_time()
            try:
                return inner(*arguments, **named)
            finally:
                seconds[name] += time.process_time() - started

        return call

    changes = {name: wrapped(name, getattr(owner, name)) for name in names}
    with patch.multiple(owner, **changes):
        yield


def measured(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """The costs of a job."""
    settings = {"samples": options.samples, "group": options.group, "bits_per_weight": options.bits[method]}
    chosen = create(method, calibration=str(options.directory / "calibration.txt"), **settings)
    driver, clusters = defaultdict[str, float](float), list[Timed]()
    started, begin = 0.0, executor.RayExecutor.start

    def connect(*given: Any) -> Timed:
        clusters.append(Timed(*given))
        return clusters[0]

    def start(*arguments: Any) -> None:
        nonlocal started
        begin(*arguments)
        started = time.process_time()
        driver.clear()

    same = {"_run": lambda value: value, "_plans": lambda value: value, "_layers": lambda value: value}
    with (
        patch.object(executor, "Cluster", connect),
        patch.multiple(remote, **same),
        timed(driver, LayerWork, "begin", "pack"),
        timed(driver, ExpertsRun, "shard", "add"),
        timed(driver, Stack, "run"),
        patch.object(executor.RayExecutor, "start", start),
    ):
        report = compress(options.directory / "model", options.directory / method, method=chosen, ray="here", threads=1)
    total, cluster = time.process_time() - started, clusters[0]
    driver["rest"] = total - sum(cluster.seconds.values()) - sum(driver.values())
    found = {name: dict(getattr(cluster, name)) for name in ("seconds", "sent", "returned", "count")}
    tasks = {"experts": options.experts, "samples": options.samples, "group": options.group}
    return {**found, "driver": dict(driver), "shared": cluster.shared, "weights": report.expert_weights, **tasks}


def simulate(method: str, found: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Hours of switch-c-2048, in all and by what they are spent on."""
    d_model, d_ff, experts, layers = C2048
    slots = options.nodes * options.cores // options.threads
    weights = c2048_weights() / layers
    factor = solver_operations(d_model, d_ff) / solver_operations(D_MODEL, D_FF)
    small = 2 * D_MODEL * D_FF * found["group"]
    group = options.spread or found["group"]
    task = 2 * d_model * d_ff * group / small * factor / options.threads

    def one(kind: str) -> float:
        return found["seconds"].get(kind, 0) / max(found["count"].get(kind, 1), 1) * task

    groups = [range(at, min(at + group, experts)) for at in range(0, experts, group)]
    solving = sum(
        one("solve_group") if len(wave) == 1 else math.ceil(len(wave) / slots) * (one("wave") or one("solve_group"))
        for wave in waves_of(groups)
    )
    measuring = one("measure_group") * (1 + math.ceil((len(groups) - 1) / slots))
    tokens = experts / found["experts"] * (d_model / D_MODEL)  # states; forward passes grow with the square of d_model
    small_layers = 2
    driver = {name: seconds / small_layers for name, seconds in found["driver"].items()}
    packing = driver["pack"] / (found["weights"] / small_layers) * weights / options.cores
    pricing = driver["begin"] * experts / found["experts"]
    states = (driver["shard"] + driver["add"] + driver["run"] * d_model / D_MODEL) * tokens / options.cores
    layers_of_model = driver["rest"] * (d_model / D_MODEL) ** 2 / options.cores
    inputs = sum(found["sent"].values()) / small_layers * tokens
    codes = sum(found["returned"].values()) / found["weights"] * weights
    network = (inputs + codes) * 8 / (options.gigabits * 1e9)
    hours = {"solving": solving, "measuring": measuring, "packing": packing, "prices": pricing, "states": states,
             "other layers": layers_of_model, "network": network}  # fmt: skip
    hours = {name: seconds * layers / 3600 for name, seconds in hours.items()}
    return {"hours": sum(hours.values()), **hours, "slots": slots, "gigabytes": (inputs + codes) * layers / 1e9}


ASSUMPTIONS = """
Assumptions for c2048 (d_model 2080, d_ff 6144, 2048 experts, 30 sparse layers): a task takes the processor time per
weight measured here, times the ratio of GPTQ's multiplications per weight (R C^2 + C^3 / 3 per matrix), divided by its
threads; an expert gets as many calibration tokens as here; the driver's forward passes grow with tokens and the square
of d_model, its other work on states with tokens and d_model, and the rest (reading and preparing layers) with that
square; they use its cores evenly, like packing; prices are computed by one thread; everything that tasks read and
return passes the driver's network, while nothing else runs; nodes read weights from storage that is fast enough; the
plan before the first layer is not counted."""


def main() -> None:
    """Measure, simulate, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--cores", type=int, default=32, help="cores of a node, and of the driver")
    parser.add_argument("--threads", type=int, default=8, help="cores of a task")
    parser.add_argument("--gigabits", type=float, default=25.0, help="network of the driver, gigabits per second")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--group", type=int, default=4, help="experts of a task that is measured")
    parser.add_argument("--spread", type=int, help="experts of a simulated task; default: --group")
    parser.add_argument("--methods", nargs="+", default=["qmoe", "rate"])
    parser.add_argument("--directory", type=Path, help="folder for the checkpoint; default: a temporary directory")
    parser.add_argument("--known", type=Path, help="simulate from the measurements in this file")
    parser.add_argument("--save", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    options.bits = {"qmoe": 1.0, "rate": 2.0}
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    if options.known:
        results = json.loads(options.known.read_text())["figures"]
    else:
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            options.directory = Path(directory)
            build(options.directory / "model", 2, options.experts)
            for method in options.methods:
                results[method] = measured(method, options)
                print(method, json.dumps(results[method]), flush=True)
    for method in options.methods:
        simulated = simulate(method, results[method], options)
        results[method]["simulated"] = {"nodes": options.nodes, "cores": options.cores, **simulated}
        parts = ", ".join(f"{name} {value:.2f}" for name, value in simulated.items() if name not in ("hours", "slots"))
        print(f"{method}: {simulated['hours']:.1f} hours on {options.nodes} nodes of {options.cores} cores: {parts}")
    if options.save:
        machine.save(options.save, 1, results)
    print(ASSUMPTIONS)
    sys.stdout.flush()


if __name__ == "__main__":
    main()

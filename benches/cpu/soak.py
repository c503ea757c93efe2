"""Runs everything repeatedly and checks that memory, open files and threads do not grow.

    python -m benches.cpu.soak [--minutes 10] [--model DIR ...]

A round compresses each model with every method, verifies the result, loads it, generates some tokens, and exports it.
Prints one line per model and a JSON object at the end; the exit code is 1 if anything failed or grew.

The first rounds fill caches (imports, torch's and the allocator's); growth counts from the round after a quarter of the
time.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

import moepack
from benches.tools import machine
from moepack.errors import UnsupportedModelError
from moepack.export import export
from moepack.integrations.loading import open_tokenizer
from moepack.memory import anonymous_bytes
from moepack.methods import METHODS, create
from moepack.serving.text.generation import generate
from moepack.serving.text.sampling import Sampling

EXAMPLES = Path(__file__).parents[2] / "examples"
GROWTH = 32 << 20
"""Permitted growth of private memory after the first quarter in bytes: the allocator's reserve varies by this much."""


def methods(text: Path) -> dict[str, moepack.methods.Method]:
    """Every method, with little calibration."""
    seen = {"calibration": str(text), "samples": 4, "sequence_length": 64}
    settings = {"codequant": {**seen, "steps": 2}, "floe": seen, "qmoe": seen, "rate": {"bits_per_weight": 2.5}}
    settings |= {name: {**settings.get(name, {}), "calibration": "none"} for name in ("finequant", "rate")}
    return {name: create(name, **settings.get(name, {})) for name in METHODS}


def use(model: Path, work: Path, method: moepack.methods.Method) -> None:
    """Use every function once."""
    out = moepack.compress(model, work / "out", method=method).path
    report = moepack.verify(out)
    if not report.ok:
        raise RuntimeError(f"{model} by {method.name}: {report.faults[0]}")
    loaded = moepack.load(out)
    generate(loaded, open_tokenizer(out), "She opened the door", Sampling(max_new_tokens=8))
    export(out, work / "exported", "bf16")


def state() -> dict[str, int]:
    """The quantities that must not grow."""
    gc.collect()
    return {
        "own memory": anonymous_bytes() or 0,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def soak(models: list[Path], minutes: float) -> dict[str, object]:
    """Run rounds until the time is over."""
    start, rounds, uses, settled = time.monotonic(), 0, 0, None
    refused: set[str] = set()
    chosen = methods(EXAMPLES / "texts" / "white-fang.txt")
    while (now := time.monotonic() - start) < 60 * minutes or settled is None:
        for model in models:
            for method in chosen.values():
                try:
                    with tempfile.TemporaryDirectory() as work:
                        use(model, Path(work), method)
                    uses += 1
                except UnsupportedModelError:  # not every method takes every architecture
                    refused.add(f"{model.name} by {method.name}")
            found = state()
            passed = (time.monotonic() - start) / 60
            print(f"{model.name}, {uses} uses, {passed:.1f} minutes: {found}", file=sys.stderr, flush=True)
        rounds += 1
        if settled is None and time.monotonic() - start > 15 * minutes:
            settled = found
    growth = {name: found[name] - settled[name] for name in found}
    counts = {"minutes": round(now / 60, 1), "rounds": rounds, "uses": uses, "refused": sorted(refused)}
    return {**counts, "settled": settled, "growth": growth}


def main() -> None:
    """Parse the arguments, run, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--model", type=Path, nargs="+", default=[EXAMPLES / "tiny-moe"])
    arguments = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    result = soak(arguments.model, arguments.minutes)
    print(json.dumps({"machine": machine.describe(threads), **result}, indent=1))
    growth = result["growth"]
    assert isinstance(growth, dict)
    sys.exit(growth["own memory"] > GROWTH or growth["files"] > 0 or growth["threads"] > 0)


if __name__ == "__main__":
    main()

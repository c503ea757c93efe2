"""Measures decoding beside busy processes: tokens per second, relative to a fair share of the machine.

    python -m benches.cpu.loaded [MODEL] [--threads 2] [--busy 0 2 4 8 12] [--out build/loaded.json]

A scheduler that divides all cores evenly among the decoder's threads and O other busy threads gives the decoder
cores / (O + threads) of the speed that it has on an idle machine, or all of it if there are cores for all. The figure
that counts is this share over the measured one: 1 is fair, and 1.3 is the goal.

Others are the busy processes started here and whatever else runs meanwhile, which is counted: the runnable threads of
/proc/loadavg without those of this process. The speed of the idle machine is that of the fastest window without busy
processes, so the machine should be nearly idle for this one. Without a packed MODEL, a synthetic one is packed to four
bits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # As in the command line; read when torch is imported.

import torch

import moepack
from benches.cpu.decode import build_small, decode
from benches.tools import machine
from moepack.backends.threads import set_threads
from moepack.methods import create
from moepack.pipeline import compress

SAMPLE_SECONDS = 0.02
#: Computes until its parent has ended.
PROGRAM = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` processes that compute without pause."""
    processes = [subprocess.Popen([sys.executable, "-c", PROGRAM]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class Others(threading.Thread):
    """Counts the runnable threads of other processes until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.done, self.counts = threading.Event(), list[int]()

    def run(self) -> None:
        """Sample."""
        while not self.done.wait(SAMPLE_SECONDS):
            all_running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
            states = [stat.read_text().rpartition(") ")[2][0] for stat in Path("/proc/self/task").glob("*/stat")]
            self.counts.append(all_running - states.count("R"))

    def stop(self) -> float:
        """The mean count."""
        self.done.set()
        self.join()
        return max(0.0, statistics.fmean(self.counts))


def measure(model: Any, count: int, idle: float | None, options: argparse.Namespace) -> dict[str, float]:
    """Speeds beside `count` busy processes; without the speed of the idle machine, the fastest window gives it."""
    prompt = torch.arange(16)[None] * 31 % (model.config.vocab_size - 3) + 3
    with busy(count):
        decode(model, prompt, options.tokens)
        others = Others()
        others.start()
        speeds = [1 / decode(model, prompt, options.tokens) for _ in range(options.windows)]
        found = others.stop()
    cores = len(os.sched_getaffinity(0))
    share = min(1.0, cores / (found + options.threads))
    speed = statistics.harmonic_mean(speeds)
    idle = idle or max(speeds)
    return {
        "busy": count, "others": round(found, 1), "tokens per second": round(speed, 2),
        "share": round(speed / idle, 3), "fair share": round(share, 3),
        "fair over measured": round(share * idle / speed, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2, 4, 8, 12], help="numbers of busy processes")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="of a window")
    parser.add_argument("--idle", type=float, help="tokens per second of the idle machine, if known")
    parser.add_argument("--out", type=Path, default=Path("build/loaded.json"))
    options = parser.parse_args()
    set_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        path = options.model or Path(directory) / "packed"
        if options.model is None:
            source = build_small("qwen3_moe", Path(directory) / "source")
            compress(source, path, method=create("finequant", bits=4, dense_bits=4, calibration="none"))
        model = moepack.load(path, dtype=torch.bfloat16)
        idle, figures = options.idle, []
        for count in options.busy:
            figures.append(measure(model, count, idle, options))
            idle = idle or max(figures[0]["tokens per second"] / figures[0]["share"], 0.0)
            print("  ".join(f"{name} {value}" for name, value in figures[-1].items()), flush=True)
    machine.save(options.out, options.threads, figures)


if __name__ == "__main__":
    main()

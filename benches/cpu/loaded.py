"""Measures decoding beside busy processes: tokens per second, relative to a fair share of the machine.

    python -m benches.cpu.loaded [MODEL] [--threads 2] [--busy 0 2 4 8 12] [--out build/loaded.json]

Processor time is counted, so the machine need not be idle. Two figures say how well threads give way:

- *cost*: processor time of a token, relative to the row with the least. Threads that spin while others wait for a core
  raise it.
- *share*: cores that the decoder got, the processor time over the wall time. A scheduler that divides all cores evenly
  among the decoder's threads and O other busy threads gives it cores * threads / (O + threads), and at most what it
  takes of an idle machine: `--demand`, by default one core a thread.

The decoder's speed is its cores over the processor time of a token. `fair over measured` is the speed of a fair share
at the least cost, over the measured speed: 1 is fair, and 1.3 is the goal.

Others are the busy processes started here and whatever else runs meanwhile, which is counted: the runnable threads of
/proc/loadavg without those of this process. Without a packed MODEL, a synthetic one is packed to four bits.
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
import time
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
        self.seconds = 0.0  #: processor time of this thread

    def run(self) -> None:
        """Sample."""
        while not self.done.wait(SAMPLE_SECONDS):
            all_running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
            states = [stat.read_text().rpartition(") ")[2][0] for stat in Path("/proc/self/task").glob("*/stat")]
            self.counts.append(all_running - states.count("R"))
            self.seconds = time.thread_time()

    def stop(self) -> float:
        """The mean count."""
        self.done.set()
        self.join()
        return max(0.0, statistics.fmean(self.counts))


def measure(model: Any, count: int, options: argparse.Namespace) -> dict[str, float]:
    """Processor time of a token, cores and speed beside `count` busy processes: medians over windows."""
    prompt = torch.arange(16)[None] * 31 % (model.config.vocab_size - 3) + 3
    with busy(count):
        decode(model, prompt, options.tokens)
        others = Others()
        others.start()
        costs, shares = [], []
        for _ in range(options.windows):
            wall, start = time.perf_counter(), time.process_time() - others.seconds
            decode(model, prompt, options.tokens)
            used = time.process_time() - others.seconds - start
            costs.append(used / options.tokens)
            shares.append(used / (time.perf_counter() - wall))
        found = others.stop()
    return {
        "busy": count, "others": round(found, 1), "cpu ms per token": round(1000 * statistics.median(costs), 3),
        "cores": round(statistics.median(shares), 3),
    }  # fmt: skip


def compared(rows: list[dict[str, float]], threads: int, demand: float) -> list[dict[str, float]]:
    """Add the cost and the fair share to each row."""
    cores, least = len(os.sched_getaffinity(0)), min(row["cpu ms per token"] for row in rows)
    found = []
    for row in rows:
        cost, fair = row["cpu ms per token"] / least, min(demand, cores * threads / (row["others"] + threads))
        ratio = fair / row["cores"] * cost
        figures = {"cost": cost, "fair cores": fair, "share": row["cores"] / fair, "fair over measured": ratio}
        found.append({**row, **{name: round(value, 2) for name, value in figures.items()}})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2, 4, 8, 12], help="numbers of busy processes")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="of a window")
    parser.add_argument("--demand", type=float, help="cores that the decoder takes of an idle machine")
    parser.add_argument("--out", type=Path, default=Path("build/loaded.json"))
    options = parser.parse_args()
    set_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        path = options.model or Path(directory) / "packed"
        if options.model is None:
            source = build_small("qwen3_moe", Path(directory) / "source")
            compress(source, path, method=create("finequant", bits=4, dense_bits=4, calibration="none"))
        model = moepack.load(path, dtype=torch.bfloat16)
        rows: list[dict[str, float]] = []
        for count in options.busy:
            rows.append(measure(model, count, options))
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    figures = compared(rows, options.threads, options.demand or options.threads)
    for row in figures:
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    machine.save(options.out, options.threads, {"demand": options.demand or options.threads, "rows": figures})


if __name__ == "__main__":
    main()

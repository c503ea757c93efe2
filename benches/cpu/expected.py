"""Compares the expected decoding speed of a plan with the measured one, on each instruction set.

    python -m benches.cpu.expected MODEL [MODEL ...] [--isas avx512 avx2 scalar] [--bits 4] [--prefer balance speed]
        [--threads 1] [--tokens 48] [--rounds 3] [--target FILE] [--packed DIR ...]
        [--out build/expected.json]

Each model is packed without a text for the machine as it is with the forced instruction set; `--packed` takes packed
directories of the models instead, in the same order. Rounds alternate between the measurement of speeds, the products
of a token with all packed weights, one by one, and greedy decoding by transformers' `generate` after a prompt of 16
tokens (none with --tokens 0). The fastest calls and the fastest step of all rounds are compared. With one thread,
speeds and products are measured in processor time, which other work on the machine changes least. Prints expected over
measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benches.tools import machine

PROMPT, REPEATS = 16, 5


def measure(model: str, prefer: str, options: argparse.Namespace) -> dict[str, Any]:
    """Pack a model for this process's instruction set, and decode."""
    import torch

    import moepack.backends.speeds
    from moepack import _core
    from moepack.backends.speeds import Speeds, measure_speeds
    from moepack.backends.threads import set_threads
    from moepack.checkpoint import Checkpoint, describe
    from moepack.methods import Auto
    from moepack.pipeline import compress

    set_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    with tempfile.TemporaryDirectory() as work:
        packed = Path(options.packed[0]) if options.packed else Path(work) / "out"
        if not options.packed:
            method = Auto(bits_per_weight=options.bits, prefer=prefer, calibration="none", target=options.target)
            compress(model, packed, method=method, check=False)
        loaded = moepack.load(packed, dtype=torch.bfloat16)
        prompt = torch.arange(PROMPT)[None] * 31 % (loaded.config.vocab_size - 3) + 3
        best, alone, found = math.inf, math.inf, []
        for _ in range(options.rounds):
            with mock.patch.object(moepack.backends.speeds, "time", SimpleNamespace(perf_counter=clock)):
                found.append(measure_speeds())
            alone = min(alone, products(packed, Checkpoint.open(model), describe, clock))
            if options.tokens:
                best = min(best, *steps(loaded, prompt, options.tokens))
        fastest = {name: max(each.weights[name] for each in found) for name in found[0].weights}
        speeds = Speeds(found[0].machine, fastest, max(each.memory for each in found))
        step, expected = seconds(packed, Checkpoint.open(model), speeds, describe)
    row = {"model": Path(model).name, "isa": _core.isa(), "prefer": prefer, "threads": options.threads}
    row |= {"expected products": expected, "products": alone, "speeds": speeds.to_json()}
    return row | ({"expected step": step, "step": best} if options.tokens else {})


def products(packed: Path, checkpoint: Any, describe: Any, clock: Callable[[], float]) -> float:
    """Return the seconds of a token's products with all packed tensors."""
    import numpy as np

    from moepack import _core
    from moepack.format import PackedDirectory
    from moepack.format.directory import map_tensors
    from moepack.format.header import read_header
    from moepack.methods.reads import reads_by_tensor

    shares, total = reads_by_tensor(checkpoint, describe(checkpoint)), 0.0
    for name, record in PackedDirectory.open(packed).manifest.packed().items():
        file = packed / record.file
        tensor = _core.PackedTensor(map_tensors(file, read_header(file), [name])[name])
        experts, _, columns = tensor.shape if len(tensor.shape) == 3 else (1, *tensor.shape)
        x, times = np.ones((1, columns), np.float32), []
        for _ in range(REPEATS if shares[name] else 0):
            start = clock()
            for expert in range(round(shares[name] * experts)):
                tensor.matmul(x, expert=expert)
            times.append(clock() - start)
        total += min(times, default=0.0)
    return total


def seconds(packed: Path, checkpoint: Any, speeds: Any, describe: Any) -> tuple[float, float]:
    """Return the expected time of a step of a packed model, and of its products alone."""
    from moepack.format import PackedDirectory
    from moepack.methods.reads import kept_reads, reads_by_tensor

    model = describe(checkpoint)
    shares = reads_by_tensor(checkpoint, model)
    records = PackedDirectory.open(packed).manifest.packed()
    rest = speeds.step(max(len(model.dense), len(model.layers)), kept_reads(checkpoint, model, records))
    total = 0.0
    for name, record in records.items():
        read = shares[name]
        if record.kind == "coded":
            kind, bits = "coded", 8 * record.nbytes / record.weights
        else:
            kind, bits = "int", record.details["bits"]
        total += speeds.seconds(kind, bits, record.weights * read, record.nbytes * read)
    return rest + total, total


def steps(model: Any, prompt: Any, tokens: int) -> list[float]:
    """Return the seconds of each decoding step."""
    import torch

    times: list[float] = []

    class Clock:
        def put(self, value: Any) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            pass

    with torch.inference_mode():
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, streamer=Clock(), pad_token_id=0,
        )  # fmt: skip
    return [after - before for before, after in pairwise(times[2:])]


def main() -> None:
    """Measure each model in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--isas", nargs="+", default=["avx512", "avx2", "scalar"])
    parser.add_argument("--bits", type=float, default=4.0)
    parser.add_argument("--prefer", nargs="+", default=["balance"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--target")
    parser.add_argument("--packed", nargs="+", default=[])
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("build/expected.json"))
    options = parser.parse_args()
    if options.job:
        print(json.dumps(measure(options.models[0], options.prefer[0], options)))
        return
    rows = []
    for isa in options.isas:
        for number, model in enumerate(options.models):
            for prefer in options.prefer:
                numbers = ("bits", "threads", "tokens", "rounds")
                more = [part for name in numbers for part in (f"--{name}", str(getattr(options, name)))]
                more += ["--target", options.target] if options.target else []
                more += ["--packed", options.packed[number]] if options.packed else []
                command = [sys.executable, "-m", "benches.cpu.expected", model, "--job", "--prefer", prefer, *more]
                environment = {**os.environ, "MOEPACK_ISA": isa}
                done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
                if done.returncode:
                    print(done.stderr[-800:], file=sys.stderr)
                    continue
                row = json.loads(done.stdout.splitlines()[-1])
                rows.append(row)
                line = f"{isa:7} {row['model']:16} {prefer:8}"
                for name in ("products", "step"):
                    if name in row:
                        expected, measured = row[f"expected {name}"], row[name]
                        line += f"  {name} {1e3 * expected:.2f} ms expected, {1e3 * measured:.2f} measured: "
                        line += f"{expected / measured:.2f}"
                print(line, flush=True)
    machine.save(options.out, options.threads, rows)


if __name__ == "__main__":
    main()

"""Compares the expected decoding speed of a plan with the measured one, on each instruction set.

    python -m benches.cpu.expected MODEL [MODEL ...] [--isas avx512 avx2 scalar] [--bits 4] [--prefer balance speed]
        [--threads 1] [--tokens 48] [--rounds 3] [--target FILE] [--packed DIR ...]
        [--out build/expected.json]

Each model is packed without a text for the machine as it is with the forced instruction set; `--packed` takes packed
directories of the models instead, in the same order. Rounds alternate between the measurement of speeds and greedy
decoding by transformers' `generate` after a prompt of 16 tokens. Other work on the machine changes both, so the fastest
calls and the fastest step of all rounds are compared. Prints expected over measured.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

PROMPT = 16


def measure(model: str, prefer: str, options: argparse.Namespace) -> dict[str, Any]:
    """Pack a model for this process's instruction set, and decode."""
    import torch

    import moepack
    from moepack import _core
    from moepack.backends.speeds import Speeds, measure_speeds
    from moepack.backends.threads import set_threads
    from moepack.checkpoint import Checkpoint, describe
    from moepack.methods import Auto
    from moepack.pipeline import compress

    set_threads(options.threads)
    with tempfile.TemporaryDirectory() as work:
        packed = Path(options.packed[0]) if options.packed else Path(work) / "out"
        if not options.packed:
            method = Auto(bits_per_weight=options.bits, prefer=prefer, calibration="none", target=options.target)
            compress(model, packed, method=method, check=False)
        loaded = moepack.load(packed, dtype=torch.bfloat16)
        prompt = torch.arange(PROMPT)[None] * 31 % (loaded.config.vocab_size - 3) + 3
        best, found = math.inf, []
        for _ in range(options.rounds):
            found.append(measure_speeds())
            best = min(best, *steps(loaded, prompt, options.tokens))
        fastest = {name: max(each.weights[name] for each in found) for name in found[0].weights}
        speeds = Speeds(found[0].machine, fastest, max(each.memory for each in found))
        expected = seconds(packed, Checkpoint.open(model), speeds, describe)
    row = {"model": Path(model).name, "isa": _core.isa(), "prefer": prefer, "threads": options.threads}
    return {**row, "expected": 1 / expected, "measured": 1 / best, "speeds": speeds.to_json()}


def seconds(packed: Path, checkpoint: Any, speeds: Any, describe: Any) -> float:
    """Return the expected time of a step of a packed model."""
    from moepack.format import PackedDirectory
    from moepack.methods.reads import kept_reads, reads_by_tensor

    model = describe(checkpoint)
    shares = reads_by_tensor(checkpoint, model)
    records = PackedDirectory.open(packed).manifest.packed()
    total = speeds.step(max(len(model.dense), len(model.layers)), kept_reads(checkpoint, model, records))
    for name, record in records.items():
        read = shares[name]
        if record.kind == "coded":
            kind, bits = "coded", 8 * record.nbytes / record.weights
        else:
            kind, bits = "int", record.details["bits"]
        total += speeds.seconds(kind, bits, record.weights * read, record.nbytes * read)
    return total


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
                ratio = row["expected"] / row["measured"]
                line = f"{isa:7} {row['model']:16} {prefer:8} expected {row['expected']:7.1f}"
                print(f"{line}, measured {row['measured']:7.1f} tokens/s: {ratio:.2f}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"figures": rows}, indent=1))


if __name__ == "__main__":
    main()

"""Decoding with less memory than the experts take: streamed within a budget, beside files that the system maps.

    python benches/offload.py [--share 0.33] [--tokens 48] [--directory DIR]

The model is the made-up one of benches/llama.py, 64 experts a layer, of which each token takes 8 at random: the worst
case of any cache. Each side runs in a process of its own whose memory, page cache included, is limited by a control
group to the budget and what the process itself takes; where no group can be made, the mapped side has all memory and
the figures say so. The page cache forgets the model's files before each run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import llama
import machine

PROCESS = 480 << 20
"""Bytes for Python, torch and activations beside the weights."""


@contextmanager
def group(limit: int) -> Iterator[Path | None]:
    """A control group whose memory is limited, page cache included; None where the system does not let us."""
    parents = {Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes", Path("/sys/fs/cgroup"): "memory.max"}
    for parent, name in parents.items():
        path = parent / f"moepack-{os.getpid()}"
        try:
            path.mkdir()
            try:
                (path / name).write_text(str(limit))
                yield path
            finally:
                path.rmdir()
        except OSError:
            continue
        return
    yield None


def run(side: str, directory: Path, memory: int, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a side, measured in a process of its own."""
    for file in directory.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    with group(memory + PROCESS) as limited:

        def enter() -> None:
            if limited is not None:
                (limited / "cgroup.procs").write_text(str(os.getpid()))

        command = [sys.executable, __file__, "--side", side, "--directory", str(options.directory)]
        command += ["--memory", str(memory), "--tokens", str(options.tokens), "--threads", str(options.threads)]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=enter)
    return {**json.loads(found.stdout.splitlines()[-1]), "limited": limited is not None}


def choose_at_random(model: Any, random: np.random.Generator) -> None:
    """Let every token take random experts; weights stay those of the router."""
    import torch

    from moepack.runtime.experts import PackedExperts

    def chosen(module: PackedExperts, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, index, weights = given
        order = random.random((len(index), module.num_experts)).argsort(-1)
        return x, torch.from_numpy(order[:, : index.shape[1]].copy()), weights

    for module in model.modules():
        if isinstance(module, PackedExperts):
            module.register_forward_pre_hook(chosen)


def measure(options: argparse.Namespace) -> None:
    """A side's process."""
    from moepack.memory import process_memory
    from moepack.runtime.streaming import statistics_of

    streamed = {"host_memory": options.memory} if options.side == "streamed" else {}
    side = llama.Packed(options.directory / "packed", options.threads, **streamed)
    random = np.random.default_rng(0)
    choose_at_random(side.model, random)
    side.read(random.integers(0, llama.VOCABULARY, llama.SHORT).tolist())
    side.decode(16)
    before = statistics_of(side.model)
    start = time.perf_counter()
    side.decode(options.tokens)
    seconds = time.perf_counter() - start
    figures: dict[str, Any] = {"tokens_per_second": options.tokens / seconds, "own": process_memory().anonymous}
    after = statistics_of(side.model)
    if before is not None and after is not None:
        counts = {name: value - asdict(before)[name] for name, value in asdict(after).items()}
        figures |= {
            "hits": counts["hits"] / (counts["hits"] + counts["misses"]),
            "bytes_per_token": counts["bytes_read"] / options.tokens,
            "bytes_per_read": counts["bytes_read"] / max(counts["reads"], 1),
            "bytes_per_second": counts["bytes_read"] / max(counts["waited"], 1e-9),
            "waited": counts["waited"] / seconds,
            "most": after.most,
        }
    print(json.dumps(figures))


def main() -> None:
    """Build, measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=1 / 3, help="of the packed model's bytes that fit into memory")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path("build/llama"))
    parser.add_argument("--out", type=Path, default=Path("build/offload.json"))
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return measure(options)
    options.directory.mkdir(parents=True, exist_ok=True)
    directory = llama.build(options.directory, [])["moepack codebook4"]
    total = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    figures: dict[str, Any] = {"model_bytes": total, "memory": int(options.share * total)}
    for side in ("streamed", "mapped"):
        rounds = [run(side, directory, figures["memory"], options) for _ in range(options.rounds)]
        rounds.sort(key=lambda found: found["tokens_per_second"])
        figures[side] = rounds[len(rounds) // 2]
        print(side, json.dumps(figures[side]), flush=True)
    ratio = figures["streamed"]["tokens_per_second"] / figures["mapped"]["tokens_per_second"]
    print(f"streamed / mapped: {ratio:.2f}")
    machine.save(options.out, options.threads, figures)
    return None


if __name__ == "__main__":
    main()

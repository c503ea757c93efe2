"""Measures decoding with less memory than the experts take: streaming within a budget, and mapped files.

    python -m benches.cpu.offload [--model experts|channels] [--share 0.33] [--tokens 48] [--directory DIR]

`experts`: the synthetic model of benches/cpu/llama.py, with 64 experts per layer; each token uses 8 at random:
the worst case for any cache.

`channels`: a model with two layers of Mixtral's shapes (8 experts of 3 x 14336 x 4096, 2 per token, at random), packed
as by `floe`: random up projections of 2 bits, random int8 records; a token uses a fifth of them. The hit rate of a
cache depends on how much tokens agree on channels, so rows of up projections have log-normally distributed scales
(`SKEW`), largest first, as stored by `floe`. Streaming single channels is compared with whole experts of the same
directory in the same memory, and with mapped files. Building the model takes 9 GB of memory.

Each side runs in its own process. A control group limits its memory, including the page cache, to the budget plus the
process's own memory; if no group can be created, the mapped side has all memory, and the figures say so. The model's
files are dropped from the page cache before each run.

`--bytes` computes without a model how many bytes channels must read per token, by the maximum gap between two records
that is read along, with the most used records in memory: the best that any usage-based policy can achieve.

Two lower bounds show the bottleneck of a side: the bytes of a token at the drive's rate (`drive`: direct reads, with
the same concurrency and sizes as the side's own), and computing alone (`resident`: the same store, with enough memory
for all experts)."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benches.cpu import llama
from benches.tools import machine

PAGE = mmap.PAGESIZE

PROCESS = 480 << 20
"""Bytes for Python, torch and activations, in addition to the weights."""

MIXTRAL = {"HIDDEN": 4096, "INNER": 14336, "EXPERTS": 8, "TOP_K": 2, "LAYERS": 2}
"""Shapes of the model of `channels` that differ from benches/cpu/llama.py."""

KEPT = 0.17
"""The share of that model's records for which a third of its bytes has room, beside what every token needs."""

SKIPPED = 0.8
"""The share of channels that a token skips."""

SKEW = 0.3
"""Standard deviation of the logarithm of the scales of channels: the tenth that is wanted most is wanted by 42 % of
tokens, and the tenth that is wanted least by 2 %."""


@contextmanager
def group(limit: int) -> Iterator[Path | None]:
    """A control group with limited memory, page cache included; None if the system does not permit it."""
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
    """The figures of a side, measured in a separate process."""
    for file in directory.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    with group(memory + PROCESS) as limited:

        def enter() -> None:
            if limited is not None:
                (limited / "cgroup.procs").write_text(str(os.getpid()))

        command = [sys.executable, "-m", __spec__.name, "--side", side, "--directory", str(options.directory)]
        command += ["--model", options.model]
        command += ["--memory", str(memory), "--tokens", str(options.tokens), "--threads", str(options.threads)]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=enter)
    return {**json.loads(found.stdout.splitlines()[-1]), "limited": limited is not None}


def choose_at_random(model: Any, random: np.random.Generator) -> None:
    """Let every token choose random experts; weights remain the router's."""
    import torch

    from moepack.modules.experts import PackedExperts

    def chosen(module: PackedExperts, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, index, weights = given
        order = random.random((len(index), module.num_experts)).argsort(-1)
        return x, torch.from_numpy(order[:, : index.shape[1]].copy()), weights

    for module in model.modules():
        if isinstance(module, PackedExperts):
            module.register_forward_pre_hook(chosen)


def made_up() -> Any:
    """A method that packs random up projections and records, with thresholds that skip `SKIPPED` of random inputs."""
    from statistics import NormalDist

    from moepack import _core
    from moepack.checkpoint import MoeLayer
    from moepack.methods import PackedBytes, Shape, SimpleMethod, Solution, Stage, Weights
    from moepack.methods.floe.channels import CHANNELS, by_channels

    class MadeUp(SimpleMethod):
        name = "floe"
        settings: Mapping[str, Any] = {"random": True}

        def arranged(self, layer: MoeLayer) -> MoeLayer:
            return by_channels(layer)

        def bound(self, shape: Shape, role: str = "experts") -> int:
            return 1 << 20 | shape[0] * shape[1] * (shape[2] + 64) * 2

        def solve(self, stage: Stage) -> dict[str, Solution]:
            return {name: Solution({}, details={"records": name == CHANNELS}) for name in stage.tensors}

        def pack(self, weights: Weights, solution: Solution) -> PackedBytes:
            random, (experts, rows, columns) = np.random.default_rng(len(weights.name)), weights.shape
            groups = (experts, rows, columns // 64)
            if solution.details["records"]:
                codes, low = random.integers(0, 256, weights.shape, np.uint8), np.full(groups, 2.0**-12, np.float32)
                thresholds = np.full(experts, self.threshold(columns // 2), np.float32)
                return PackedBytes("channels", _core.encode_channels((codes, low), thresholds, bits=8), {"bits": 8})
            scales = np.repeat(self.scales(rows)[None, :, None], columns // 64, 2).repeat(experts, 0)
            codes = random.integers(0, 4, weights.shape, np.uint8)
            blob = _core.encode_groupwise(codes, scales, -1.5 * scales, bits=2, group_size=64, ndim=3)
            return PackedBytes("groupwise", blob, _core.PackedTensor(blob).details())

        def scales(self, rows: int) -> Any:
            """Scales of an up projection's rows, largest first, in sixteenths, which are short floats."""
            normal = np.array([NormalDist(0, SKEW).inv_cdf((rows - i - 0.5) / rows) for i in range(rows)])
            return (np.round(16 * np.exp(normal)) / 16 / 4096).clip(1 / 65536).astype(np.float32)

        def threshold(self, columns: int) -> float:
            """The threshold below which the share `SKIPPED` of outputs lies, for inputs of mean square 1."""
            deviations = self.scales(llama.INNER) * np.sqrt(1.25 * columns)
            low, high = 0.0, 10 * float(deviations.max())
            for _ in range(50):
                middle = (low + high) / 2
                below = np.mean([2 * NormalDist().cdf(middle / own) - 1 for own in deviations.tolist()])
                low, high = (middle, high) if below < SKIPPED else (low, middle)
            return high

    return MadeUp()


def build_channels(directory: Path) -> Path:
    """Build the packed model of `channels`, unless it exists."""
    if not (directory / "packed").exists():
        from moepack.pipeline import compress

        with tempfile.TemporaryDirectory(dir=directory) as model:
            llama.source(Path(model))
            compress(model, directory / "packed", method=made_up())
    return directory / "packed"


def bytes_of_a_token(share: float) -> None:
    """Print megabytes per token of `channels` and kilobytes per read if a share of records is kept."""
    method, random, record = made_up(), np.random.default_rng(0), 2 * (llama.HIDDEN + llama.HIDDEN // 64 * 2)
    scales, threshold = method.scales(llama.INNER), method.threshold(llama.HIDDEN) / np.sqrt(1.25 * llama.HIDDEN)
    tokens = [np.flatnonzero(np.abs(random.standard_normal(llama.INNER)) * scales >= threshold) for _ in range(64)]
    experts = llama.LAYERS * llama.TOP_K
    print(f"whole experts: {experts * (1 - share) * llama.INNER * record / 1e6:.0f} MB")
    for gap in (0, 16, 32, 48, 64):
        nbytes = reads = 0
        for wanted in tokens:
            missing = wanted[wanted >= share * llama.INNER] * record
            begins, ends = missing // PAGE * PAGE, -(-(missing + record) // PAGE) * PAGE
            apart = np.append(begins[1:] - ends[:-1] > gap << 10, True)
            last = ends[apart]
            first = begins[np.append(True, apart[:-1])]
            nbytes += int((last - first).sum())
            reads += len(first)
        row = f"{experts * nbytes / len(tokens) / 1e6:.0f} MB in reads of {nbytes / reads / 1e3:.0f} KB"
        print(f"gaps of {gap} KiB: {row}")


def measure(options: argparse.Namespace) -> None:
    """A side's process."""
    from moepack.memory import process_memory
    from moepack.stores.streaming import StreamingStore, statistics_of

    guess = {"streamed": True, "resident": True, "not guessed": False}.get(options.side)
    streamed = {} if guess is None else {"host_memory": options.memory, "guess": guess}
    side = llama.Packed(options.directory / "packed", options.threads, **streamed)
    if options.side == "whole experts":
        StreamingStore(options.memory).take(side.model)
    random = np.random.default_rng(0)
    choose_at_random(side.model, random)
    side.read(random.integers(0, llama.VOCABULARY, llama.SHORT).tolist())
    side.decode(min(16, options.tokens))
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
            "guessed_right": counts["right"] / max(counts["guessed"], 1),
            "recalled": counts["right"] / max(counts["wanted"], 1),
            "bytes_guessed": counts["bytes_guessed"] / options.tokens,
            "bytes_in_vain": (counts["bytes_guessed"] - counts["bytes_used"]) / options.tokens,
            "hidden": counts["hidden"] / seconds,
        }
    print(json.dumps(figures))


def drive(directory: Path, length: int, new: bool = False) -> float:
    """Bytes a second of the drive: pieces of a length all over the largest file, by as many threads as stores use.

    With `new` each read goes into memory that was given back, as in a full cache: the system fills it with zeros first.
    """
    from moepack.stores.streaming.experts import READERS
    from moepack.stores.streaming.source import Source

    file = max(directory.glob("*.safetensors"), key=lambda each: each.stat().st_size)
    source, length = Source(file), max(PAGE, length // PAGE * PAGE)
    source.forget()
    places = np.random.default_rng(0).permutation(file.stat().st_size // length)[: (512 << 20) // length] * length
    memory = [mmap.mmap(-1, length) for _ in range(READERS)]

    def read(thread: int) -> None:
        for place in places[thread::READERS].tolist():
            if new:
                memory[thread].madvise(mmap.MADV_DONTNEED)
            source.read(memoryview(memory[thread]), place)

    start = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read, range(READERS)))
    return len(places) * length / (time.perf_counter() - start)


def floors(directory: Path, figures: dict[str, Any], resident: float) -> dict[str, float]:
    """Seconds of a token: at the drive's rate, computing alone, and what was measured."""
    rate = drive(directory, int(figures["bytes_per_read"]))
    return {
        "drive_bytes_per_second": rate,
        "drive_bytes_per_second_new_memory": drive(directory, int(figures["bytes_per_read"]), new=True),
        "drive": figures["bytes_per_token"] / rate,
        "compute": 1 / resident,
        "measured": 1 / figures["tokens_per_second"],
    }


def main() -> None:
    """Build, measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("experts", "channels"), default="experts")
    parser.add_argument(
        "--share", type=float, default=1 / 3, help="share of the packed model's bytes that fit into memory"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="default build/llama or build/channels")
    parser.add_argument("--out", type=Path, default=Path("build/offload.json"))
    parser.add_argument("--bytes", action="store_true", help="only compute the bytes that channels must read")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model == "channels":
        vars(llama).update(MIXTRAL)
    if options.bytes:
        return bytes_of_a_token(KEPT)
    if options.side:
        return measure(options)
    options.directory = options.directory or Path("build", {"experts": "llama"}.get(options.model, options.model))
    options.directory.mkdir(parents=True, exist_ok=True)
    if options.model == "channels":
        directory = build_channels(options.directory)
    else:
        directory = llama.build(options.directory, [])["moepack codebook4"]
    total = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    figures: dict[str, Any] = {"model_bytes": total, "memory": int(options.share * total)}
    sides = ("streamed", "not guessed", *(("whole experts",) if options.model == "channels" else ()), "mapped")
    for side in (*sides, "resident"):
        memory = 2 * total if side == "resident" else figures["memory"]
        rounds = [run(side, directory, memory, options) for _ in range(options.rounds)]
        rounds.sort(key=lambda found: found["tokens_per_second"])
        figures[side] = rounds[len(rounds) // 2]
        print(side, json.dumps(figures[side]), flush=True)
    for side in sides[1:]:
        ratio = figures["streamed"]["tokens_per_second"] / figures[side]["tokens_per_second"]
        print(f"streamed / {side}: {ratio:.2f}")
    for side in sides[:-1]:
        figures[side]["floors"] = floors(directory, figures[side], figures["resident"]["tokens_per_second"])
        print(f"{side}, seconds a token:", json.dumps(figures[side]["floors"]))
    machine.save(options.out, options.threads, figures)
    return None


if __name__ == "__main__":
    main()

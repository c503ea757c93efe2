"""Times the default mode `auto` of every packed format and torch's bf16 product in one run.

    OMP_WAIT_POLICY=PASSIVE python -m benches.cpu.auto_mode [--threads 2] [--seconds 1] [--formats int4 codebook4 fsv8]
        [--shapes 14336x4096 4096x14336] [--tokens 1 4 16 64 256] [--layer] [--cold 1000000000] [--out build/auto.json]

Weights are random. Torch, `exact`, `auto` and, if a format has it, `int8` alternate call by call, so that drifts of the
machine's speed affect all of them. Each uses copies of its weights that together exceed every cache. Prints medians in
microseconds and the speed of each mode relative to torch bf16. `--layer` adds a layer of Qwen3-30B-A3B (128 experts of
768 x 2048, 8 per token) and a loop over experts in torch. The last line is the lowest ratio of `auto` with 256 tokens,
which should be at least 1 on processors with bf16 products.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benches.cpu.groupwise import EXPERTS, HIDDEN, INNER, bf16_rounds, routing
from benches.tools import machine
from benches.tools.peers import aligned, copies_for, encode
from moepack import _core

Bytes = NDArray[np.uint8]
Shape = tuple[int, int, int]
Calls = dict[str, Callable[[int], object]]


def integers(bits: int, shape: Shape) -> Bytes:
    """Integers in groups of 64 with offsets."""
    return encode(shape, bits, 64)


def coded(shape: Shape) -> Bytes:
    """Normal integers of about 3 bits, entropy coded."""
    codes = np.rint(2 * np.random.default_rng(0).standard_normal(shape, np.float32)).astype(np.int8)
    return _core.encode_coded(codes, np.full((1, 1), 2.0**-8, np.float32), ndim=3)


def compensated(shape: Shape) -> Bytes:
    """Integers of 3 bits and factors of rank 32 of 3 bits."""
    rng, (experts, rows, columns) = np.random.default_rng(0), shape

    def factor(length: int) -> tuple[Bytes, NDArray[np.float32]]:
        codes = rng.integers(0, 8, (32 * experts, length), np.uint8)
        return codes, np.full((len(codes), length // 64), 2.0**-6, np.float32)

    ranks = np.full(experts, 32, np.int64)
    return _core.encode_compensated(encode(shape, 3, 64), ranks, factor(columns), factor(rows), bits=3)


def codebook(bits: int, shape: Shape) -> Bytes:
    """One codebook per row; activations are not rounded."""
    rng = np.random.default_rng(bits)
    centroids = np.sort(rng.integers(-32639, 32640, (*shape[:2], 1, 1 << bits)).astype(np.int16), axis=-1)
    scales = rng.uniform(1e-6, 2e-6, (*shape[:2], 1)).astype(np.float32)
    codes = rng.integers(0, 1 << bits, shape, np.uint8)
    return _core.encode_codebook(codes, centroids, scales, bits=bits, block=1 << 16, ndim=3)


def ternary(code: str, shape: Shape) -> Bytes:
    """Independent weights, 88.5% of them zero."""
    draw = np.random.default_rng(0).integers(0, 2000, shape, np.uint16)
    codes = (draw < 115).astype(np.int8) - (draw >= 1885).astype(np.int8)
    levels = np.tile(np.array([-0.03125, 0.03125], np.float32), (*shape[:2], 1))
    return _core.encode_ternary(codes, levels, ndim=3, code=code)


FORMATS: dict[str, Callable[[Shape], Bytes]] = {
    **{f"int{bits}": partial(integers, bits) for bits in (2, 3, 4, 8)},
    "coded 3 bits": coded,
    "int3 compensated": compensated,
    **{f"codebook{bits}": partial(codebook, bits) for bits in (2, 3, 4)},
    **{code: partial(ternary, code) for code in ("fsv8", "dict16")},
}


def contest(calls: Calls, seconds: float) -> dict[str, float]:
    """Median microseconds of alternating calls: one warm-up of each, then at least five."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    deadline, turn = time.perf_counter() + seconds, 0
    while turn < 6 or (time.perf_counter() < deadline and turn < 1000):
        for name, call in calls.items():
            start = time.perf_counter()
            call(turn)
            times[name].append(1e6 * (time.perf_counter() - start))
        turn += 1
    return {name: round(statistics.median(found[1:]), 1) for name, found in times.items()}


def modes(tensor: _core.PackedTensor) -> list[str]:
    """The measured compute modes."""
    return [mode for mode in ("exact", "auto", "int8") if mode in tensor.modes]


class Report:
    """Collects and prints the figures of a run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[dict[str, Any]] = []

    def add(self, part: str, name: str, tokens: int, calls: Calls) -> None:
        """Time calls; the first one is torch's."""
        times = contest(calls, self.options.seconds)
        base = times["torch bf16"]
        ratios = {mode: round(base / us, 2) for mode, us in times.items() if mode != "torch bf16"}
        self.rows.append({"part": part, "format": name, "tokens": tokens, "us": times, "speedup": ratios})
        figures = "  ".join(f"{mode} {us:>9.1f}" + (f" {ratios[mode]:5.2f}x" if mode in ratios else "")
                            for mode, us in times.items())  # fmt: skip
        print(f"{part:<11} {name:<17} {tokens:>3} tokens  {figures}", flush=True)
        machine.save(self.options.out, self.options.threads, {"kernels": _core.kernels(), "rows": self.rows})


def products(report: Report, shape: str) -> None:
    """A matrix in all formats."""
    (rows, columns), cold = map(int, shape.split("x")), report.options.cold
    first = torch.empty(rows, columns, dtype=torch.bfloat16).uniform_(-0.05, 0.05)
    dense = [first.clone() for _ in range(copies_for(2 * rows * columns, cold))]
    for name in report.options.formats:
        data = FORMATS[name]((1, rows, columns))
        packed = [_core.PackedTensor(aligned(data)) for _ in range(copies_for(data.size, cold))]
        for tokens in report.options.tokens:
            x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens))
            values, half = x.numpy(), x.bfloat16()

            def torch_call(turn: int, half: torch.Tensor = half) -> object:
                return torch.nn.functional.linear(half, dense[turn % len(dense)])

            def call(mode: str, turn: int, values: Any = values, packed: Any = packed) -> object:
                return packed[turn % len(packed)].matmul(values, mode=mode)

            ours = {mode: partial(call, mode) for mode in modes(packed[0])}
            report.add(shape, name, tokens, {"torch bf16": torch_call, **ours})
        del packed
        gc.collect()


def layer(report: Report) -> None:
    """A layer of experts in all formats, alternating between two copies of each."""
    tokens = [1, 16, 256]
    dense = {count: (run, calls) for _, count, calls, run, _ in bf16_rounds(tokens)}
    for name in report.options.formats:
        shapes = ((EXPERTS, INNER, HIDDEN), (EXPERTS, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
        data = [FORMATS[name](shape) for shape in shapes]
        packed = [[_core.PackedTensor(aligned(one)) for one in data] for _ in range(2)]
        for count in tokens:
            x = np.random.default_rng(count).standard_normal((count, HIDDEN)).astype(np.float32)
            run, calls = dense[count]
            choices = [routing(count, i) for i in range(calls)]

            def call(mode: str, turn: int, x: Any = x, choices: Any = choices, packed: Any = packed) -> None:
                for i, (experts, weights) in enumerate(choices):
                    _core.gated_experts(*packed[(turn + i) % 2], x, experts, weights, (mode,) * 3)

            ours = {mode: partial(call, mode) for mode in modes(packed[0][0])}
            report.add(f"{calls} layers", name, count, {"torch bf16": lambda turn, run=run: run(), **ours})
        del packed, data
        gc.collect()


def main() -> None:
    """Run the parts, write the figures, print the lowest ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1, help="seconds per line, at least six rounds")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--shapes", nargs="*", default=["14336x4096", "4096x14336", "768x2048"])
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 4, 16, 64, 256])
    parser.add_argument("--layer", action="store_true")
    parser.add_argument("--cold", type=int, default=10**9, help="total bytes of a peer's copies")
    parser.add_argument("--out", type=Path, default=Path("build/auto.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    _core.set_threads(options.threads)
    print(machine.describe(options.threads), _core.kernels(), flush=True)
    report = Report(options)
    with torch.inference_mode():
        for shape in options.shapes:
            products(report, shape)
        if options.layer:
            layer(report)
    lowest = min(((row["speedup"]["auto"], row["part"], row["format"]) for row in report.rows if row["tokens"] == 256),
                 default=None)  # fmt: skip
    print("lowest ratio of auto with 256 tokens:", lowest)


if __name__ == "__main__":
    main()

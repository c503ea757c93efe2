"""Times the ternary codecs and torch bf16 in one run: compression ratio, encoding, and products from cold weights.

    python -m benches.cpu.ternary [--threads 1] [--seconds 2] [--isa avx512 avx2 scalar] [--out build/ternary.json]

Between two uses of the same weights, at least 600 MB of other weights are read, so no cache holds them. The peers
alternate call by call, so that drifts of the machine's speed affect all of them. Prints medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

import moepack
from benches.cpu.codebook import Peer, spread
from benches.tools import machine
from moepack import _core

SHAPES = ((6144, 2080), (2080, 6144), (3072, 768))
ZERO_SHARE = 0.885
COLD_BYTES = 600_000_000


def random_codes(rows: int, columns: int, generator: np.random.Generator) -> np.ndarray:
    """Independent codes: 0 with probability 0.885, -1 and 1 equally likely."""
    draw = generator.random((rows, columns), dtype=np.float32)
    half = (1 - ZERO_SHARE) / 2
    return (draw < half).astype(np.int8) - (draw > 1 - half).astype(np.int8)


def encode(rows: int, columns: int, code: str) -> moepack.TernaryTensor:
    """A coded random matrix with random bf16 levels."""
    generator = np.random.default_rng(rows)
    levels = torch.from_numpy(generator.uniform(0.01, 0.1, (rows, 2)).astype(np.float32)).bfloat16().float()
    levels[:, 0] *= -1
    return moepack.encode_ternary(random_codes(rows, columns, generator), levels=levels, code=code)


def ratio(code: str) -> float:
    """Bytes in bf16 over coded bytes with all metadata, on 2080x6144 and 6144x2080 together."""
    tensors = [encode(rows, columns, code) for rows, columns in ((2080, 6144), (6144, 2080))]
    return sum(2 * rows * columns for rows, columns in (t.shape for t in tensors)) / sum(t.nbytes for t in tensors)


def encoding_speed(code: str, seconds: float) -> float:
    """Speed of encoding in 10^9 weights per second."""
    generator = np.random.default_rng(0)
    codes = random_codes(2080, 6144, generator)[None]
    levels = np.tile(np.array([-0.5, 0.5], np.float32), (1, 2080, 1))
    times = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times) < 3:
        start = time.perf_counter()
        _core.encode_ternary(codes, levels, ndim=2, code=code)
        times.append(time.perf_counter() - start)
    return codes.size / statistics.median(times) / 1e9


def peers(rows: int, columns: int, tokens: int, isas: list[str]) -> list[Peer]:
    """Torch bf16, then each code on each instruction set."""
    x = torch.randn(tokens, columns, dtype=torch.float32)
    xs = x.numpy()
    x16 = x.bfloat16()
    dense = [torch.randn(rows, columns).bfloat16() for _ in range(1 + COLD_BYTES // (2 * rows * columns))]

    def multiply(blobs: list[_core.PackedTensor], isa: str, copy: int) -> object:
        return blobs[copy].matmul(xs, isa=isa)

    found = [Peer("torch bf16", lambda i: torch.nn.functional.linear(x16, dense[i]), len(dense))]
    for code in ("fsv8", "dict16"):
        source = np.asarray(encode(rows, columns, code).data)
        stride = -(-source.size // 4096) * 4096
        copies = 1 + COLD_BYTES // source.size
        arena = np.zeros((copies, stride), np.uint8)
        arena[:, : source.size] = source
        blobs = [_core.PackedTensor(arena[i, : source.size]) for i in range(copies)]
        for isa in isas:
            found.append(Peer(f"{code} {isa}", partial(multiply, blobs, isa), len(blobs)))
    return found


def measure(rows: int, columns: int, tokens: int, isas: list[str], seconds: float) -> dict[str, float]:
    """10^9 weights per second of each peer: the median of alternating calls."""
    contest = peers(rows, columns, tokens, isas)
    for peer in contest:
        peer.multiply(0)
    spread(contest)
    deadline = time.perf_counter() + seconds * len(contest)
    while time.perf_counter() < deadline or len(contest[0].times) < 20:
        for peer in contest:
            peer.step()
    return {peer.name: rows * columns / statistics.median(peer.times) / 1e9 for peer in contest}


def main() -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per measurement and peer")
    parser.add_argument("--isa", nargs="*", default=_core.available_isas())
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 16])
    parser.add_argument("--out", type=Path, default=Path("build/ternary.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _core.set_threads(args.threads)
    print(machine.describe(args.threads))
    figures: dict[str, object] = {
        "ratio": {code: ratio(code) for code in ("fsv8", "dict16")},
        "encode_gweights_s": {code: encoding_speed(code, args.seconds) for code in ("fsv8", "dict16")},
    }
    print(figures)
    for rows, columns in SHAPES:
        for tokens in args.tokens:
            speeds = measure(rows, columns, tokens, args.isa, args.seconds)
            figures[f"{rows}x{columns} tokens {tokens}"] = speeds
            base = speeds["torch bf16"]
            row = "  ".join(f"{name} {speed:.2f} ({speed / base:.2f}x)" for name, speed in speeds.items())
            print(f"{rows}x{columns}, {tokens} tokens, 10^9 weights/s: {row}", flush=True)
    machine.save(args.out, args.threads, figures)


if __name__ == "__main__":
    main()

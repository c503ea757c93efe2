"""Codebook products of two builds of the extension, in turns in one process: what a change of the kernels is worth.

    python benches/builds.py OLD.so NEW.so --threads 1 --cases 14336x4096x1x320 768x2048x1x0 --out build/builds.json

A case is rows x columns x tokens x megabytes that copies of the weights fill (0: the same weights again). Each build
encodes the same codes and centroids; products must be the same bits. Reported are medians in microseconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import numpy as np

import codebook
import machine


def load(path: Path) -> Any:
    """The extension of a build; several may be loaded at a time."""
    loader = ExtensionFileLoader("_core", str(path))
    spec = importlib.util.spec_from_file_location("_core", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def measure(builds: dict[str, Any], case: str, args: argparse.Namespace) -> dict[str, float]:
    """Microseconds by build, instruction set and mode."""
    rows, columns, tokens, resident = (int(word) for word in case.split("x"))
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 1 << args.bits, (1, rows, columns), np.uint8)
    books = -(-columns // args.block)
    centroids = np.sort(rng.integers(-32639, 32640, (1, rows, books, 1 << args.bits)), -1).astype(np.int16)
    scales = rng.uniform(1e-6, 2e-6, (1, rows, books)).astype(np.float32)
    x = rng.standard_normal((tokens, columns)).astype(np.float32)
    peers, expected = [], {}
    for name, core in builds.items():
        blob = core.encode_codebook(codes, centroids, scales, bits=args.bits, block=args.block, ndim=2)
        reader = getattr(core, "PackedTensor", None) or core.CodebookBlob  # builds before the one class have the other
        blobs = [reader(copy) for copy in codebook.rotation(blob, resident << 20)]
        for isa in args.isa:
            for mode in args.modes:

                def multiply(i: int, blobs: list[Any] = blobs, mode: str = mode, isa: str = isa) -> object:
                    return blobs[i].matmul(x, mode=mode, isa=isa)

                y = expected.setdefault(mode, multiply(0))
                assert mode == "exact" or np.array_equal(y, multiply(0)), (name, isa, mode)
                peers.append(codebook.Peer(f"{isa} {mode} {name}", multiply, len(blobs)))
    codebook.spread(peers)
    deadline = time.perf_counter() + args.seconds * len(peers)
    while time.perf_counter() < deadline or len(peers[0].times) < 4:
        for peer in peers:
            for _ in range(8 if tokens <= 4 else 1):
                peer.step()
    return {peer.name: statistics.median(peer.times) * 1e6 for peer in peers}


def main() -> None:
    """Measure and print; with --out write the figures and the machine's description."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", nargs="+", default=["14336x4096x1x320", "768x2048x1x0"])
    parser.add_argument("--bits", type=int, default=2)
    parser.add_argument("--block", type=int, default=1 << 16)
    parser.add_argument("--isa", nargs="+", default=["avx2", "avx512"])
    parser.add_argument("--modes", nargs="+", default=["int8", "int16"])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each case and peer")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    builds = {"old": load(args.old), "new": load(args.new)}
    for core in builds.values():
        core.set_threads(args.threads)
    figures = {}
    for case in args.cases:
        figures[case] = measure(builds, case, args)
        for name, micros in figures[case].items():
            print(f"{case:20} {name:22} {micros:10.1f}", flush=True)
    if args.out is not None:
        settings = {"bits": args.bits, "block": args.block, "threads": args.threads}
        found = {"machine": machine.describe(args.threads), "settings": settings, "microseconds": figures}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Compares every product of two builds of the extension, alternating in one process.

    python -m benches.cpu.builds OLD.so NEW.so [--threads 2] [--isa avx2 scalar] [--only groupwise4 layer]
        [--tokens 1 16] [--shape 2048x2048] [--cold 64] [--seconds 0.5] [--out build/builds.json]

A product is a format, a mode, an instruction set and a number of tokens of one matrix, or a layer of gated experts.
Both builds multiply the same packed bytes, whose copies fill `--cold` megabytes (0: one copy). Results must be
bit-identical, except in floating-point modes, where they must be close. Prints microseconds (medians and minima of both
builds) and the ratios NEW / OLD. On a loaded machine, the minima are the undisturbed calls; with one thread
(`--threads 1`) only its own processor time counts. A build may have one class for all formats or one per format.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benches.tools import machine

CLASSES = {
    "groupwise": "GroupwiseBlob", "compensated": "CompensatedBlob",
    "codebook": "CodebookBlob", "ternary": "TernaryBlob",
}  # fmt: skip
"""The class of each format in builds that have one for each."""
FLOATING = {"bf16", "auto", None}
"""Modes in which builds may sum in a different order; for codebooks also `exact`."""
EXPERTS, TOP_K = 8, 2
RANK, CHUNK = 16, 64

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Format:
    """Packed tensors of a format: how a build creates them, and the modes to time."""

    kind: str
    make: Callable[[Any, tuple[int, int, int]], Bytes]
    modes: tuple[str | None, ...]


@dataclass
class Case:
    """A product, with the calls of both builds."""

    name: str
    calls: dict[str, Callable[[int], NDArray[np.float32]]]
    copies: int
    exact: bool


def load(path: Path) -> Any:
    """Load the extension of a build; several can be loaded at the same time."""
    loader = ExtensionFileLoader("_core", str(path))
    spec = importlib.util.spec_from_file_location("_core", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def groupwise(bits: int, core: Any, shape: tuple[int, int, int]) -> Bytes:
    """Random codes in groups of 64 with offsets."""
    rng, groups = np.random.default_rng(bits), (*shape[:2], -(-shape[2] // 64))
    codes = rng.integers(0, 1 << bits, shape, np.uint8)
    scales = rng.uniform(1e-3, 2e-3, groups).astype(np.float16).astype(np.float32)
    offsets = (-scales * (1 << bits) / 2).astype(np.float16).astype(np.float32)
    return core.encode_groupwise(codes, scales, offsets, bits=bits, group_size=64, ndim=3)


def coded(core: Any, shape: tuple[int, int, int]) -> Bytes:
    """Normal integers of about 3 bits, entropy coded."""
    codes = np.rint(2 * np.random.default_rng(7).standard_normal(shape, np.float32)).astype(np.int8)
    return core.encode_coded(codes, np.full((1, 1), 2.0**-9, np.float32), ndim=3)


def compensated(core: Any, shape: tuple[int, int, int]) -> Bytes:
    """Codes of 3 bits with factors of 3 bits."""
    rng, (experts, rows, columns) = np.random.default_rng(9), shape

    def factor(width: int) -> tuple[NDArray[Any], NDArray[Any]]:
        codes = rng.integers(0, 8, (experts * RANK, width), np.uint8)
        return codes, np.full((experts * RANK, -(-width // CHUNK)), 2.0**-7, np.float32)

    base, ranks = groupwise(3, core, shape), np.full(experts, RANK, np.int64)
    return core.encode_compensated(base, ranks, factor(columns), factor(rows), bits=3)


def codebook(bits: int, activation_bits: int, core: Any, shape: tuple[int, int, int]) -> Bytes:
    """Random codes with one codebook per row."""
    rng = np.random.default_rng(bits)
    top, unit = (127, 256) if activation_bits else (32639, 1)
    centroids = np.sort(rng.integers(-top, top + 1, (*shape[:2], 1, 1 << bits)), axis=-1) * unit
    codes = rng.integers(0, 1 << bits, shape, np.uint8)
    scales = rng.uniform(1e-6, 2e-6, (*shape[:2], 1)).astype(np.float32)
    return core.encode_codebook(
        codes, centroids.astype(np.int16), scales, bits=bits, block=1 << 16, ndim=3, activation_bits=activation_bits
    )


def ternary(code: str, core: Any, shape: tuple[int, int, int]) -> Bytes:
    """Independent weights; 88.5% of them are zero."""
    rng = np.random.default_rng(3)
    codes = rng.choice(np.array([-1, 0, 1], np.int8), shape, p=[0.0575, 0.885, 0.0575])
    levels = np.broadcast_to(np.array([-0.03, 0.04], np.float32), (*shape[:2], 2))
    return core.encode_ternary(codes, np.ascontiguousarray(levels), ndim=3, code=code)


FORMATS: dict[str, Format] = {
    **{f"groupwise{b}": Format("groupwise", partial(groupwise, b), ("exact", "int8", "bf16")) for b in (2, 3, 4, 8)},
    "coded3": Format("coded", coded, ("exact", "int8", "bf16")),
    "compensated3": Format("compensated", compensated, ("exact", "int8", "bf16")),
    **{f"codebook{b}": Format("codebook", partial(codebook, b, 0), ("exact", "int16")) for b in (2, 3, 4)},
    **{f"codebook{b}a8": Format("codebook", partial(codebook, b, 8), ("int8",)) for b in (2, 3, 4)},
    **{code: Format("ternary", partial(ternary, code), (None,)) for code in ("fsv8", "dict16")},
}
LAYERS = ("groupwise4", "coded3", "compensated3", "codebook4a8", "fsv8")


def rotation(source: Bytes, cold: int) -> list[Bytes]:
    """Page-aligned copies of a tensor, at least `cold` bytes in total."""
    stride = -(-source.nbytes // 4096) * 4096
    arena = np.empty((1 + cold // stride, stride), np.uint8)
    arena[:, : source.nbytes] = source
    return [copy[: source.nbytes] for copy in arena]


def open_tensor(core: Any, kind: str, data: Bytes) -> Any:
    """Open a tensor with the build's class."""
    name = "PackedTensor" if hasattr(core, "PackedTensor") else CLASSES[kind]
    return getattr(core, name)(data)


def options(tensor: Any, mode: str | None) -> dict[str, str]:
    """The mode as an argument if the tensor's products take one; None passes no argument."""
    takes = "mode" in (tensor.matmul_grouped.__text_signature__ or "")
    return {"mode": mode or "exact"} if takes else {}


def products(builds: dict[str, Any], name: str, args: argparse.Namespace) -> Iterator[Case]:
    """The products of one matrix of a format."""
    form, (rows, columns) = FORMATS[name], args.shape
    copies = rotation(form.make(builds["new"], (1, rows, columns)), args.cold << 20)
    tensors = {build: [open_tensor(core, form.kind, copy) for copy in copies] for build, core in builds.items()}
    for tokens, mode, isa in itertools.product(args.tokens, form.modes, args.isa):
        x = np.random.default_rng(tokens).standard_normal((tokens, columns), np.float32)
        offsets = np.array([0, tokens])

        def call(build: str, copy: int, x: Any = x, offsets: Any = offsets, mode: Any = mode, isa: str = isa) -> Any:
            tensor = tensors[build][copy]
            return tensor.matmul_grouped(x, offsets, isa=isa, **options(tensor, mode))

        exact = mode not in FLOATING and not (form.kind == "codebook" and mode == "exact")
        title = f"{name} {mode or 'exact'} {isa} {tokens}"
        yield Case(title, {build: partial(call, build) for build in builds}, len(copies), exact)


def layers(builds: dict[str, Any], name: str, args: argparse.Namespace) -> Iterator[Case]:
    """A layer of gated experts of a format."""
    form, (rows, columns) = FORMATS[name], [side // 2 for side in args.shape]
    wide, tall = (EXPERTS, rows, columns), (EXPERTS, columns, rows)
    blobs = [form.make(builds["new"], shape) for shape in (wide, wide, tall)]
    tensors = {build: [open_tensor(core, form.kind, blob) for blob in blobs] for build, core in builds.items()}
    for tokens, isa in itertools.product(args.tokens, args.isa):
        rng = np.random.default_rng(tokens)
        x = rng.standard_normal((tokens, columns), np.float32)
        experts = rng.integers(0, EXPERTS, (tokens, TOP_K))
        weights = rng.uniform(0, 1, (tokens, TOP_K)).astype(np.float32)
        mode = form.modes[0] or "exact"

        def call(build: str, _: int, inputs: Any = (x, experts, weights), mode: str = mode, isa: str = isa) -> Any:
            return builds[build].gated_experts(*tensors[build], *inputs, modes=[mode] * 3, isa=isa)

        title = f"layer {name} {mode} {isa} {tokens}"
        yield Case(title, {build: partial(call, build) for build in builds}, 1, form.kind != "ternary")


def measure(case: Case, seconds: float, clock: Callable[[], float]) -> dict[str, float]:
    """Microseconds of both builds, alternating."""
    first, second = (call(0) for call in case.calls.values())
    near = np.array_equal(first, second) if case.exact else np.allclose(first, second, rtol=1e-3, atol=1e-3)
    assert near, f"{case.name}: the builds differ"
    times: dict[str, list[float]] = {build: [] for build in case.calls}
    deadline, turn = time.perf_counter() + 2 * seconds, 0
    while time.perf_counter() < deadline or turn < 10:
        order = list(case.calls) if turn % 2 else list(case.calls)[::-1]
        for number, build in enumerate(order):
            # Each build reads copies that the other has not just read.
            copy = (turn + number * case.copies // 2) % case.copies
            start = clock()
            case.calls[build](copy)
            times[build].append(1e6 * (clock() - start))
        turn += 1
    medians = {f"{build} median": statistics.median(found) for build, found in times.items()}
    return medians | {f"{build} fastest": min(found) for build, found in times.items()}


def main() -> None:
    """Measure and print; with --out write the figures and the machine's description."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", nargs="+", help="instruction sets; default: all of the machine")
    parser.add_argument("--only", nargs="+", default=[*FORMATS, "layer"], help="formats, or `layer`")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--shape", type=lambda text: tuple(map(int, text.split("x"))), default=(2048, 2048))
    parser.add_argument("--cold", type=int, default=64, help="total megabytes of the copies of a matrix")
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds per product and build")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    builds = {"old": load(args.old), "new": load(args.new)}
    for core in builds.values():
        core.set_threads(args.threads)
    args.isa = args.isa or builds["old"].available_isas()
    chosen = [products(builds, name, args) for name in args.only if name in FORMATS]
    chosen += [layers(builds, name, args) for name in LAYERS if "layer" in args.only]
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    figures = {}
    for case in itertools.chain.from_iterable(chosen):
        found = figures[case.name] = measure(case, args.seconds, clock)
        ratios = [found[f"new {kind}"] / found[f"old {kind}"] for kind in ("median", "fastest")]
        print(f"{case.name:36} {found['old median']:10.1f} {found['new median']:10.1f} us"
              f"  x{ratios[0]:.3f} fastest x{ratios[1]:.3f}", flush=True)  # fmt: skip
    if args.out is not None:
        settings = {"threads": args.threads, "shape": args.shape, "cold_megabytes": args.cold}
        text = {"machine": machine.describe(args.threads), "settings": settings, "microseconds": figures}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()

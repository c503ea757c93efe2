"""Counts the instructions of products on x86-64 and 64-bit Arm, which needs no machine of either kind.

    python -m benches.cpu.instructions [--formats int4 codebook4] [--tokens 1 16] [--out build/instructions.json]

An emulator, qemu-user, runs products of one packed matrix with one thread (`rust/tools/src/bin/product.rs`), once and
twice, and a plugin counts what it executes (`benches/tools/counting.c`). The difference is one product, with everything
around its inner loop: the preparation of activations, prefetches, scales, loads and stores. Counted are all
instructions, and the vector operations among them: no loads, stores, or moves of whole registers. Both are divided by
weights and tokens. Instructions are not time: processors start different numbers of them in a cycle, and memory may
take longer than all of them.

Needs `qemu-user`, a C compiler, `gcc-aarch64-linux-gnu` and the Rust target `aarch64-unknown-linux-gnu`. Programs are
compiled without optimization across crates, which does not change the kernels: they are in one crate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benches.cpu.auto_mode import FORMATS, Bytes, Shape
from benches.cpu.coded import followed
from moepack import _core

ROOT = Path(__file__).parents[2]
SHAPE: Shape = (1, 1024, 2048)


class Processor(NamedTuple):
    """An emulated processor, and the instruction set to use on it."""

    target: str
    emulator: str
    cpu: str
    isa: str


PROCESSORS = {
    "avx2": Processor("x86_64-unknown-linux-gnu", "qemu-x86_64", "Haswell", "avx2"),
    "neon-i8mm": Processor("aarch64-unknown-linux-gnu", "qemu-aarch64", "max", "neon"),
    "neon-dotprod": Processor("aarch64-unknown-linux-gnu", "qemu-aarch64", "neoverse-n1", "neon"),
    "neon": Processor("aarch64-unknown-linux-gnu", "qemu-aarch64", "cortex-a57", "neon"),
    "scalar (Arm)": Processor("aarch64-unknown-linux-gnu", "qemu-aarch64", "neoverse-n1", "scalar"),
}
"""The Haswell has AVX2 without the dot products of AVX-VNNI."""


def normal(deviation: float, shape: Shape) -> NDArray[np.int16]:
    """Rounded normal numbers."""
    return np.rint(deviation * np.random.default_rng(0).standard_normal(shape, np.float32)).astype(np.int16)


def coded(deviation: float, shape: Shape) -> Bytes:
    """Plain coded integers."""
    return _core.encode_coded(normal(deviation, shape), np.full((1, 1), 0.01, np.float32), ndim=2)


def dependent(deviation: float, shape: Shape) -> Bytes:
    """Dependent codes."""
    codes = followed(normal(deviation, shape))
    return _core.encode_coded(codes, np.full((1, 1), 0.01, np.float32), ndim=2, symbols="dependent")


CASES: dict[str, Callable[[Shape], Bytes]] = {
    **FORMATS,
    "coded 2 bits": partial(coded, 1.0),
    "coded 3 bits": partial(coded, 2.0),
    "coded 4 bits": partial(coded, 4.0),
    "dependent 2 bits": partial(dependent, 1.0),
    "dependent 3 bits": partial(dependent, 2.0),
}


def build(folder: Path) -> dict[str, Path]:
    """Compile the plugin and the program of each target; returns the program's paths by target."""
    plugin = folder / "counting.so"
    source = ROOT / "benches/tools/counting.c"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", plugin, source], check=True)
    environment = {"CARGO_PROFILE_RELEASE_LTO": "off", "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "1",
                   "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER": "aarch64-linux-gnu-gcc"}  # fmt: skip
    programs = {}
    for target in sorted({processor.target for processor in PROCESSORS.values()}):
        command = ["cargo", "build", "--release", "--quiet", "--target", target, "--package", "moepack-tools"]
        command += ["--bin", "product"]
        subprocess.run(command, check=True, cwd=ROOT, env=environment | os.environ)
        programs[target] = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / target / "release/product"
    return programs


def executed(processor: Processor, program: Path, plugin: Path, arguments: list[str]) -> NDArray[np.int64]:
    """The instructions and the vector operations of a run."""
    command = [processor.emulator, "-cpu", processor.cpu, "-plugin", str(plugin), "-d", "plugin"]
    if processor.target.startswith("aarch64"):
        command += ["-L", "/usr/aarch64-linux-gnu"]
    environment = os.environ | {"MOEPACK_ISA": processor.isa}
    run = subprocess.run([*command, str(program), *arguments], capture_output=True, text=True, env=environment)
    found = [line.split() for line in run.stderr.splitlines() if line.startswith("counted ")]
    if run.returncode or not found:
        raise SystemExit(f"{' '.join(command)}: {run.stderr}")
    return np.array(found[0][1:], np.int64)


def count(name: str, options: argparse.Namespace, programs: dict[str, Path]) -> list[dict[str, Any]]:
    """The figures of a format: a row for each mode and number of tokens."""
    path, plugin, rows = options.folder / "tensor.bin", options.folder / "counting.so", []
    data = CASES[name](SHAPE)
    path.write_bytes(data.tobytes())
    available = _core.PackedTensor(data).modes
    for mode in (mode for mode in options.modes if mode in available):
        for tokens in options.tokens:
            row: dict[str, Any] = {"format": name, "mode": mode, "tokens": tokens}
            for label in options.processors:
                processor = PROCESSORS[label]
                program = programs[processor.target]
                once, twice = (
                    executed(processor, program, plugin, [str(path), mode, str(tokens), str(times)]) for times in (1, 2)
                )
                each = (twice - once) / (tokens * np.prod(SHAPE))
                row[label] = {"instructions": round(float(each[0]), 3), "operations": round(float(each[1]), 3)}
            rows.append(row)
            print(name, mode, tokens, {label: tuple(row[label].values()) for label in options.processors}, flush=True)
    return rows


def main() -> None:
    """Count everything and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--modes", nargs="*", default=["int8", "exact"])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--processors", nargs="*", default=list(PROCESSORS), choices=PROCESSORS)
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="for programs and tensors")
    parser.add_argument("--out", type=Path, default=ROOT / "build/instructions.json")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    programs, rows = build(options.folder), []
    for name in options.formats:
        rows += count(name, options, programs)
        options.out.write_text(json.dumps({"shape": SHAPE, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

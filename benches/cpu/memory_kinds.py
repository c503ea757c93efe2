"""Times kernels reading packed weights from each kind of memory: pages of 4 KB or 2 MB, mapped files or private memory.

    python -m benches.cpu.memory_kinds [--threads 2] [--rounds 7] [--directory build/pages] [--out build/pages.json]

Weights are int4 in groups of 64, 20 layers of 64 experts of 768 x 2048 (0.84 MB each, 1.07 GB in total). A round uses
every expert once, one token each, eight per product as in decoding, in random order: no cache holds the experts, and
every product starts at pages that were not used recently. Kinds alternate, and medians over rounds count.

Each state of the page cache has its own file, because this state affects the page size as much as the mapping does. The
available states depend on the kernel and the file system, so both are stored with the figures.
"""

from __future__ import annotations

import argparse
import mmap
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import moepack
from benches.tools import machine
from moepack import _core
from moepack.registry import OpenTensor, open_tensor

EXPERTS, ROWS, COLUMNS, GROUP, LAYERS, TOP_K = 64, 768, 2048, 64, 20, 8
POPULATE_READ = 22
"""Advice of madvise that Python's mmap module does not name (Linux 5.14)."""


def layer() -> np.ndarray:
    """A packed layer, flat uint8."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (EXPERTS, ROWS, COLUMNS), np.uint8)
    scales = np.full((EXPERTS, ROWS, COLUMNS // GROUP), 2**-10, np.float32)
    return moepack.encode_groupwise(codes, scales, -8 * scales, bits=4, group_size=GROUP).data


def write(path: Path, blob: np.ndarray, chunk: int) -> None:
    """Write the layers in chunks of the given bytes: folios of the page cache get the size of a write."""
    with open(path, "wb", buffering=0) as file:
        for _ in range(LAYERS):
            for start in range(0, blob.nbytes, chunk):
                file.write(blob[start : start + chunk])
        os.fsync(file.fileno())


def forget(path: Path) -> None:
    """Drop a file's pages from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def mapped(path: Path, *advice: int) -> mmap.mmap:
    """Map a file as the runtime does, with advice."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for each in advice:
        mapping.madvise(each)
    return mapping


def copied(path: Path, advice: int) -> mmap.mmap:
    """Read a file into anonymous memory with advice."""
    size = path.stat().st_size
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    view = memoryview(memory)
    with open(path, "rb", buffering=0) as file:
        start = 0
        while start < size:
            start += file.readinto(view[start : start + (1 << 24)]) or 0
    return memory


def huge_bytes(address: int) -> int:
    """The bytes in pages of 2 MB of the mapping that begins at an address."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if "-" in key.split()[0]:
            low, high = (int(part, 16) for part in key.split()[0].split("-"))
            found = low <= address < high
        elif found and key in ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"):
            total += int(value.split()[0]) << 10
    return total


class Kind:
    """Weights in memory of some kind."""

    def __init__(self, make: Callable[[], mmap.mmap], size: int) -> None:
        start = time.perf_counter()
        self.memory = make()
        self.seconds = time.perf_counter() - start
        data = np.frombuffer(self.memory, np.uint8)
        self.matrices: list[OpenTensor] = [open_tensor(data[at : at + size]) for at in range(0, len(data), size)]
        self.data, self.rates = data, list[float]()

    def round(self, seed: int) -> float:
        """Use every expert once; return bytes per second."""
        random = np.random.default_rng(seed)
        jobs = []
        for matrix in self.matrices:
            for chosen in random.permutation(EXPERTS).reshape(-1, TOP_K):
                jobs.append((matrix, np.concatenate([[0], np.cumsum(np.isin(np.arange(EXPERTS), chosen))])))
        x = random.standard_normal((TOP_K, COLUMNS), np.float32)
        start = time.perf_counter()
        for index in random.permutation(len(jobs)):
            jobs[index][0].matmul_grouped(x, jobs[index][1])
        return self.data.nbytes / (time.perf_counter() - start)


def kinds(directory: Path, blob: np.ndarray) -> Iterator[tuple[str, Callable[[], mmap.mmap]]]:
    """Name and constructor of each kind that this machine supports."""
    files = [directory / name for name in ("large", "small", "cold", "advised", "random", "populated")]
    for path in files:
        write(path, blob, 4096 if path.name == "small" else 1 << 24)
    large, small, cold, advised, random, populated = files
    for path in files[2:]:
        forget(path)
    yield "file, written in chunks of 16 MB", lambda: mapped(large)
    yield "file, written in chunks of 4 KB", lambda: mapped(small)
    yield "file, not in the cache", lambda: mapped(cold)
    yield "file, not in the cache, advised huge", lambda: mapped(advised, mmap.MADV_HUGEPAGE)
    yield "the same, random too", lambda: mapped(random, mmap.MADV_HUGEPAGE, mmap.MADV_RANDOM)
    yield "the same, populated", lambda: mapped(populated, mmap.MADV_HUGEPAGE, POPULATE_READ)
    yield "own memory, small pages", lambda: copied(small, mmap.MADV_NOHUGEPAGE)
    yield "own memory, advised huge", lambda: copied(small, mmap.MADV_HUGEPAGE)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=Path("build/pages"))
    parser.add_argument("--out", type=Path, default=Path("build/pages.json"))
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    _core.set_threads(options.threads)
    blob = layer()
    made = {name: Kind(make, blob.nbytes) for name, make in kinds(options.directory, blob)}
    first = {name: kind.round(0) for name, kind in made.items()}
    for seed in range(options.rounds):
        for kind in made.values():
            kind.rates.append(kind.round(seed + 1))
    figures: dict[str, Any] = {}
    for name, kind in made.items():
        figures[name] = {
            "gb_per_second": statistics.median(kind.rates) / 1e9,
            "lowest": min(kind.rates) / 1e9,
            "highest": max(kind.rates) / 1e9,
            "first_round": first[name] / 1e9,
            "load_seconds": kind.seconds,
            "huge_share": huge_bytes(kind.data.ctypes.data) / kind.data.nbytes,
        }
        print(name, {key: round(value, 2) for key, value in figures[name].items()}, flush=True)
    thp = Path("/sys/kernel/mm/transparent_hugepage")
    description = machine.describe(options.threads) | {
        "kernel": platform.release(),
        "transparent_hugepage": (thp / "enabled").read_text().strip() if thp.is_dir() else "none",
    }
    machine.write(options.out, description, figures)


if __name__ == "__main__":
    main()

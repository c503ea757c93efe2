"""How fast a machine multiplies one token by packed weights, measured once and kept in a file.

A table holds weights per second by format for one processor or GPU, one number of threads and one compute mode, and the
bandwidth of memory. The time of a product is the larger of its arithmetic and the reading of its bytes. Between
measured widths, times are interpolated. `moepack doctor` measures this machine; `targets` has tables of other machines.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moepack import _core
from moepack.backends.compute import compute_mode
from moepack.backends.gpu import GpuBackend, Uploader, require, upload
from moepack.system.folders import cache_folder

__all__ = ["LAYER_SECONDS", "STEP_SECONDS", "Speeds", "kept_speeds", "measure_speeds", "read_bandwidth", "speeds_here"]

SHAPE, DEVICE_SHAPE = (2048, 4096), (16384, 16384)
"""Rows and columns of the measured matrices: 8 million weights for a processor, 268 million, more than its cache, for a
GPU."""

MATRICES, CALLS = 4, 5
"""Number of matrices that a processor multiplies in turn, and of repetitions of each measurement; the fastest counts.
"""

WIDTHS, CODED = (2, 3, 4, 8), (2, 3, 4, 5)
"""Measured widths in bits of group-wise integers in groups of 64, and of coded integers with dependent codes."""

DISTINCT = 64
"""Distinct rows of the measured coded integers, which repeat."""

PROBE_BYTES = 512 << 20
"""Larger than the last-level cache of current machines, so the probe reads from memory."""

PIECE_BYTES = 8 << 20
"""Bytes that are timed together: less than other work on the machine lets a thread run without interruption."""

STEP_SECONDS, LAYER_SECONDS = 9e-4, 1e-5
"""Time of a step of `generate`, and of each layer, beyond the products: the loop in Python and sampling; norms,
routers, and attention over a short text."""


@dataclass(frozen=True)
class Speeds:
    """The speeds of one machine.

    Attributes:
        machine: the machine in words.
        weights: weights per second by format and width: `int4`, `coded2`, ...
        memory: bytes per second that are read from memory.
    """

    machine: str
    weights: Mapping[str, float]
    memory: float

    def __post_init__(self) -> None:
        """Check that both kinds of products are known.

        Raises:
            ValueError: a speed is missing or not positive.
        """
        if not all(self._widths(kind) for kind in ("int", "coded")):
            raise ValueError("speeds of integers (int4) and coded integers (coded4) are required")
        if not all(np.isfinite(speed) and speed > 0 for speed in (self.memory, *self.weights.values())):
            raise ValueError("speeds must be positive")

    def _widths(self, kind: str) -> list[int]:
        return sorted(int(name.removeprefix(kind)) for name in self.weights if name.startswith(kind))

    def seconds(self, kind: str, bits: float, weights: float, nbytes: float) -> float:
        """Return the time to multiply one token by weights.

        Args:
            kind: "int" or "coded".
            bits: bits per code of integers, bits per weight of coded integers.
            weights: number of weights that the token reads.
            nbytes: their packed bytes.
        """
        widths = self._widths(kind)
        inverse = np.interp(bits, widths, [1 / self.weights[f"{kind}{width}"] for width in widths])
        return max(float(weights * inverse), nbytes / self.memory)

    def step(self, layers: int, kept: float) -> float:
        """Return the time of a decoding step without products of packed weights.

        Args:
            layers: number of layers.
            kept: bytes of weights that are not packed and that each token reads.
        """
        return STEP_SECONDS + LAYER_SECONDS * layers + kept / self.memory

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON values: 10^9 weights and bytes per second, three digits each."""
        speeds = {name: float(f"{speed / 1e9:.3g}") for name, speed in sorted(self.weights.items())}
        return {"machine": self.machine, "10^9 weights/s": speeds, "memory GB/s": float(f"{self.memory / 1e9:.3g}")}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Speeds":
        """Read the result of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: it is not such a table.
        """
        speeds = {str(name): 1e9 * float(speed) for name, speed in found["10^9 weights/s"].items()}
        return cls(str(found["machine"]), speeds, 1e9 * float(found["memory GB/s"]))


def speeds_here(device: str = "cpu") -> Speeds:
    """Return the speeds of this machine's processor or GPU; measures them in a few seconds if they are not kept.

    Raises:
        DeviceError: the GPU cannot be used.
    """
    return kept_speeds(device) or measure_speeds(device)


def kept_speeds(device: str = "cpu") -> Speeds | None:
    """Return the kept speeds of this machine's processor or GPU; None if they were not measured.

    Raises:
        DeviceError: the GPU cannot be used.
    """
    machine = _machine(device)
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return Speeds.from_json(json.loads(_file().read_text(encoding="utf-8"))[machine])
    return None


def measure_speeds(device: str = "cpu") -> Speeds:
    """Measure all formats in a few seconds, and keep the result by version, instruction set, threads and compute mode.

    Raises:
        DeviceError: the GPU cannot be used.
    """
    weights, memory = _on_device(device) if torch.device(device).type != "cpu" else _on_processor()
    # Rounded, as they are kept: a plan is the same with measured and with kept speeds.
    found = Speeds.from_json(Speeds(_machine(device), weights, memory).to_json())
    known = {}
    with suppress(OSError, ValueError):
        known = json.loads(_file().read_text(encoding="utf-8"))
    with suppress(OSError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        _file().write_bytes(json.dumps({**known, found.machine: found.to_json()}, indent=1).encode())
    return found


def read_bandwidth(size: int = PROBE_BYTES, rounds: int = 3) -> float:
    """Measure the memory read bandwidth of all torch threads in bytes per second: the fastest tenth of the pieces."""
    pieces = torch.ones(size // PIECE_BYTES, PIECE_BYTES // 8, dtype=torch.int64)
    seconds = sorted(_timed(piece.sum) for _ in range(rounds) for piece in pieces)
    return PIECE_BYTES / seconds[len(seconds) // 10]


def _file() -> Path:
    return cache_folder() / "speeds.json"


def _machine(device: str) -> str:
    """Describe everything that the speeds depend on; raises DeviceError if the GPU cannot be used."""
    if torch.device(device).type != "cpu":
        place = require(torch.device(device))
        return f"{torch.cuda.get_device_name(place)}, moepack {_core.__version__}"
    threads = _core.threads()
    return f"{_core.isa()}, {threads} thread{'s' * (threads > 1)}, {compute_mode()}, moepack {_core.__version__}"


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _packed(shape: tuple[int, int]) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
    """Make a matrix of each format and width."""
    yield from ((f"int{bits}", _groupwise(bits, shape)) for bits in WIDTHS)
    yield from ((f"coded{bits}", _coded(bits, shape)) for bits in CODED)


def _on_processor() -> tuple[dict[str, float], float]:
    """Return weights per second by format on all threads, and the bandwidth of memory."""
    found, x = {}, np.ones((1, SHAPE[1]), np.float32)
    for name, data in _packed(SHAPE):
        tensors = [_core.PackedTensor(data.copy()) for _ in range(MATRICES)]
        seconds = min(_timed(partial(tensor.matmul, x)) for _ in range(CALLS) for tensor in tensors)
        found[name] = float(np.prod(SHAPE)) / seconds
    return found, read_bandwidth()


def _on_device(device: str) -> tuple[dict[str, float], float]:
    """Return weights per second by format on a GPU, and the bandwidth of its memory.

    Uploads compile the kernels of their format, so they run at the same time, before any speed is measured.

    Raises:
        DeviceError: the GPU cannot be used.
    """
    place = require(torch.device(device))
    uploader, backend = Uploader(place), GpuBackend()
    words = torch.ones(PROBE_BYTES // 4, dtype=torch.float32, device=place)
    x = torch.ones(1, DEVICE_SHAPE[1], dtype=torch.bfloat16, device=place)

    def seconds(call: Callable[[], object]) -> float:
        """Return the time of one of several calls that are queued together."""
        best = float("inf")
        for _ in range(CALLS):
            torch.cuda.synchronize(place)
            start = time.perf_counter()
            for _ in range(MATRICES):
                call()
            torch.cuda.synchronize(place)
            best = min(best, (time.perf_counter() - start) / MATRICES)
        return best

    with ThreadPoolExecutor(len(WIDTHS) + len(CODED)) as pool:
        uploads = {name: pool.submit(upload, torch.from_numpy(data), uploader) for name, data in _packed(DEVICE_SHAPE)}
        matrices = {name: future.result() for name, future in uploads.items()}
    each = {name: seconds(partial(backend.linear, matrix, x, None)) for name, matrix in matrices.items()}
    return {name: float(np.prod(DEVICE_SHAPE)) / time for name, time in each.items()}, PROBE_BYTES / seconds(words.sum)


def _groupwise(bits: int, shape: tuple[int, int]) -> npt.NDArray[np.uint8]:
    codes = torch.randint(0, 1 << bits, (1, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    scales = np.full((1, shape[0], shape[1] // 64), 2.0**-8, np.float32)
    return _core.encode_groupwise(codes.numpy(), scales, None, bits=bits, group_size=64, ndim=2)


def _coded(bits: int, shape: tuple[int, int]) -> npt.NDArray[np.uint8]:
    # The entropy of Gaussian integers with standard deviation s is log2(s) + 2.05 bits.
    indices = np.rint(np.random.default_rng(bits).normal(scale=2 ** (bits - 2.05), size=(DISTINCT, shape[1])))
    codes = np.tile(_followed(indices.astype(np.int16)), (shape[0] // DISTINCT, 1))[None]
    return _core.encode_coded(codes, np.ones((1, 1), np.float32), ndim=2, symbols="dependent")


def _followed(indices: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    """Return the dependent codes [R, C] of indices (docs/format.md, section 9)."""
    after = np.array([(0, 2), (5, 7), (1, 3), (6, 4), (2, 0), (4, 6), (3, 1), (7, 5)])
    codes, states = np.empty_like(indices), np.zeros((len(indices), 4), np.int64)
    for column, index in enumerate(indices.T):
        state = states[:, column % 4]
        codes[:, column] = (4 * index + 1) * (1 - 2 * (state % 2))
        states[:, column % 4] = after[state, index % 2]
    return codes

"""Measures how fast this machine multiplies by weights of each format, and keeps the results in a file.

Speeds are in weights per second, for one token on all threads and a matrix larger than the last-level cache of a core.
`moepack doctor` measures them, and the plan of `moepack compress` uses them to estimate tokens per second.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from moepack import _core

__all__ = ["kept_speeds", "measure_speeds", "token_seconds"]

SHAPE = (4, 2048, 4096)
"""Experts, rows and columns of the measured tensors: 33 million weights."""

CALLS = 5
"""Calls for each format; the fastest counts."""

WIDTHS = (2, 3, 4, 8)
"""Measured widths of group-wise integers in bits; coded integers are measured at 2 and 4 bits."""


def _file() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "moepack" / "speeds.json"


def _machine() -> str:
    return f"{_core.__version__} {_core.isa()} {_core.threads()} threads"


def kept_speeds() -> dict[str, float] | None:
    """Return the stored speeds in weights per second by format (`int4`, `coded2`, ...); None if not measured."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(_file().read_text())[_machine()]
        return {str(name): float(speed) for name, speed in found.items()}
    return None


def measure_speeds() -> dict[str, float]:
    """Measure all formats in a few seconds, and store the result by version, instruction set and thread count."""
    found = {f"int{bits}": _speed(_groupwise(bits)) for bits in WIDTHS}
    found |= {f"coded{bits}": _speed(_coded(bits)) for bits in (2, 4)}
    known = {}
    with suppress(OSError, ValueError):
        known = json.loads(_file().read_text())
    with suppress(OSError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        _file().write_text(json.dumps({**known, _machine(): found}, indent=1))
    return found


def token_seconds(kind: str, bits: float, weights: float, speeds: Mapping[str, float]) -> float:
    """Estimate the time to multiply by weights of a format, interpolating between the measured widths."""
    widths = sorted(int(name.removeprefix(kind)) for name in speeds if name.startswith(kind))
    inverse = np.interp(bits, widths, [1 / speeds[f"{kind}{width}"] for width in widths])
    return float(weights * inverse)


def _speed(data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> float:
    tensor = _core.PackedTensor(data)
    x = np.ones((1, SHAPE[2]), np.float32)
    call: Callable[[int], object] = lambda expert: tensor.matmul(x, expert=expert)  # noqa: E731
    best = float("inf")
    for _ in range(CALLS):
        start = time.perf_counter()
        for expert in range(SHAPE[0]):
            call(expert)
        best = min(best, time.perf_counter() - start)
    return float(np.prod(SHAPE)) / best


def _groupwise(bits: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    codes = torch.randint(0, 1 << bits, SHAPE, dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    scales = np.full((*SHAPE[:2], SHAPE[2] // 64), 2.0**-8, np.float32)
    return _core.encode_groupwise(codes.numpy(), scales, None, bits=bits, group_size=64, ndim=3)


def _coded(bits: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    # The entropy of Gaussian integers with standard deviation s is log2(s) + 2.05 bits.
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(bits)) * 2 ** (bits - 2.05)
    return _core.encode_coded(values.round().to(torch.int8).numpy(), np.ones((1, 1), np.float32), ndim=3)

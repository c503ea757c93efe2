"""Hardware and software facts for `moepack doctor` and benchmark reports.

This module has no side effects. Facts that cannot be determined are None.
"""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from moepack.backends.compute import compute_mode
from moepack.backends.gpu import free_bytes, require, require_compiler
from moepack.backends.speeds import measure_speeds
from moepack.backends.targets import GPU_SPEEDS, SPEEDS
from moepack.errors import DeviceError
from moepack.system import processors
from moepack.system.memory import huge_pages, total_bytes

__all__ = ["examine"]

PACKAGES = ("torch", "transformers", "numpy", "safetensors", "cupy-cuda13x")


def examine() -> dict[str, Any]:
    """Collect everything that `moepack doctor` shows; takes a few seconds, mostly to measure products."""
    from moepack import _core

    return {
        "versions": {
            "moepack": _core.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
        "processor": {
            "model": processors.model(),
            "cores": processors.usable(),
            "instruction sets found": _core.available_isas(),
            "instruction set used": _core.isa(),
            "threads of packed kernels": _core.threads(),
            "threads of torch": torch.get_num_threads(),
            "compute mode of packed integers": compute_mode(),
            "OpenMP wait policy": os.environ.get("OMP_WAIT_POLICY"),
        },
        "kernels": _core.kernels(),
        SPEEDS: (speeds := measure_speeds()).to_json(),
        GPU_SPEEDS: _gpu_speeds(),
        "memory": {
            "total GB": _total_memory(),
            "read bandwidth GB/s": round(speeds.memory / 1e9, 1),
            "transparent huge pages": huge_pages(),
        },
        "gpu": _gpu(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _total_memory() -> float | None:
    found = total_bytes()
    return None if found is None else round(found / 1e9, 1)


def _gpu_use() -> str:
    """Whether packed weights can run on a GPU, and the reason if not."""
    try:
        device = require(torch.device("cuda"))
        require_compiler()
    except DeviceError as error:
        return f"no: {error.detail}"
    return f'yes, with device="cuda" ({free_bytes(device) / 1e9:.1f} GB free)'


def _gpu_speeds() -> dict[str, Any] | None:
    """The speeds of the GPU, if packed weights can run on it."""
    try:
        require_compiler()
        return measure_speeds("cuda").to_json()
    except DeviceError:
        return None


def _gpu() -> dict[str, Any]:
    found = torch.cuda.is_available()
    return {
        "found": torch.cuda.get_device_name(0) if found else None,
        "cupy": _version("cupy-cuda13x") or _version("cupy-cuda12x") or ("loaded" if "cupy" in sys.modules else None),
        "used": _gpu_use(),
    }

"""Shared libraries whose names differ between systems."""

import ctypes
import sys

__all__ = ["cuda_driver"]

_CUDA = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def cuda_driver() -> ctypes.CDLL:
    """Load the CUDA driver; raises `OSError` if it is not installed."""
    return ctypes.CDLL(_CUDA)

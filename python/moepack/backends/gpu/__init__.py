"""Packed weights on NVIDIA GPUs: kernels from the `cuda` folder, compiled by NVRTC and launched with CuPy."""

from moepack.backends.gpu.backend import GpuBackend, upload
from moepack.backends.gpu.compiler import require_compiler
from moepack.backends.gpu.device import free_bytes, lost, missing_memory, require
from moepack.backends.gpu.upload import Uploader

__all__ = ["GpuBackend", "Uploader", "free_bytes", "lost", "missing_memory", "require", "require_compiler", "upload"]

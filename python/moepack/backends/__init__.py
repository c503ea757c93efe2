"""The backends of packed weights: the CPU, and GPUs. To add one, write a module here and call `register`."""

import torch

from moepack.backends.base import Activation, Backend, Between, Clamped, Matrix, is_silu
from moepack.backends.cpu import CpuBackend
from moepack.backends.gpu import GpuBackend
from moepack.errors import LoadError

__all__ = [
    "Activation", "Backend", "Between", "Clamped", "Matrix", "backend_for", "is_silu", "is_supported", "register",
]  # fmt: skip

_backends: list[Backend] = [CpuBackend(), GpuBackend()]


def register(backend: Backend) -> None:
    """Add a backend. If several support a device, the one added last is used."""
    _backends.insert(0, backend)


def is_supported(device: torch.device) -> bool:
    """Return whether packed weights can be multiplied on a device."""
    return any(backend.supports(device) for backend in _backends)


def backend_for(device: torch.device) -> Backend:
    """Return the backend of a device.

    Raises:
        LoadError: no backend supports it.
    """
    for backend in _backends:
        if backend.supports(device):
            return backend
    raise LoadError(f"packed weights run on the CPU and on CUDA GPUs (a tensor is on '{device}')")

"""Checks whether a GPU can be used or was lost, and how much of its memory is free."""

from functools import cache
from importlib.util import find_spec

import torch

from moepack.backends.gpu.compiler import architecture
from moepack.errors import DeviceError, DeviceMemoryError

__all__ = ["allocate", "free_bytes", "lost", "missing_memory", "require", "supports"]


def require(device: torch.device) -> torch.device:
    """Return a GPU with its index (by default the current one), after checking that kernels can run on it.

    Raises:
        DeviceError: torch has no CUDA support, the GPU does not exist, or it or its driver is too old.
    """
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
    except (RuntimeError, AssertionError) as error:  # AssertionError if torch was built without CUDA
        raise DeviceError(f"no GPU can be used here: {' '.join(str(error).split())}") from error
    if index >= (count := torch.cuda.device_count()):
        raise DeviceError(f"there is no 'cuda:{index}': this machine has {count} GPU" + "s" * (count != 1))
    _require_capability(index)
    return torch.device("cuda", index)


@cache
def _require_capability(index: int) -> None:
    architecture(torch.cuda.get_device_capability(index))


def supports(device: torch.device) -> bool:
    """Return whether the kernels can run on a device: an NVIDIA GPU of capability 8.0 or newer, with CuPy installed."""
    if device.type != "cuda" or find_spec("cupy") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def lost(error: BaseException) -> DeviceError | None:
    """Return an error if a GPU failed or disappeared while in use; None for other causes.

    CUDA reports the failure on the next call, and on every later call of the process.
    """
    kinds = getattr(torch, "AcceleratorError", ())  # a RuntimeError like others before torch 2.8
    if not isinstance(error, kinds) and not (type(error) is RuntimeError and str(error).startswith("CUDA error")):
        return None
    what = str(error).partition("\n")[0]
    return DeviceError(f"a GPU failed during use ({what}); its contents are lost: restart the process")


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a GPU, including unused memory reserved by torch."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def missing_memory(what: str, size: int, free: int, device: torch.device) -> DeviceMemoryError:
    """Return an error for an allocation that does not fit; it contains the missing amount."""
    needed, found, missing = (f"{count / 1e9:.2f} GB" for count in (size, free, size - free))
    return DeviceMemoryError(
        f"{what} takes {needed}, but {found} are free on '{device}': {missing} are missing; "
        'device_map="auto" puts the layers that do not fit on other GPUs and on the CPU'
    )


def allocate(size: int, device: torch.device, what: str) -> torch.Tensor:
    """Allocate flat uint8 memory on a GPU.

    Raises:
        DeviceMemoryError: they do not fit.
    """
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise missing_memory(what, size, min(free_bytes(device), size - 1), device) from error

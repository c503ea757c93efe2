"""Kernels of a CUDA source on the current device: compiled at the first use, loaded once a device, launched on torch's
current stream.

They are launched by the driver's cuLaunchKernelEx, which CuPy does not offer: it lets a kernel begin before the one in
front of it has ended (programmatic dependent launch, CUDA C++ Programming Guide), in graphs too. Such a kernel waits
itself before it touches what others write (`enter_launch` in the sources).
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moepack.errors import DeviceError
from moepack.runtime.backends.gpu.compiler import Cubin, architecture, compile_source

__all__ = ["Program"]

Argument = Tensor | int | float | np.generic | np.ndarray[Any, Any] | None


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("unused", ctypes.c_char * 60))


class _Configuration(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_EARLY = _Attribute(id=6, value=1)
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""

_LEAST_EARLY = (9, 0)
"""The oldest compute capability that has it."""


class Program:
    """A CUDA source with its definitions.

    Args:
        source: its name in the folder `cuda`.
        options: of NVRTC, beside the definitions.
        **definitions: macros, each a number or a word: what one kernel is specialized to.
    """

    def __init__(self, source: str, options: Sequence[str] = (), **definitions: int | str) -> None:
        self.source = source
        self.options = (*options, *(f"-D{name}={value}" for name, value in definitions.items()))
        self._modules: dict[int, Any] = {}
        self._kernels: dict[tuple[int, str], Any] = {}

    def cubin(self, arch: str) -> Cubin:
        """Compile for an architecture; errors as for `compile_source`."""
        return compile_source(self.source, arch, self.options)

    def load(self) -> None:
        """Compile and load for the current device, which launches do where it was not done before.

        Raises:
            DeviceError: the source does not compile, the driver cannot load it, or the stream is being captured.
        """
        device = torch.cuda.current_device()
        if device not in self._modules:
            if torch.cuda.is_current_stream_capturing():
                raise DeviceError(
                    f"{self.source} is not loaded yet: run the model once before a CUDA graph is captured"
                )
            cubin = self.cubin(_architecture(device))
            self._modules[device] = _loaded(cubin)

    def kernel(self, name: str, shared: int = 0) -> Any:
        """Return CuPy's kernel of a name on the current device, allowed to use `shared` bytes of dynamic memory."""
        key = torch.cuda.current_device(), name
        kernel = self._kernels.get(key)
        if kernel is None:
            self.load()
            kernel = self._kernels[key] = self._modules[key[0]].get_function(name)
        if shared > kernel.max_dynamic_shared_size_bytes:
            kernel.max_dynamic_shared_size_bytes = shared
        return kernel

    def launch(
        self,
        name: str,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        arguments: Sequence[Argument],
        shared: int = 0,
        *,
        early: bool = False,
    ) -> None:
        """Launch a kernel on torch's current stream of the current device.

        Args:
            name: of an `extern "C"` kernel.
            grid: blocks.
            block: threads of a block.
            arguments: tensors become pointers, None a null pointer, numbers `int` and `float`; NumPy's scalars and
                structures are passed as they are (`np.uint64(address)` for an address).
            shared: bytes of dynamic shared memory.
            early: whether the kernel may begin before the one in front of it has ended, which it waits for itself.

        Raises:
            DeviceError: the driver refuses the launch.
        """
        kernel = self.kernel(name, shared)
        passed = [_passed(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(passed))(*(value.ctypes.data for value in passed))
        configuration = _Configuration(
            _three(grid), _three(block), shared, torch.cuda.current_stream().cuda_stream, ctypes.pointer(_EARLY),
            int(early and _can_begin_early(torch.cuda.current_device())),
        )  # fmt: skip
        function = ctypes.c_void_p(kernel.kernel.ptr)
        if error := _driver().cuLaunchKernelEx(ctypes.byref(configuration), function, pointers, None):
            raise DeviceError(f"the driver does not launch '{name}' of {self.source}: error {error}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _three(size: int | tuple[int, ...]) -> Any:
    """The three sizes of a grid or a block."""
    sizes = (size,) if isinstance(size, int) else size
    return (ctypes.c_uint * 3)(*sizes, *[1] * (3 - len(sizes)))


def _passed(argument: Argument) -> NDArray[Any]:
    """An argument as the kernel finds it in memory."""
    if isinstance(argument, np.ndarray | np.generic):
        return np.ascontiguousarray(argument)
    if argument is None or isinstance(argument, Tensor):
        return np.array(0 if argument is None else argument.data_ptr(), np.uint64)
    return np.array(argument, np.float32 if isinstance(argument, float) else np.int32)


@cache
def _can_begin_early(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= _LEAST_EARLY


@cache
def _architecture(device: int) -> str:
    return architecture(torch.cuda.get_device_capability(device))


def _loaded(cubin: Cubin) -> Any:
    """CuPy's module of machine code, on the current device."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceError("GPU kernels need CuPy: pip install 'moepack[gpu]'") from error
    try:
        module = cupy.RawModule(path=str(cubin.path))
        module.module  # noqa: B018  loads it
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise DeviceError(f"the driver cannot load the kernels: {reason}", file=cubin.path) from error
    return module

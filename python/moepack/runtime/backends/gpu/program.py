"""Kernels of a CUDA source on the current device: compiled at the first use, loaded once a device, launched on torch's
current stream."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moepack.errors import DeviceError
from moepack.runtime.backends.gpu.compiler import Cubin, architecture, compile_source

__all__ = ["Program"]

Argument = Tensor | int | float | np.generic | np.ndarray[Any, Any] | None


class _Stream(NamedTuple):
    """A stream as CuPy takes it: torch's, which is asked for at each launch."""

    ptr: int


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
    ) -> None:
        """Launch a kernel on torch's current stream of the current device.

        Args:
            name: of an `extern "C"` kernel.
            grid: blocks.
            block: threads of a block.
            arguments: tensors become pointers, None a null pointer, numbers `int` and `float`; NumPy's scalars and
                structures are passed as they are (`np.uint64(address)` for an address).
            shared: bytes of dynamic shared memory.
        """
        kernel = self.kernel(name, shared)
        stream = _Stream(torch.cuda.current_stream().cuda_stream)
        shape = (grid,) if isinstance(grid, int) else grid, (block,) if isinstance(block, int) else block
        kernel.kernel(*shape, tuple(map(_passed, arguments)), shared, stream)


def _passed(argument: Argument) -> Any:
    """An argument as CuPy hands it to the kernel."""
    if isinstance(argument, Tensor):
        return np.uint64(argument.data_ptr())
    if argument is None:
        return np.uint64(0)
    if isinstance(argument, bool | int):
        return np.int32(argument)
    return np.float32(argument) if isinstance(argument, float) else argument


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

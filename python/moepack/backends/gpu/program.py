"""Kernels of a CUDA source on the current device: compiled on first use, loaded once per device, launched on torch's
current stream.

Launches use the driver's cuLaunchKernelEx, which CuPy does not expose. It allows a kernel to start before the previous
one has ended (programmatic dependent launch, CUDA C++ Programming Guide), also in graphs. Such a kernel must wait
itself before it accesses memory that other kernels write (`enter_launch` in the sources).
"""

import ctypes
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moepack.backends.gpu.compiler import Cubin, architecture, compile_source
from moepack.errors import DeviceError
from moepack.system.libraries import cuda_driver

__all__ = ["Argument", "Program", "is_hopper"]

Argument = Tensor | int | float | np.generic | np.ndarray[Any, Any] | None


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_uint * 3),
        ("unused", ctypes.c_char * 52),
    )


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


_CLUSTER, _EARLY = 4, 6
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""

_HOPPER = (9, 0)
"""The oldest compute capability that supports them."""


class Program:
    """A CUDA source with its definitions.

    Args:
        source: its name in the `cuda` folder.
        options: options of NVRTC other than definitions.
        **definitions: macros with numbers or words as values, which specialize the kernels.
    """

    def __init__(self, source: str, options: Sequence[str] = (), **definitions: int | str) -> None:
        self.source = source
        self.options = (*options, *(f"-D{name}={value}" for name, value in definitions.items()))
        self._modules: dict[int, Any] = {}
        self._kernels: dict[tuple[int, str], Any] = {}

    def cubin(self, arch: str) -> Cubin:
        """Compile for an architecture; errors as in `compile_source`."""
        return compile_source(self.source, arch, self.options)

    def load(self) -> None:
        """Compile and load for the current device; the first launch does this if necessary.

        Raises:
            DeviceError: the source does not compile, the driver cannot load it, or the stream is being captured.
        """
        device = torch.cuda.current_device()
        if device not in self._modules:
            if torch.cuda.is_current_stream_capturing():
                raise DeviceError(f"{self.source} is not loaded yet: run the model once before capturing a CUDA graph")
            cubin = self.cubin(_architecture(device))
            self._modules[device] = _loaded(cubin)

    @staticmethod
    def load_all(programs: Iterable["Program"]) -> None:
        """Load several programs; those without cached machine code are compiled at the same time."""
        missing = {program for program in programs if torch.cuda.current_device() not in program._modules}
        if missing and not torch.cuda.is_current_stream_capturing():
            arch = _architecture(torch.cuda.current_device())
            with ThreadPoolExecutor(len(missing)) as pool:
                list(pool.map(lambda program: program.cubin(arch), missing))
        for program in missing:
            program.load()

    def kernel(self, name: str, shared: int = 0) -> Any:
        """Return a CuPy kernel by name on the current device, permitted to use `shared` bytes of dynamic memory."""
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
        cluster: int = 1,
    ) -> None:
        """Launch a kernel on torch's current stream of the current device.

        Args:
            name: the name of an `extern "C"` kernel.
            grid: blocks.
            block: threads per block.
            arguments: tensors become pointers, None a null pointer, numbers `int` and `float`. NumPy scalars and
                structures are passed unchanged (`np.uint64(address)` for an address).
            shared: bytes of dynamic shared memory.
            early: whether the kernel may start before the previous one has ended; it must then wait itself.
            cluster: blocks per cluster, if the device supports clusters; must divide the grid.

        Raises:
            DeviceError: the driver rejects the launch.
        """
        kernel = self.kernel(name, shared)
        passed = [_passed(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(passed))(*map(ctypes.addressof, passed))
        configuration = _configuration(grid, block, shared, early=early, cluster=cluster)
        function = ctypes.c_void_p(kernel.kernel.ptr)
        if error := _driver().cuLaunchKernelEx(ctypes.byref(configuration), function, pointers, None):
            raise DeviceError(f"the driver cannot launch '{name}' of {self.source}: error {error}")

    def clusters(self, name: str, cluster: int, block: int, shared: int) -> int:
        """Return how many clusters of `cluster` blocks the current device can run at once; arguments as in `launch`."""
        kernel, found = self.kernel(name, shared), ctypes.c_int()
        configuration = _configuration(cluster, block, shared, early=False, cluster=cluster)
        function = ctypes.c_void_p(kernel.kernel.ptr)
        if error := _driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), function, ctypes.byref(configuration)):
            raise DeviceError(f"the driver cannot run clusters of '{name}' of {self.source}: error {error}")
        return found.value


@cache
def _driver() -> Any:
    return cuda_driver()


def _configuration(
    grid: int | tuple[int, ...], block: int | tuple[int, ...], shared: int, *, early: bool, cluster: int
) -> _Configuration:
    """Configure a launch on torch's current stream."""
    device = torch.cuda.current_device()
    configuration = _Configuration.from_buffer_copy(_template(grid, block, shared, early, cluster, is_hopper(device)))
    # `torch.cuda.current_stream()` makes an object, which takes longer than the launch.
    configuration.stream = torch._C._cuda_getCurrentRawStream(device)
    return configuration


@lru_cache(maxsize=4096)
def _template(
    grid: int | tuple[int, ...], block: int | tuple[int, ...], shared: int, early: bool, cluster: int, is_new: bool
) -> _Configuration:
    """A configuration without a stream. Launches of a model repeat few of them, and making one takes microseconds."""
    attributes = [_Attribute(_EARLY, value=_three(1))] * early
    attributes += [_Attribute(_CLUSTER, value=_three(cluster))] * (cluster > 1)
    attributes = attributes if is_new else []
    return _Configuration(
        _three(grid), _three(block), shared, None, (_Attribute * len(attributes))(*attributes), len(attributes)
    )


def _three(size: int | tuple[int, ...]) -> Any:
    """The three dimensions of a grid or a block."""
    sizes = (size,) if isinstance(size, int) else size
    return (ctypes.c_uint * 3)(*sizes, *[1] * (3 - len(sizes)))


def _passed(argument: Argument) -> Any:
    """An argument in the memory layout that kernels read, as a ctypes object."""
    if isinstance(argument, Tensor):
        return ctypes.c_uint64(argument.data_ptr())
    if isinstance(argument, np.ndarray | np.generic):
        return (ctypes.c_char * argument.nbytes).from_buffer_copy(argument.tobytes())
    if argument is None:
        return ctypes.c_uint64(0)
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int32(argument)


@cache
def is_hopper(device: int) -> bool:
    """Return whether launches may start early and blocks may form clusters: on Hopper and newer."""
    return torch.cuda.get_device_capability(device) >= _HOPPER


@cache
def _architecture(device: int) -> str:
    return architecture(torch.cuda.get_device_capability(device))


def _loaded(cubin: Cubin) -> Any:
    """Load machine code as a CuPy module on the current device."""
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

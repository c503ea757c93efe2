"""The device interface of tiers: memory, copies that overlap with computation, and matrices over slots.

`Gpu` is the real device. All other code of a tier uses only this interface. A test double that uses host memory can
therefore verify on any machine that the right bytes are in the right slots.
"""

import ctypes
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moepack.backends import Matrix
from moepack.backends.gpu import Uploader, free_bytes, require, upload
from moepack.backends.gpu.backend import has_kernels
from moepack.backends.gpu.channels import KERNELS as CHANNELS
from moepack.backends.gpu.device import allocate
from moepack.backends.gpu.families import kernels_of
from moepack.backends.gpu.matrix import DeviceMatrix, Late
from moepack.errors import DeviceError

__all__ = ["Arrival", "ChannelCounts", "Copy", "Device", "Gpu", "pinned"]

Copy = tuple[Tensor, Tensor]
"""Source in pinned host memory and destination in device memory: flat uint8 of equal length."""

_cuda: Any = torch.cuda  # its classes are untyped


class Arrival(Protocol):
    """Copies in flight."""

    def wait(self) -> None:
        """Make kernels that are launched from now on wait for the bytes."""
        ...

    def finish(self) -> None:
        """Block the host until the copies are done."""
        ...


class ChannelCounts(NamedTuple):
    """Counters for the records of a layer.

    Attributes:
        resident, others: channels computed from device memory, and from host memory.
        record_bytes: bytes per record.
        resident_bytes: bytes of all records on the device.
    """

    resident: int
    others: int
    record_bytes: int
    resident_bytes: int


class Device(ABC):
    """A device whose memory cannot hold the whole model.

    Attributes:
        place: the torch device.
    """

    place: torch.device

    @abstractmethod
    def allocate(self, size: int) -> Tensor:
        """Allocate bytes on the device, flat uint8.

        Raises:
            DeviceMemoryError: they do not fit.
        """

    @abstractmethod
    def pinned(self, size: int) -> Tensor:
        """Allocate host memory from which copies overlap with computation."""

    @abstractmethod
    def matrix(self, data: Tensor, like: Any, count: int) -> Matrix:
        """Create a matrix over a packed tensor on the device.

        Args:
            data: its bytes; the header must be written already.
            like: a packed tensor on the CPU that differs only in the number of experts.
            count: the number of experts in `data`.
        """

    @abstractmethod
    def uploaded(self, data: Tensor, place: dict[str, Any]) -> tuple[Matrix, int]:
        """Copy packed bytes; return the matrix and its size on the device. `place` is for messages."""

    @abstractmethod
    def left_on_the_host(self, matrix: Matrix) -> tuple[Matrix, int]:
        """Move a matrix's bytes to pinned memory that kernels can read; return it and its remaining device bytes."""

    @abstractmethod
    def channels(self, records: Tensor, like: Any, resident: int) -> Matrix:
        """Create a matrix over channel records in pinned memory.

        Args:
            records: a packed tensor.
            like: the same tensor, open on the CPU.
            resident: the number of channels per expert, from the first, to copy to the device.
        """

    @abstractmethod
    def counts(self, records: Matrix) -> ChannelCounts:
        """Counters of a matrix created by `channels`."""

    @abstractmethod
    def numbers(self, values: NDArray[np.int64]) -> Tensor:
        """Copy numbers to the device, ordered before later `bring` calls."""

    @abstractmethod
    def bring(self, copies: Iterable[Copy]) -> Arrival:
        """Start copies that wait for everything this thread has launched so far and for previously started copies."""

    @abstractmethod
    def enter(self) -> None:
        """Order later launches after everything that the previous thread launched until its `leave`."""

    @abstractmethod
    def leave(self) -> None:
        """Declare that this thread launches no more work on slots; waits for copies that were not waited for."""

    @property
    def stalled(self) -> float:
        """Seconds that the device has waited for copies so far."""
        return 0.0

    @abstractmethod
    def overlaps(self, matrices: Sequence[Matrix], layer: Any, index: Tensor) -> bool:
        """Whether a call of a layer can start with the experts that are on the device."""

    @abstractmethod
    def beginning(self, matrices: Sequence[Matrix], there: Tensor, late: Tensor, arrival: Arrival) -> Sequence[Matrix]:
        """Matrices for a call that computes the experts in `there` [T, k] first and waits for those in `late`."""


class _Copies:
    """Copies on the side stream of a GPU."""

    def __init__(self, device: "Gpu", done: Any) -> None:
        self._device, self._done = device, done

    def wait(self) -> None:
        """See `Arrival.wait`."""
        self._device.wait(self._done)

    def finish(self) -> None:
        """See `Arrival.finish`."""
        self._done.synchronize()


class Gpu(Device):
    """A GPU.

    Args:
        device: the GPU.

    Raises:
        DeviceError: the GPU cannot be used.
    """

    def __init__(self, device: torch.device) -> None:
        self.place = require(device)
        self._side = _cuda.Stream(self.place)
        self._uploader: Uploader | None = None
        self._last: tuple[Any, Any] | None = None
        self._coming: Any = None
        self._waits: deque[tuple[Any, Any]] = deque()
        self._stalled = 0.0

    def allocate(self, size: int) -> Tensor:
        """See `Device.allocate`."""
        return allocate(size, self.place, f"the store of experts ({free_bytes(self.place) / 1e9:.2f} GB are free)")

    def pinned(self, size: int) -> Tensor:
        """See `Device.pinned`."""
        return pinned(size)

    def matrix(self, data: Tensor, like: Any, count: int) -> DeviceMatrix:
        """See `Device.matrix`."""
        experts, *shape = like.shape
        sections = {name: (start, size // experts * count) for name, (start, size) in like.sections().items()}
        matrix = DeviceMatrix(data, (count, *shape), like.kind, like.format, like.details(), sections, slots=True)
        with _cuda.device(self.place):
            kernels_of(matrix.kind).prepare(matrix)
        return matrix

    def uploaded(self, data: Tensor, place: dict[str, Any]) -> tuple[DeviceMatrix, int]:
        """See `Device.uploaded`."""
        self._uploader = self._uploader or Uploader(self.place)
        matrix = upload(data, self._uploader, **place)
        return matrix, matrix.nbytes

    def left_on_the_host(self, matrix: Matrix) -> tuple[DeviceMatrix, int]:
        """See `Device.left_on_the_host`."""
        there = cast(DeviceMatrix, matrix)
        here = replace(there, data=_seen_by(self.place, self.pinned(there.data.nbytes).copy_(there.data)))
        return here, here.nbytes - here.data.nbytes

    def channels(self, records: Tensor, like: Any, resident: int) -> DeviceMatrix:
        """See `Device.channels`."""
        matrix = DeviceMatrix(records, like.shape, like.kind, like.format, like.details(), like.sections())
        with _cuda.device(self.place):
            CHANNELS.prepare(matrix)
            CHANNELS.keep(matrix, resident)
        return matrix

    def counts(self, records: Matrix) -> ChannelCounts:
        """See `Device.counts`; synchronizes with the device."""
        tables, size = cast(DeviceMatrix, records).tables, cast(DeviceMatrix, records).sections["records"][1]
        computed, _, resident = tables["computed"].tolist()
        experts, rows, _ = records.shape
        return ChannelCounts(resident, computed - resident, size // max(experts * rows, 1), tables["resident"].nbytes)

    def numbers(self, values: NDArray[np.int64]) -> Tensor:
        """See `Device.numbers`; uses pinned memory, which torch keeps until the copy is done."""
        return torch.from_numpy(values).pin_memory().to(self.place, non_blocking=True)

    def bring(self, copies: Iterable[Copy]) -> Arrival:
        """See `Device.bring`."""
        self._side.wait_stream(_cuda.current_stream(self.place))
        done = _cuda.Event()
        with _cuda.stream(self._side):
            for source, target in copies:
                target.copy_(source, non_blocking=True)
            done.record(self._side)
        self._coming = done
        return _Copies(self, done)

    def wait(self, done: Any) -> None:
        """Make the current stream wait for an event, and record the duration."""
        stream, begin, end = _cuda.current_stream(self.place), *(_cuda.Event(enable_timing=True) for _ in "12")
        begin.record(stream)
        stream.wait_event(done)
        end.record(stream)
        self._waits.append((begin, end))
        if done is self._coming:
            self._coming = None

    def enter(self) -> None:
        """See `Device.enter`."""
        stream = _cuda.current_stream(self.place)
        if self._last is not None and self._last[0] != stream:
            stream.wait_event(self._last[1])

    def leave(self) -> None:
        """See `Device.leave`."""
        stream = _cuda.current_stream(self.place)
        if self._coming is not None:
            self.wait(self._coming)
        self._last = stream, stream.record_event()

    @property
    def stalled(self) -> float:
        """See `Device.stalled`; unfinished waits are not included."""
        while self._waits and self._waits[0][1].query():
            begin, end = self._waits.popleft()
            self._stalled += begin.elapsed_time(end) / 1e3
        return self._stalled

    def overlaps(self, matrices: Sequence[Matrix], layer: Any, index: Tensor) -> bool:
        """See `Device.overlaps`: true if kernels support the call with two launches of gate and up projections."""
        projections = cast(Sequence[DeviceMatrix], matrices)
        return layer.can_overlap and has_kernels(projections, index, layer.act_fn)

    def beginning(self, matrices: Sequence[Matrix], there: Tensor, late: Tensor, arrival: Arrival) -> Sequence[Matrix]:
        """See `Device.beginning`."""
        first, *others = matrices
        assert isinstance(first, DeviceMatrix)
        return [replace(first, late=Late(there, late, arrival.wait)), *others]


def pinned(size: int) -> Tensor:
    """Allocate flat uint8 host memory that GPUs copy from and read directly.

    torch rounds its pinned allocations up to a power of two. Pages that are registered with the driver after allocation
    are copied at half the rate of memory that the driver allocates (26 and 53 GB/s on an H100), while the host waits.

    Raises:
        DeviceError: the driver cannot pin that much memory, or CuPy is missing.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    try:
        from cupy.cuda import runtime

        address = runtime.hostAlloc(size, _FOR_ALL)
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DeviceError(f"{size / 1e9:.2f} GB of memory cannot be pinned: {reason}") from error
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, runtime.freeHost, address).atexit = False  # the driver may be unloaded by then
    return torch.frombuffer(memory, dtype=torch.uint8)


_FOR_ALL = 3
"""cudaHostAllocPortable and cudaHostAllocMapped: all GPUs can copy from and read the memory."""


class _Seen:
    """Exposes pinned memory through CUDA's array interface."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": tuple(memory.shape), "typestr": "|u1", "data": (memory.data_ptr(), False), "version": 3
        }  # fmt: skip


def _seen_by(device: torch.device, memory: Tensor) -> Tensor:
    """View pinned memory as a tensor of a GPU, whose kernels read it over the bus."""
    return torch.as_tensor(_Seen(memory), device=device)

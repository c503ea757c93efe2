"""What a tier asks of a device: memory, copies beside the computation, and matrices over slots.

`Gpu` is the real one. Everything else of a tier knows this interface alone, so that a stand-in whose memory is the
host's shows on any machine that the right bytes are in the right slots.
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

from moepack.errors import DeviceError
from moepack.runtime.backends import Matrix
from moepack.runtime.backends.gpu import Uploader, free_bytes, require, upload
from moepack.runtime.backends.gpu.backend import has_kernels
from moepack.runtime.backends.gpu.channels import KERNELS as CHANNELS
from moepack.runtime.backends.gpu.device import allocate
from moepack.runtime.backends.gpu.families import kernels_of
from moepack.runtime.backends.gpu.matrix import DeviceMatrix, Late
from moepack.runtime.experts import PackedExperts

__all__ = ["Arrival", "ChannelCounts", "Copy", "Device", "Gpu", "pinned"]

Copy = tuple[Tensor, Tensor]
"""From pinned memory of the host to memory of the device: flat uint8 of one length."""

_cuda: Any = torch.cuda  # whose classes have no types


class Arrival(Protocol):
    """Copies that are under way."""

    def wait(self) -> None:
        """Let what is launched from here on see their bytes."""
        ...

    def finish(self) -> None:
        """Wait on the host until they are done."""
        ...


class ChannelCounts(NamedTuple):
    """What happened to the records of a layer so far.

    Attributes:
        resident, others: channels that were computed from the device's memory, and from the host's.
        record_bytes: of a record.
        resident_bytes: of all records on the device.
    """

    resident: int
    others: int
    record_bytes: int
    resident_bytes: int


class Device(ABC):
    """A device with too little memory.

    Attributes:
        place: its name for torch.
    """

    place: torch.device

    @abstractmethod
    def allocate(self, size: int) -> Tensor:
        """New bytes on the device, flat uint8.

        Raises:
            DeviceMemoryError: they do not fit.
        """

    @abstractmethod
    def pinned(self, size: int) -> Tensor:
        """New bytes on the host from which copies run beside the computation."""

    @abstractmethod
    def matrix(self, data: Tensor, like: Any, count: int) -> Matrix:
        """The matrix over a packed tensor on the device.

        Args:
            data: its bytes, of which the header is there.
            like: a packed tensor on the CPU that differs in the number of its experts alone.
            count: experts of `data`.
        """

    @abstractmethod
    def uploaded(self, data: Tensor, place: dict[str, Any]) -> tuple[Matrix, int]:
        """The matrix over a copy of packed bytes, and what it takes on the device; `place` is for messages."""

    @abstractmethod
    def left_on_the_host(self, matrix: Matrix) -> tuple[Matrix, int]:
        """A matrix whose bytes go to pinned memory, where kernels read them, and what it takes on the device then."""

    @abstractmethod
    def channels(self, records: Tensor, like: Any, resident: int) -> Matrix:
        """The matrix over records of channels in pinned memory.

        Args:
            records: a packed tensor.
            like: the same tensor, open on the CPU.
            resident: the first channels of each expert that the device has itself.
        """

    @abstractmethod
    def counts(self, records: Matrix) -> ChannelCounts:
        """What was computed of a matrix that `channels` gave."""

    @abstractmethod
    def numbers(self, values: NDArray[np.int64]) -> Tensor:
        """Numbers on the device, ahead of what is brought from here on."""

    @abstractmethod
    def bring(self, copies: Iterable[Copy]) -> Arrival:
        """Start copies, behind everything that this thread has launched so far, and behind those that were started."""

    @abstractmethod
    def enter(self) -> None:
        """Let what is launched from here on come behind what the thread before has launched until `leave`."""

    @abstractmethod
    def leave(self) -> None:
        """Say that this thread launches nothing more that uses slots; waits for copies that nobody has waited for."""

    @property
    def stalled(self) -> float:
        """Seconds that the device has waited for copies so far."""
        return 0.0

    @abstractmethod
    def overlaps(self, matrices: Sequence[Matrix], layer: Any, index: Tensor) -> bool:
        """Whether a call of a layer can begin with the experts that are there."""

    @abstractmethod
    def beginning(self, matrices: Sequence[Matrix], there: Tensor, late: Tensor, arrival: Arrival) -> Sequence[Matrix]:
        """Matrices of a call that computes the experts in `there` [T, k], and waits itself for those in `late`."""


class _Copies:
    """Copies of the side stream of a GPU."""

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
        device: which.

    Raises:
        DeviceError: it cannot be used.
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
        """See `Device.counts`; waits for the device."""
        tables, size = cast(DeviceMatrix, records).tables, cast(DeviceMatrix, records).sections["records"][1]
        computed, _, resident = tables["computed"].tolist()
        experts, rows, _ = records.shape
        return ChannelCounts(resident, computed - resident, size // max(experts * rows, 1), tables["resident"].nbytes)

    def numbers(self, values: NDArray[np.int64]) -> Tensor:
        """See `Device.numbers`; through pinned memory, which torch keeps until it is copied."""
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
        """Let the current stream wait for an event, and note for how long."""
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
        """See `Device.stalled`; waits that have not ended are not among them."""
        while self._waits and self._waits[0][1].query():
            begin, end = self._waits.popleft()
            self._stalled += begin.elapsed_time(end) / 1e3
        return self._stalled

    def overlaps(self, matrices: Sequence[Matrix], layer: Any, index: Tensor) -> bool:
        """See `Device.overlaps`: where kernels take the call, in two launches of gate and up projections."""
        projections = cast(Sequence[DeviceMatrix], matrices)
        return isinstance(layer, PackedExperts) and has_kernels(projections, index, layer.act_fn)

    def beginning(self, matrices: Sequence[Matrix], there: Tensor, late: Tensor, arrival: Arrival) -> Sequence[Matrix]:
        """See `Device.beginning`."""
        first, *others = matrices
        assert isinstance(first, DeviceMatrix)
        return [replace(first, late=Late(there, late, arrival.wait)), *others]


def pinned(size: int) -> Tensor:
    """New bytes of the host, flat uint8, that GPUs copy and read themselves.

    torch rounds its own pinned memory up to a power of two; and pages that are registered with the driver later are
    copied at half the rate of what the driver allocates (26 and 53 GB/s on an H100), while the host waits.

    Raises:
        DeviceError: the driver does not pin so much, or CuPy is missing.
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
    weakref.finalize(memory, runtime.freeHost, address).atexit = False  # the driver may be gone by then
    return torch.frombuffer(memory, dtype=torch.uint8)


_FOR_ALL = 3
"""cudaHostAllocPortable and cudaHostAllocMapped: all GPUs copy and read it."""


class _Seen:
    """Pinned memory as CUDA's array interface describes memory."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": tuple(memory.shape), "typestr": "|u1", "data": (memory.data_ptr(), False), "version": 3
        }  # fmt: skip


def _seen_by(device: torch.device, memory: Tensor) -> Tensor:
    """Pinned memory as a GPU's tensor: kernels read it across the bus."""
    return torch.as_tensor(_Seen(memory), device=device)

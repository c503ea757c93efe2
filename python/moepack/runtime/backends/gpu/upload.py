"""Bytes from mapped files to a GPU, through pinned buffers that a few threads fill in turn.

Reading a mapped file costs page faults, which one thread serves at 2 to 3 GB/s; a copy from pinned memory runs at the
speed of the bus. With several threads, each with a buffer and a stream of its own, reading and copying overlap.
"""

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

__all__ = ["Uploader", "pieces"]

PIECE = 16 << 20
"""Bytes of a buffer: far more than what hides the start of a copy, and little memory."""

THREADS = 4

_cuda: Any = torch.cuda  # whose classes have no types


class _Slot:
    """A pinned buffer with the stream that empties it."""

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        self.stream: torch.cuda.Stream = _cuda.Stream(device)
        self.empty: torch.cuda.Event = _cuda.Event()

    @torch.inference_mode()  # of this thread: the buffers may have been made in it
    def copy(self, source: Tensor, target: Tensor) -> None:
        """Start to copy at most `PIECE` bytes; returns when the source has been read."""
        self.empty.synchronize()
        filled = self.buffer[: len(source)].copy_(source)
        with torch.cuda.stream(self.stream):
            target.copy_(filled, non_blocking=True)
            self.empty.record(self.stream)


class Uploader:
    """Copies bytes to one GPU.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slots = [_Slot(device) for _ in range(THREADS)]
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        for slot in self._slots:
            self._free.put(slot)
        self._pool = ThreadPoolExecutor(THREADS, "moepack-upload")

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy flat uint8 from the CPU to the GPU; what is launched on the current stream afterwards sees the bytes."""
        current = torch.cuda.current_stream(self.device)
        for slot in self._slots:
            slot.stream.wait_stream(current)  # the memory of the target may still be in use there
        places = pieces(len(source))
        list(self._pool.map(lambda place: self._copy(source[place], target[place]), places))
        for slot in self._slots:
            current.wait_stream(slot.stream)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        slot = self._free.get()
        try:
            slot.copy(source, target)
        finally:
            self._free.put(slot)


def pieces(size: int) -> list[slice]:
    """Cut so many bytes into pieces that fit a buffer."""
    return [slice(start, min(start + PIECE, size)) for start in range(0, size, PIECE)]

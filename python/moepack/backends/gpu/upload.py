"""Copies bytes from mapped files to a GPU, through pinned buffers that a few threads fill in turn.

Reading a mapped file causes page faults, which a single thread serves at 2 to 3 GB/s. A copy from pinned memory runs at
the speed of the bus. Several threads, each with its own buffer and stream, overlap reading and copying.
"""

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

__all__ = ["Uploader", "pieces"]

PIECE = 16 << 20
"""Bytes per buffer: far more than needed to hide the start of a copy, but little memory."""

THREADS = 4

_cuda: Any = torch.cuda  # its classes are untyped


class _Slot:
    """A pinned buffer, and the stream that copies from it."""

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        self.stream: torch.cuda.Stream = _cuda.Stream(device)
        self.empty: torch.cuda.Event = _cuda.Event()

    @torch.inference_mode()  # thread-local: the buffers may be inference tensors
    def copy(self, source: Tensor, target: Tensor) -> None:
        """Start to copy at most `PIECE` bytes; returns once the source has been read."""
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
        """Copy flat uint8 from the CPU to the GPU; later launches on the current stream see the bytes."""
        current = torch.cuda.current_stream(self.device)
        for slot in self._slots:
            slot.stream.wait_stream(current)  # the target's memory may still be in use on that stream
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
    """Split a size in bytes into slices that fit into a buffer."""
    return [slice(start, min(start + PIECE, size)) for start in range(0, size, PIECE)]

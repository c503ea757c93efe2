"""Device memory for experts of one layout: a packed tensor for each projection, with experts as slots.

This requires a format that stores experts as byte ranges of equal length and nothing else. A slot contains the bytes of
an expert, and the tensor over all slots is identical to one written by `compress`, so every kernel can read it.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moepack.arrays import as_bytes
from moepack.stores.base import Matrices
from moepack.stores.tiers.accelerator import Copy, Device
from moepack.stores.tiers.slots import Slots

__all__ = ["Arena", "Budget", "Stack", "arena_bytes", "is_slotted"]

HEADER = 128
"""Bytes before the first expert; bytes 16 to 23 are the number of experts (docs/format.md)."""

_EXPERTS = slice(16, 24)


class Budget(NamedTuple):
    """The memory of a device.

    Attributes:
        memory: the most bytes for weights.
        always: bytes that every token needs, included in `memory`.
    """

    memory: int
    always: int


class Stack(NamedTuple):
    """A projection of a layer on the host.

    Attributes:
        data: its packed bytes, flat uint8.
        matrix: the open tensor over them.
    """

    data: Tensor
    matrix: Any

    @property
    def experts(self) -> int:
        """The number of experts."""
        return int(self.matrix.shape[0])

    @property
    def expert_bytes(self) -> int:
        """Bytes per expert."""
        ((_, size),) = self.matrix.sections().values()
        return int(size) // max(self.experts, 1)

    @property
    def form(self) -> Hashable:
        """A key that is equal for layers whose experts fit into the same slots."""
        header = self.data[:HEADER].numpy().copy()
        header[_EXPERTS] = 0
        return header.tobytes()

    def payloads(self) -> Tensor:
        """The bytes of each expert, [E, bytes]."""
        return self.data[HEADER : HEADER + self.experts * self.expert_bytes].view(self.experts, self.expert_bytes)


class Arena:
    """Slots for experts of one layout.

    Args:
        device: the device.
        stacks: the projections of a layer with this layout.
        count: the number of slots.

    Raises:
        DeviceMemoryError: the slots do not fit.

    Attributes:
        slots: bookkeeping of the slots.
        matrices: the matrices of all projections; their experts are slots.
        sizes: bytes of an expert in each projection.
        expert_bytes: bytes of an expert in all projections.
    """

    def __init__(self, device: Device, stacks: Sequence[Stack], count: int) -> None:
        self.slots, self.sizes = Slots(count), [stack.expert_bytes for stack in stacks]
        self.expert_bytes = sum(self.sizes)
        lengths = [arena_bytes(size, count) for size in self.sizes]
        self._memory = device.allocate(sum(lengths))
        tensors = torch.split(self._memory, lengths)
        for tensor, stack in zip(tensors, stacks, strict=True):
            tensor[:HEADER].copy_(_header(stack, count))
        self._slots = [
            tensor[HEADER : HEADER + count * size].view(count, size)
            for tensor, size in zip(tensors, self.sizes, strict=True)
        ]
        pairs = zip(tensors, stacks, strict=True)
        self.matrices: Matrices = tuple(device.matrix(data, stack.matrix, count) for data, stack in pairs)

    def copies(self, slot: int, sources: Sequence[Tensor]) -> list[Copy]:
        """Return the copies that load an expert into a slot, given its bytes in pinned memory for each projection."""
        return [(source, slots[slot]) for source, slots in zip(sources, self._slots, strict=True)]


def is_slotted(kind: str) -> bool:
    """Whether experts of a format fit into slots."""
    return kind in ("groupwise", "codebook")


def arena_bytes(expert_bytes: int, count: int) -> int:
    """Return the size of a packed tensor with `count` experts."""
    return -(-(HEADER + count * expert_bytes) // 64) * 64


def _header(stack: Stack, count: int) -> Tensor:
    header = stack.data[:HEADER].numpy().copy()
    header[_EXPERTS] = np.array([count], np.uint64).view(np.uint8)
    return as_bytes(header)

"""Room on a device for experts of one form: a packed tensor for each projection, whose experts are slots.

Formats whose experts are runs of bytes of one length, and nothing beside them, fit: a slot's bytes are an expert's, and
the tensor over all slots is as good as one that `compress` wrote, so every kernel reads it as it is.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moepack.arrays import as_bytes
from moepack.runtime.store import Matrices
from moepack.runtime.tiers.device import Copy, Device
from moepack.runtime.tiers.slots import Slots

__all__ = ["Arena", "Budget", "Stack", "arena_bytes", "is_slotted"]

HEADER = 128
"""Bytes before the first expert, in which bytes 16 to 23 are the number of experts (docs/format.md)."""

_EXPERTS = slice(16, 24)


class Budget(NamedTuple):
    """Memory of a device.

    Attributes:
        memory: the most bytes that weights may take.
        always: those of them that every token needs.
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
        """How many there are."""
        return int(self.matrix.shape[0])

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert."""
        ((_, size),) = self.matrix.sections().values()
        return int(size) // max(self.experts, 1)

    @property
    def form(self) -> Hashable:
        """What is equal where experts fit the same slots."""
        header = self.data[:HEADER].numpy().copy()
        header[_EXPERTS] = 0
        return header.tobytes()

    def payloads(self) -> Tensor:
        """The bytes of each expert, [E, bytes]."""
        return self.data[HEADER : HEADER + self.experts * self.expert_bytes].view(self.experts, self.expert_bytes)


class Arena:
    """Slots for experts of one form.

    Args:
        device: where.
        stacks: the projections of a layer of this form.
        count: how many slots.

    Raises:
        DeviceMemoryError: they do not fit.

    Attributes:
        slots: the accounting.
        matrices: of all projections, experts being slots.
        sizes: bytes of an expert in each projection.
        expert_bytes: of an expert, all projections.
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
        """The copies that bring an expert, given in pinned memory projection by projection, to a slot."""
        return [(source, slots[slot]) for source, slots in zip(sources, self._slots, strict=True)]


def is_slotted(kind: str) -> bool:
    """Whether experts of a format fit slots."""
    return kind in ("groupwise", "codebook")


def arena_bytes(expert_bytes: int, count: int) -> int:
    """Bytes of a packed tensor of so many experts."""
    return -(-(HEADER + count * expert_bytes) // 64) * 64


def _header(stack: Stack, count: int) -> Tensor:
    header = stack.data[:HEADER].numpy().copy()
    header[_EXPERTS] = np.array([count], np.uint64).view(np.uint8)
    return as_bytes(header)

"""The experts on the host: all in pinned memory, or on the drive with some of them in memory.

Both provide an expert's bytes in pinned memory. Experts on the drive are read by `moepack.stores.streaming`, and
copied to the device through pinned buffers that are used in turn.
"""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moepack.errors import LoadError
from moepack.memory import available_bytes
from moepack.stores.base import Portions
from moepack.stores.mapped import matrix_over
from moepack.stores.streaming.experts import READERS, StreamingStore, cut_portions
from moepack.stores.streaming.region import Region
from moepack.stores.streaming.residency import Residency, Statistics
from moepack.stores.tiers.accelerator import Arrival
from moepack.stores.tiers.arena import HEADER, Stack
from moepack.units import size

__all__ = ["Drive", "Host", "Pin", "Pinned", "Send"]

BUFFERS = 4
"""The number of experts that can be in transfer from the drive to the device."""

Pin = Callable[[int], Tensor]
"""Allocates the given number of bytes of pinned memory."""

Send = Callable[[int, Sequence[Tensor]], Arrival]
"""Starts to copy an expert, given its index and its bytes for each projection."""


class Host(Protocol):
    """The experts on the host."""

    @property
    def statistics(self) -> Statistics | None:
        """Counters of reads from the drive; None without a drive."""
        ...

    def send(self, layer: Any, experts: Sequence[int], to: Send) -> None:
        """Pass the bytes of experts in pinned memory to `to`, one expert after another.

        Raises:
            CorruptionError, LoadError: an expert cannot be read.
        """
        ...

    def portions(self, layer: Any, experts: Tensor, device: torch.device) -> Portions:
        """Yield experts for the CPU; see `ExpertStore.portions`."""
        ...


class Pinned:
    """All experts in pinned memory.

    Args:
        stacks: the projections of each layer.
        pin: allocates pinned memory.

    Raises:
        LoadError: the experts do not fit into memory.
    """

    statistics = None

    def __init__(self, stacks: dict[Any, list[Stack]], pin: Pin) -> None:
        needed = sum(stack.data.numel() for own in stacks.values() for stack in own)
        available = available_bytes()
        if available is not None and needed > available:
            raise LoadError(
                f"the experts take {size(needed)} of host memory, but only {size(available)} are available: "
                "host_memory= keeps some of them in memory and the others on the drive"
            )
        self._layers: WeakKeyDictionary[Any, list[Stack]] = WeakKeyDictionary()
        for layer, own in stacks.items():
            self._layers[layer] = [_copied(stack, pin) for stack in own]

    def send(self, layer: Any, experts: Sequence[int], to: Send) -> None:
        """See `Host.send`."""
        payloads = [stack.payloads() for stack in self._layers[layer]]
        for expert in experts:
            to(expert, [of_projection[expert] for of_projection in payloads])

    def portions(self, layer: Any, experts: Tensor, device: torch.device) -> Portions:
        """See `Host.portions`."""
        yield tuple(stack.matrix for stack in self._layers[layer]), experts


def _copied(stack: Stack, pin: Pin) -> Stack:
    data = pin(stack.data.numel()).copy_(stack.data)
    return Stack(data, matrix_over(data))


class Drive(StreamingStore):
    """Experts on the drive, with some of them in memory.

    Args:
        memory: the most bytes for experts, including pinned buffers.
        stacks: the projections of each layer.
        pin: allocates pinned memory.

    Raises:
        LoadError: the buffers and one expert do not fit into the memory, or a projection is not in a file.
    """

    def __init__(self, memory: int, stacks: dict[Any, list[Stack]], pin: Pin) -> None:
        super().__init__(memory)
        self._lengths = {layer: [stack.expert_bytes for stack in own] for layer, own in stacks.items()}
        shared = sum(self._take_layer(layer) for layer in stacks)
        largest = max(map(sum, self._lengths.values()))
        least = shared + BUFFERS * largest + max(own[0].nbytes for _, own in self._layers.values())
        if memory < least:
            raise LoadError(f"{size(memory)} of host memory is too little for experts: {size(least)} are needed")
        self._residency = Residency(memory - shared - BUFFERS * largest, READERS)
        self._buffers = cycle([_Buffer(pin(largest)) for _ in range(BUFFERS)])

    def send(self, layer: Any, experts: Sequence[int], to: Send) -> None:
        """See `Host.send`; reads as many experts together as fit."""
        own = self._layers[layer][1]
        for part in cut_portions(own, experts, self._residency.budget):
            held = [own[number] for number in part]
            self._residency.hold(held)
            try:
                for expert in held:
                    buffer = next(self._buffers)
                    sources = buffer.filled(expert.regions, expert.number, self._lengths[layer])
                    buffer.leaving = to(expert.number, sources)
            finally:
                self._residency.release(held)


class _Buffer:
    """Pinned memory for one expert.

    Attributes:
        leaving: the copy of its contents to the device.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.leaving: Arrival | None = None

    def filled(self, regions: Sequence[Region], expert: int, lengths: Sequence[int]) -> Sequence[Tensor]:
        """Fill the buffer with the expert's bytes; return them for each projection."""
        if self.leaving is not None:
            self.leaving.finish()
        parts = torch.split(self._memory[: sum(lengths)], list(lengths))
        for part, region, length in zip(parts, regions, lengths, strict=True):
            part.copy_(region.data[HEADER + expert * length :][:length])
        return parts

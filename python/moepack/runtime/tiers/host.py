"""Where the experts of a device are on the host: all in pinned memory, or on the drive with some of them in memory.

Either gives an expert's bytes in pinned memory. From the drive they come by `moepack.runtime.streaming`, and through
pinned buffers that copies to the device empty in turn.
"""

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moepack.errors import LoadError
from moepack.memory import available_bytes
from moepack.runtime.store import Portions, matrix_over
from moepack.runtime.streaming.region import Region
from moepack.runtime.streaming.residency import Residency, Statistics
from moepack.runtime.streaming.store import READERS, StreamingStore, cut_portions
from moepack.runtime.tiers.arena import HEADER, Stack
from moepack.runtime.tiers.device import Arrival
from moepack.units import size

__all__ = ["Drive", "Host", "Pin", "Pinned", "Send"]

BUFFERS = 4
"""Experts on their way from the drive to the device."""

Pin = Callable[[int], Tensor]
"""Makes pinned memory of so many bytes."""

Send = Callable[[int, Sequence[Tensor]], Arrival]
"""Starts to copy an expert of a number, whose bytes are given projection by projection."""


class Host(Protocol):
    """Experts on the host."""

    @property
    def statistics(self) -> Statistics | None:
        """What reading from the drive did so far; None without a drive."""
        ...

    def send(self, layer: Any, experts: Sequence[int], to: Send) -> None:
        """Give the bytes of experts in pinned memory, one after the other.

        Raises:
            CorruptionError, LoadError: they cannot be read.
        """
        ...

    def portions(self, layer: Any, experts: Tensor, device: torch.device) -> Portions:
        """Give experts to the CPU; see `ExpertStore.portions`."""
        ...


class Pinned:
    """All experts in pinned memory.

    Args:
        stacks: the projections of each layer.
        pin: makes the memory.

    Raises:
        LoadError: there is too little memory.
    """

    statistics = None

    def __init__(self, stacks: dict[Any, list[Stack]], pin: Pin) -> None:
        needed = sum(stack.data.numel() for own in stacks.values() for stack in own)
        available = available_bytes()
        if available is not None and needed > available:
            raise LoadError(
                f"the experts take {size(needed)} of the host's memory and {size(available)} are available: "
                "host_memory= keeps some of them there and the others on the drive"
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
    """Experts on the drive, of which some are in memory.

    Args:
        memory: the most bytes that they take there, pinned buffers included.
        stacks: the projections of each layer.
        pin: makes pinned memory.

    Raises:
        LoadError: the memory does not take the buffers and an expert, or a projection does not lie in a file.
    """

    def __init__(self, memory: int, stacks: dict[Any, list[Stack]], pin: Pin) -> None:
        super().__init__(memory)
        self._lengths = {layer: [stack.expert_bytes for stack in own] for layer, own in stacks.items()}
        shared = sum(self._take_layer(layer) for layer in stacks)
        largest = max(map(sum, self._lengths.values()))
        least = shared + BUFFERS * largest + max(own[0].nbytes for _, own in self._layers.values())
        if memory < least:
            raise LoadError(f"{size(memory)} of the host's memory are too little for experts: {size(least)} are needed")
        self._residency = Residency(memory - shared - BUFFERS * largest, READERS)
        self._buffers = cycle([_Buffer(pin(largest)) for _ in range(BUFFERS)])

    def send(self, layer: Any, experts: Sequence[int], to: Send) -> None:
        """See `Host.send`; experts are read together, as many as fit."""
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
    """Pinned memory for an expert.

    Attributes:
        leaving: the copy of what it holds.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.leaving: Arrival | None = None

    def filled(self, regions: Sequence[Region], expert: int, lengths: Sequence[int]) -> Sequence[Tensor]:
        """The expert's bytes, projection by projection."""
        if self.leaving is not None:
            self.leaving.finish()
        parts = torch.split(self._memory[: sum(lengths)], list(lengths))
        for part, region, length in zip(parts, regions, lengths, strict=True):
            part.copy_(region.data[HEADER + expert * length :][:length])
        return parts

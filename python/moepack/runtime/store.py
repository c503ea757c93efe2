"""Where packed bytes are, and how they come to the device that multiplies by them.

Modules with packed weights ask their store for the matrices of a call, and know neither files nor caches. Bytes may lie
in mapped files (`MappedStore`), in memory of the process's own (`moepack.runtime.resident`), or come in parts to where
they are needed; the modules compute the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from os import PathLike
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from moepack.arrays import AnyTensor, as_bytes
from moepack.errors import LoadError
from moepack.runtime.backends import Matrix, backend_for

__all__ = [
    "Call", "ExpertStore", "Layer", "MappedStore", "Matrices", "Multiply", "Portion", "Portions", "Shape",
    "matrix_over", "sum_portions",
]  # fmt: skip

Shape = tuple[int, int, int]
"""Experts, rows and columns; a linear layer has one expert."""

Matrices = tuple[Matrix, ...]
"""All projections of a layer."""

Portion = tuple[Matrices, Tensor]
"""The projections of a layer, and the experts of a call whose bytes are there; another number stands for others."""

Portions = Generator[Portion, None, None]
"""Portions in turn; bytes of one are there until the next one is asked for, or the generator is closed."""


class Call(NamedTuple):
    """What a layer of experts is called with, on one device.

    Attributes:
        x: [T, H], activations.
        experts: [T, k] int64, those that are chosen; a number that is no expert's is skipped.
        weights: [T, k], what the experts' outputs are multiplied by.
    """

    x: Tensor
    experts: Tensor
    weights: Tensor


Multiply = Callable[[Matrices, Call], Tensor]
"""Gives the outputs [T, H] of a call, on its device."""


_open: WeakValueDictionary[tuple[torch.device, int], Matrix] = WeakValueDictionary()
"""The matrices that somebody holds, by where their bytes are; a matrix keeps its bytes, so no address is used twice."""


def sum_portions(portions: Portions, call: Call, multiply: Multiply) -> Tensor:
    """Add up the outputs of a call, portion by portion."""
    outputs: Tensor | None = None
    with closing(portions):  # at once, and in this thread, where `multiply` raises
        for matrices, chosen in portions:
            portion = multiply(matrices, call._replace(experts=chosen))
            outputs = portion if outputs is None else outputs.add_(portion)
    assert outputs is not None
    return outputs


def matrix_over(data: Tensor, **place: Any) -> Matrix:
    """Return the matrix that is open over packed bytes, or open one.

    Args:
        data: flat uint8 on a device of a backend.
        **place: `file` and `tensor`, for messages.

    Raises:
        CorruptionError: the bytes contradict their format.
        LoadError: their format is unknown, or no backend takes their device.
    """
    return _open.get((data.device, data.data_ptr())) or _opened(data, **place)


def _opened(data: Tensor, **place: Any) -> Matrix:
    """A new matrix, from here on the one over its bytes."""
    matrix = backend_for(data.device).open(data, **place)
    _open[data.device, data.data_ptr()] = matrix
    return matrix


class Layer(Protocol):
    """A module with packed weights, as stores see it (`moepack.runtime.packed.PackedModule`).

    Attributes:
        shapes: of the projections, in the order of the computation.
        places: file and tensor of the projections' bytes, as far as they are known, for messages.
        readers: opened matrices by projection, each with the address of its bytes; the store's own notes.
    """

    shapes: dict[str, Shape]
    places: dict[str, dict[str, Any]]
    readers: dict[str, tuple[int, Matrix]]
    _buffers: Any

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Let the module have a buffer."""
        ...


class ExpertStore(ABC):
    """Keeps the packed bytes of layers.

    Attributes:
        by_channels: whether records of channels are there only while `channels` says so.
        asks_host: whether `portions` and `summed` wait for the device to learn which experts were chosen.
    """

    by_channels = False
    asks_host = False

    @property
    def statistics(self) -> Any:
        """What bringing experts did so far (`moepack.runtime.streaming.Statistics`); None where all are there."""
        return None

    @abstractmethod
    def put(
        self,
        layer: Layer,
        projection: str,
        data: AnyTensor,
        *,
        file: str | PathLike[str] | None = None,
        tensor: str | None = None,
    ) -> None:
        """Take the bytes of a projection.

        Args:
            layer: whose projection it is.
            projection: one of the layer's.
            data: flat uint8, maybe a read-only file map, which must stay unchanged from here on.
            file: where they lie, for messages.
            tensor: their name, for messages.

        Raises:
            CorruptionError: the bytes contradict their format.
            LoadError: their format is unknown, no backend takes their device, or their shape is not the layer's.
        """

    @abstractmethod
    def fetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> Matrices:
        """Return the matrices of all projections, the bytes of some experts on a device.

        Args:
            layer: whose projections.
            experts: numbers of the experts that will be used, in any shape and order, more than once or beyond the
                last; None for all.
            device: where they will be used.

        Raises:
            LoadError: the layer has no bytes yet, or they cannot be had on the device.
        """

    def portions(self, layer: Layer, experts: Tensor, device: torch.device) -> Portions:
        """Give the chosen experts in portions that can be on the device at a time, one by default.

        The outputs of a call are the sum of the portions' outputs. A portion's bytes are there until the next one is
        asked for, or the iterator is closed.

        Args:
            layer: whose experts.
            experts: their numbers, [T, k], as in `fetch`.
            device: where they are used.

        Raises:
            LoadError: as in `fetch`.
        """
        yield self.fetch(layer, experts, device), experts

    def summed(self, layer: Layer, call: Call, multiply: Multiply) -> Tensor:
        """Sum the outputs of the chosen experts, [T, H], as their bytes come.

        Args:
            layer: whose experts.
            call: what it is called with.
            multiply: gives the sum for the experts whose bytes are there; called for each portion of them, maybe with
                the call's tensors on another device, where the bytes are, and maybe in another thread.
        """
        return sum_portions(self.portions(layer, call.experts, call.x.device), call, multiply)

    def channels(self, layer: Layer, experts: Tensor, ups: Tensor) -> Iterator[Tensor]:
        """Give the channels that a call wants in portions that can be in memory at a time, one by default.

        Args:
            layer: whose experts.
            experts: their numbers, [T, k]; a number that is no expert's has no channels.
            ups: [T, k, I], zero where a channel is skipped.

        Yields:
            `ups` with zeros in place of the other portions' channels. A portion's records are there until the next one
            is asked for, or the iterator is closed.
        """
        yield ups

    @abstractmethod
    def prefetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> None:
        """Say that `fetch` is likely to be called with these arguments: the store may begin to read."""


class MappedStore(ExpertStore):
    """Bytes stay where they are given, by default in mapped files, whose pages are read as they are used.

    They are uint8 buffers of the layer, named after the projections: casts to another dtype leave them alone, they are
    part of `state_dict`, and nothing ever writes into them (the map is read-only).
    """

    def put(self, layer: Layer, projection: str, data: AnyTensor, **place: Any) -> None:
        """Take bytes without copying them; see `ExpertStore.put`."""
        buffer = as_bytes(data)
        self._take(layer, projection, buffer, _opened(buffer, **place), **place)

    def _take(self, layer: Layer, projection: str, buffer: Tensor, matrix: Matrix, **place: Any) -> None:
        """Make bytes those of a projection."""
        if matrix.shape != layer.shapes[projection]:
            message = f"the packed tensor is {matrix.shape}, the model's {projection} is {layer.shapes[projection]}"
            raise LoadError(message, **place)
        layer._buffers.pop(projection, None)
        layer.register_buffer(projection, buffer)
        layer.places[projection] = place
        layer.readers[projection] = buffer.data_ptr(), matrix

    def fetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> Matrices:
        """Return matrices that read all bytes in place; see `ExpertStore.fetch`."""
        return tuple(self._matrix(layer, projection, device) for projection in layer.shapes)

    def prefetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> None:
        """Do nothing: the bytes are where they are used."""

    def _matrix(self, layer: Layer, projection: str, device: torch.device) -> Matrix:
        """The reader of a projection, made anew where its buffer was moved or copied (`deepcopy`)."""
        buffer: Tensor | None = layer._buffers.get(projection)
        if buffer is None:
            raise LoadError(f"packed weights without bytes: load the model first ({projection} is missing)")
        if buffer.device != device:
            raise LoadError(f"packed weights on '{buffer.device}' cannot be used on '{device}'")
        pointer, matrix = layer.readers.get(projection, (None, None))
        if matrix is None or pointer != buffer.data_ptr():
            self.put(layer, projection, buffer, **layer.places.get(projection, {"tensor": projection}))
            matrix = layer.readers[projection][1]
        return matrix

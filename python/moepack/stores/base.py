"""The interface of stores: where packed bytes are, and how they reach the device that multiplies.

Packed modules ask their store for the matrices of a call; they know neither files nor caches. Bytes may be in mapped
files (`mapped`), in anonymous memory (`resident`), on a GPU (`uploaded`), or arrive in parts where they are needed
(`streaming`, `tiers`). The modules compute the same result in all cases.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from os import PathLike
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moepack.arrays import AnyTensor
from moepack.backends import Matrix

__all__ = [
    "Call", "ExpertStore", "Layer", "Matrices", "Multiply", "Portion", "Portions", "Shape", "sum_portions",
]  # fmt: skip

Shape = tuple[int, int, int]
"""Experts, rows and columns; a linear layer has a single expert."""

Matrices = tuple[Matrix, ...]
"""All projections of a layer."""

Portion = tuple[Matrices, Tensor]
"""The projections of a layer, and the experts of a call whose bytes are loaded; out-of-range values mark the others."""

Portions = Generator[Portion, None, None]
"""Portions in order; the bytes of a portion are valid until the next one is requested or the generator is closed."""


class Call(NamedTuple):
    """The arguments of an expert layer, on one device.

    Attributes:
        x: [T, H], activations.
        experts: [T, k] int64, the chosen experts; out-of-range values are skipped.
        weights: [T, k], the routing weights.
    """

    x: Tensor
    experts: Tensor
    weights: Tensor


Multiply = Callable[[Matrices, Call], Tensor]
"""Computes the outputs [T, H] of a call, on its device."""


def sum_portions(portions: Portions, call: Call, multiply: Multiply) -> Tensor:
    """Sum the outputs of a call over its portions."""
    outputs: Tensor | None = None
    with closing(portions):  # closes at once and in this thread if `multiply` raises
        for matrices, chosen in portions:
            portion = multiply(matrices, call._replace(experts=chosen))
            outputs = portion if outputs is None else outputs.add_(portion)
    assert outputs is not None
    return outputs


class Layer(Protocol):
    """A packed module, as stores see it (`moepack.stores.module.PackedModule`).

    Attributes:
        shapes: the projections' shapes, in order of computation.
        places: the file and tensor of each projection's bytes, if known, for messages.
        readers: opened matrices by projection, with the address of their bytes; managed by the store.
    """

    shapes: dict[str, Shape]
    places: dict[str, dict[str, Any]]
    readers: dict[str, tuple[int, Matrix]]
    _buffers: Any

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register a buffer of the module."""
        ...


class ExpertStore(ABC):
    """Keeps the packed bytes of layers.

    Attributes:
        by_channels: whether channel records are only available during `channels`.
        asks_host: whether `portions` and `summed` wait for the device to learn the chosen experts.
    """

    by_channels = False
    asks_host = False

    @property
    def statistics(self) -> Any:
        """Transfer statistics (`moepack.stores.streaming.Statistics`); None if all experts are always in memory."""
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
        """Set the bytes of a projection.

        Args:
            layer: the layer.
            projection: the name of its projection.
            data: flat uint8, possibly a read-only file map; must not change afterwards.
            file: their file, for messages.
            tensor: their name, for messages.

        Raises:
            CorruptionError: the bytes violate their format.
            LoadError: the format is unknown, the device has no backend, or the shape is not the layer's.
        """

    @abstractmethod
    def fetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> Matrices:
        """Return the matrices of all projections, with the bytes of the given experts on a device.

        Args:
            layer: the layer.
            experts: indices of the experts that will be used, in any shape and order, with possible duplicates and
                out-of-range values; None for all.
            device: the device that will use them.

        Raises:
            LoadError: the layer has no bytes yet, or they cannot be provided on the device.
        """

    def portions(self, layer: Layer, experts: Tensor, device: torch.device) -> Portions:
        """Yield the chosen experts in portions that fit on the device at once; by default a single portion.

        The outputs of a call are the sum of its portions' outputs. The bytes of a portion are valid until the next one
        is requested or the iterator is closed.

        Args:
            layer: the layer.
            experts: expert indices, [T, k], as in `fetch`.
            device: the device that will use them.

        Raises:
            LoadError: as in `fetch`.
        """
        yield self.fetch(layer, experts, device), experts

    def summed(self, layer: Layer, call: Call, multiply: Multiply) -> Tensor:
        """Sum the outputs of the chosen experts, [T, H], as their bytes arrive.

        Args:
            layer: the layer.
            call: the arguments of the layer.
            multiply: computes the sum for the experts whose bytes are loaded. It is called for each portion, possibly
                with the call's tensors on another device that has the bytes, and possibly in another thread.
        """
        return sum_portions(self.portions(layer, call.experts, call.x.device), call, multiply)

    def channels(self, layer: Layer, experts: Tensor, ups: Tensor) -> Iterator[Tensor]:
        """Yield the requested channels in portions that fit into memory at once; by default a single portion.

        Args:
            layer: the layer.
            experts: expert indices, [T, k]; out-of-range values have no channels.
            ups: [T, k, I], zero for skipped channels.

        Yields:
            `ups` with the channels of other portions set to zero. The records of a portion are valid until the next
            one is requested or the iterator is closed.
        """
        yield ups

    @abstractmethod
    def prefetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> None:
        """Announce that `fetch` will probably be called with these arguments; the store may start to read."""

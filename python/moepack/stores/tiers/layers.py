"""Experts of formats without slots: a device holds the first layers and reads the others from host memory.

In these formats, experts differ in length or share tables, so they cannot be cached in slots. Their tensors are laid
out on the device one at a time, and those that do not fit are moved back to pinned host memory. From there, kernels
read only the bytes of the experts that a token chooses, without caching them. The host does not take part, so a
decoding step is recorded as a whole.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moepack.arrays import AnyTensor
from moepack.errors import DeviceMemoryError, LoadError
from moepack.memory import available_bytes
from moepack.stores.base import ExpertStore, Layer, Matrices
from moepack.stores.module import PackedModule
from moepack.stores.tiers.accelerator import Device
from moepack.stores.tiers.arena import Budget
from moepack.units import size

__all__ = ["LayerTier", "PlacedStore", "check_host"]


class PlacedStore(ExpertStore):
    """A store whose bytes stay on a device or on the host, for kernels that read both.

    Args:
        device: the device of the kernels.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._layers: WeakKeyDictionary[Any, Matrices] = WeakKeyDictionary()

    def put(self, layer: Layer, projection: str, data: AnyTensor, **place: Any) -> None:
        """Raise: bytes are set when the store is created."""
        raise LoadError("a model that is partly on a device does not accept new weights", **place)

    def fetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> Matrices:
        """Return the matrices, regardless of where their bytes are."""
        if device.type != self._device.place.type:
            raise LoadError(f"experts of '{self._device.place}' cannot be used on '{device}'")
        return self._layers[layer]

    def prefetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> None:
        """Do nothing: the bus is needed for demanded experts."""


class LayerTier(PlacedStore):
    """Keeps as many of the first layers on a device as fit.

    Args:
        device: the device.
        layers: expert layers, on the CPU.
        budget: the device memory for the model.
        host_memory: the most bytes of host memory for the other layers; None for the available memory.

    Raises:
        DeviceMemoryError: the weights that every token needs, including tables of experts, exceed the budget.
        LoadError: the layers do not fit into host memory.
    """

    def __init__(self, device: Device, layers: list[PackedModule], budget: Budget, host_memory: int | None) -> None:
        super().__init__(device)
        needed, host, kept = budget.always, 0, list[tuple[PackedModule, int]]()
        for layer in layers:
            own = [device.uploaded(layer.get_buffer(name), layer.places[name]) for name in layer.projections]
            self._layers[layer] = tuple(matrix for matrix, _ in own)
            kept.append((layer, sum(nbytes for _, nbytes in own)))
            needed += kept[-1][1]
            while needed > budget.memory and kept:
                last, taken = kept.pop()
                host += taken
                check_host(host, host_memory)
                left = [device.left_on_the_host(matrix) for matrix in self._layers[last]]
                self._layers[last] = tuple(matrix for matrix, _ in left)
                needed += sum(nbytes for _, nbytes in left) - taken
        if needed > budget.memory:
            raise DeviceMemoryError(
                f"{size(budget.memory)} of device memory is too little: every token needs {size(needed)}"
            )


def check_host(needed: int, given: int | None) -> None:
    """Check that experts fit into host memory.

    Args:
        needed: bytes.
        given: the most bytes to use; None for the available memory.

    Raises:
        LoadError: they do not fit.
    """
    limit = available_bytes() if given is None else given
    if limit is not None and needed > limit:
        raise LoadError(f"experts take at least {size(needed)} of host memory, but only {size(limit)} are available")

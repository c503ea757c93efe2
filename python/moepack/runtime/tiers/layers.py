"""Experts of formats that do not come and go: a device holds the first layers, and reads the others where they are.

Experts of such formats differ in length, or share tables beside their codes, so they have no slots. Their tensors are
laid out on the device, one at a time, and those that do not fit go back to pinned memory of the host, from where the
kernels read the bytes of the experts that a token chooses, and no others. Nothing is kept of what was read; the host
takes no part, and a decoding step is recorded whole.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moepack.arrays import AnyTensor
from moepack.errors import DeviceMemoryError, LoadError
from moepack.memory import available_bytes
from moepack.runtime.packed import PackedModule
from moepack.runtime.store import ExpertStore, Layer, Matrices
from moepack.runtime.tiers.arena import Budget
from moepack.runtime.tiers.device import Device
from moepack.units import size

__all__ = ["LayerTier", "PlacedStore", "check_host"]


class PlacedStore(ExpertStore):
    """Bytes of layers that stay where they were put, on a device or on the host, for kernels that read both.

    Args:
        device: whose kernels.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._layers: WeakKeyDictionary[Any, Matrices] = WeakKeyDictionary()

    def put(self, layer: Layer, projection: str, data: AnyTensor, **place: Any) -> None:
        """Refuse: bytes come when the store is made."""
        raise LoadError("a model of which a device holds a part does not take new weights", **place)

    def fetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> Matrices:
        """Return the matrices, wherever their bytes are."""
        if device.type != self._device.place.type:
            raise LoadError(f"experts of '{self._device.place}' cannot be used on '{device}'")
        return self._layers[layer]

    def prefetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> None:
        """Do nothing: the bus is busy with experts that are needed."""


class LayerTier(PlacedStore):
    """Keeps the first layers on a device, as far as they fit.

    Args:
        device: where.
        layers: layers of experts, on the CPU.
        budget: what the model may take there.
        host_memory: the most that the other layers may take of the host's memory; None for what is available.

    Raises:
        DeviceMemoryError: what every token needs, tables of experts included, is larger than the budget.
        LoadError: the layers are larger than the host's memory.
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
                f"{size(budget.memory)} of the device's memory are too little: every token needs {size(needed)} of it"
            )


def check_host(needed: int, given: int | None) -> None:
    """Make sure that the host has room.

    Args:
        needed: bytes.
        given: the most that may be taken; None for what is available.

    Raises:
        LoadError: it has not.
    """
    limit = available_bytes() if given is None else given
    if limit is not None and needed > limit:
        raise LoadError(f"experts take {size(needed)} of the host's memory and more, of which there are {size(limit)}")

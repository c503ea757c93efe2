"""Experts that are kept by channels: a device holds what decides and the first channels, the host the others.

`floe` stores the channels that most tokens want first, so these need no cache to be found. Kernels choose channels and
read those that are not on the device from pinned memory, only these and while they compute: the host takes no part, and
a decoding step is recorded whole.
"""

import torch

from moepack.errors import DeviceMemoryError
from moepack.runtime.packed import PackedModule
from moepack.runtime.streaming.residency import Statistics
from moepack.runtime.tiers.arena import Budget
from moepack.runtime.tiers.device import Device
from moepack.runtime.tiers.layers import PlacedStore, check_host
from moepack.units import size

__all__ = ["ChannelTier"]

_CPU = torch.device("cpu")


class ChannelTier(PlacedStore):
    """Keeps the first channels of experts on a device.

    Args:
        device: where.
        layers: layers of experts by channels, on the CPU.
        budget: what the model may take there; of what every token needs, that outside of these layers is known.
        host_memory: the most that records may take of the host's memory; None for what is available.

    Raises:
        DeviceMemoryError: what every token needs is larger than the budget.
        LoadError: the records are larger than the host's memory.
    """

    def __init__(self, device: Device, layers: list[PackedModule], budget: Budget, host_memory: int | None) -> None:
        super().__init__(device)
        records = {layer: layer.get_buffer(layer.projections[-1]) for layer in layers}
        check_host(sum(each.nbytes for each in records.values()), host_memory)
        deciding = {
            layer: [device.uploaded(layer.get_buffer(name), layer.places[name]) for name in layer.projections[:-1]]
            for layer in layers
        }
        needed = budget.always + sum(nbytes for own in deciding.values() for _, nbytes in own)
        if needed > budget.memory:
            raise DeviceMemoryError(
                f"{size(budget.memory)} of the device's memory are too little: every token needs {size(needed)} of it, "
                "and what is more keeps channels"
            )
        share = min(1.0, (budget.memory - needed) / max(sum(each.nbytes for each in records.values()), 1))
        for layer, own in deciding.items():
            pinned = device.pinned(records[layer].nbytes).copy_(records[layer])
            (opened,) = layer.store.fetch(layer, None, _CPU)[-1:]
            resident = int(share * layer.shapes[layer.projections[-1]][1])
            self._layers[layer] = (*(matrix for matrix, _ in own), device.channels(pinned, opened, resident))

    @property
    def statistics(self) -> Statistics:
        """What happened so far; hits and misses are channels of single calls, and bytes those of the missing ones."""
        counts = Statistics()
        for matrices in self._layers.values():
            found = self._device.counts(matrices[-1])
            counts.hits, counts.misses = counts.hits + found.resident, counts.misses + found.others
            counts.bytes_read += found.others * found.record_bytes
            counts.resident += found.resident_bytes
        counts.reads, counts.most = counts.misses, counts.resident
        return counts

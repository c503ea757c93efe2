"""Experts stored by channel: a device holds the weights that select channels and the first channels of each expert.

`floe` stores the channels that most tokens need first, so they can be kept without a cache. Kernels select channels and
read only those that are not on the device from pinned host memory while they compute. The host does not take part, so
a decoding step is recorded as a whole.
"""

import torch

from moepack.errors import DeviceMemoryError
from moepack.stores.module import PackedModule
from moepack.stores.streaming.residency import Statistics
from moepack.stores.tiers.accelerator import Device
from moepack.stores.tiers.arena import Budget
from moepack.stores.tiers.layers import PlacedStore, check_host
from moepack.units import size

__all__ = ["ChannelTier"]

_CPU = torch.device("cpu")


class ChannelTier(PlacedStore):
    """Keeps the first channels of each expert on a device.

    Args:
        device: the device.
        layers: expert layers stored by channel, on the CPU.
        budget: the device memory; its `always` covers only weights outside of these layers.
        host_memory: the most bytes of host memory for records; None for the available memory.

    Raises:
        DeviceMemoryError: the weights that every token needs exceed the budget.
        LoadError: the records do not fit into host memory.
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
                f"{size(budget.memory)} of device memory is too little: every token needs {size(needed)}, and "
                "additional memory holds channels"
            )
        share = min(1.0, (budget.memory - needed) / max(sum(each.nbytes for each in records.values()), 1))
        for layer, own in deciding.items():
            pinned = device.pinned(records[layer].nbytes).copy_(records[layer])
            (opened,) = layer.store.fetch(layer, None, _CPU)[-1:]
            resident = int(share * layer.shapes[layer.projections[-1]][1])
            self._layers[layer] = (*(matrix for matrix, _ in own), device.channels(pinned, opened, resident))

    @property
    def statistics(self) -> Statistics:
        """Counters; hits and misses count channels per call, and bytes read are those of the misses."""
        counts = Statistics()
        for matrices in self._layers.values():
            found = self._device.counts(matrices[-1])
            counts.hits, counts.misses = counts.hits + found.resident, counts.misses + found.others
            counts.bytes_read += found.others * found.record_bytes
            counts.resident += found.resident_bytes
        counts.reads, counts.most = counts.misses, counts.resident
        return counts

"""Offloading: a device holds some experts of a model, and the host the others.

`keep_on` moves a model that is loaded on the CPU to a device. Formats in which experts have equal length are cached as
whole experts (`store`). For experts stored by channel, the device holds the first channels, which most tokens need, and
its kernels read the others from host memory (`channels`). For all other formats, it holds the first layers (`layers`).
"""

from functools import partial
from typing import Any

import torch

from moepack.checkpoint.architectures import described
from moepack.errors import LoadError
from moepack.stores.base import ExpertStore
from moepack.stores.module import PackedModule
from moepack.stores.streaming.channels import RECORDS
from moepack.stores.streaming.experts import expert_layers
from moepack.stores.tiers.accelerator import Device, Gpu
from moepack.stores.tiers.arena import Budget, Stack, is_slotted
from moepack.stores.tiers.channels import ChannelTier
from moepack.stores.tiers.experts import TierStore
from moepack.stores.tiers.host import Drive, Host, Pin, Pinned
from moepack.stores.tiers.layers import LayerTier
from moepack.stores.tiers.misses import MISSES, Misses

__all__ = ["MISSES", "ChannelTier", "Gpu", "LayerTier", "Misses", "TierStore", "keep_on"]

_CPU = torch.device("cpu")


def keep_on(model: Any, device: Device, memory: int, host_memory: int | None = None, misses: Misses = "auto") -> None:
    """Move a packed model to a device, with a limit on device memory for its weights.

    Args:
        model: a model on the CPU from `moepack.load`.
        device: the device that computes.
        memory: the most bytes of device memory for weights.
        host_memory: the most bytes of host memory for experts; the others stay on the drive. None keeps all in memory.
        misses: how to handle chosen experts that are not on the device: "moved" transfers them over the bus, "computed"
            multiplies them on the CPU, and "auto" uses whichever is faster. Only for formats cached as whole experts.

    Raises:
        DeviceMemoryError: the weights that every token needs and the experts of one token exceed `memory`.
        LoadError: the model has no packed experts, their format has no kernels, or they do not fit into host memory.
    """
    layers = expert_layers(model)
    if not layers:
        raise LoadError("the model has no packed experts to keep on the host")
    leaving = {id(layer.get_buffer(projection)) for layer in layers for projection in layer.projections}
    tensors = (*model.parameters(), *model.buffers())
    budget = Budget(memory, sum(tensor.nbytes for tensor in tensors if id(tensor) not in leaving))
    store: ExpertStore
    if all(layer.projections[-1] in RECORDS for layer in layers):
        store = ChannelTier(device, layers, budget, host_memory)
    elif not all(is_slotted(kind) for layer in layers for kind in _kinds(layer)):
        store = LayerTier(device, layers, budget, host_memory)
    else:
        stacks = {layer: _stacks(layer) for layer in layers}
        top_k = described(model.config.model_type).top_k(vars(model.config))
        store = TierStore(device, partial(_host, host_memory, stacks, device.pinned), stacks, budget, top_k, misses)
    for layer in layers:
        layer.store = store
        for projection in layer.projections:
            layer._buffers.pop(projection, None)
    model.to(device.place)


def _host(memory: int | None, stacks: dict[Any, list[Stack]], pin: Pin) -> Host:
    return Pinned(stacks, pin) if memory is None else Drive(memory, stacks, pin)


def _kinds(layer: PackedModule) -> list[str]:
    return [getattr(matrix, "kind", "") for matrix in layer.store.fetch(layer, None, _CPU)]


def _stacks(layer: PackedModule) -> list[Stack]:
    """The projections of a layer."""
    matrices = layer.store.fetch(layer, None, _CPU)
    pairs = zip(layer.projections, matrices, strict=True)
    return [Stack(layer.get_buffer(name), matrix) for name, matrix in pairs]

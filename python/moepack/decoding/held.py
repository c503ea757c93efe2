"""Keys and values of sequences in one block of memory per cache and device, for passes that read them by address.

A pass over tokens of several sequences (`moepack.decoding.passes`) is recorded once. It gets the addresses of each
sequence's keys and values with every replay. They stay in transformers' caches, as layers that grow in place and whose
buffers are parts of one tensor: making it, or a larger one, takes one allocation and one copy instead of two per layer.
The buffers keep all tokens, including tokens that left a sliding window.

Invariants: all layers of a cache have the same number of tokens, and one form. Buffers are read and written in launches
of one stream only, so a buffer that is replaced may be freed at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from moepack.backends.gpu.rooms import Rooms
from moepack.decoding.cache import LEAST, Form, GrowingLayer, GrowingWindow, Room
from moepack.decoding.narrow import NarrowLayer, NarrowWindow, is_narrow
from moepack.decoding.translation import require

__all__ = ["Held", "Passing", "Shape", "Span", "held"]


class Shape(NamedTuple):
    """Keys and values of a model.

    Attributes:
        windows: of each layer, the number of tokens that a token attends to, including itself; 0 for all.
        groups, width: the heads of a layer, and their columns.
        dtype: of the tensors.
        devices: of each layer.
    """

    windows: tuple[int, ...]
    groups: int
    width: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]


class Held:
    """A cache whose buffers have known addresses.

    Attributes:
        addresses: [B, 2, layers], of each sequence's keys and values.
        capacity: the number of tokens that fit.
        narrow: whether the tokens are in 8 bits.
    """

    def __init__(self, layers: list[Any], blocks: list[Tensor], parts: list[Tensor]) -> None:
        """Make each layer a view of its part [2, B, groups, capacity, row] of the blocks [layers, 2, ...]."""
        self._layers, self.blocks, part = layers, blocks, parts[0]
        self.capacity, self.narrow = part.shape[3], part.dtype is torch.int8
        steps = np.arange(part.shape[1])[:, None] * part.stride(1) + np.arange(2) * part.stride(0)
        starts = np.array([part.data_ptr() for part in parts])
        self.addresses: NDArray[np.int64] = starts + part.element_size() * steps[..., None]
        form = Form(part.shape[1], part.shape[2], (part.shape[4],) * 2, part.dtype, part.device.type)
        self._rooms = [Room(form, keys, values, None) for keys, values in parts]

    def show(self, count: int) -> None:
        """Set the number of tokens."""
        for layer, room in zip(self._layers, self._rooms, strict=True):
            layer.hold(room, count)

    def is_of(self, layers: Sequence[Any]) -> bool:
        """Whether these layers still are views of the parts, and show their latest tokens."""
        first, last = self._layers[0], self._layers[-1]
        if layers[0] is not first or layers[-1] is not last or len(layers) != len(self._layers):
            return False
        ends = (first, self._rooms[0]), (last, self._rooms[-1])
        return all(
            layer._room is room and layer._is_part_of(room) and layer.first + layer.count == layer.get_seq_length()
            for layer, room in ends
        )


@dataclass(frozen=True, slots=True)
class Span:
    """The next tokens of a sequence.

    Attributes:
        ids: their numbers; -1 - n is the token that row n of the previous step chose. Empty if they are on the device.
        count: the number of tokens.
        place: the number of tokens before them.
        held: the sequence's keys and values, with room for the tokens.
        row: of the sequence in its cache.
    """

    ids: Sequence[int]
    count: int
    place: int
    held: Held
    row: int = 0


def held(cache: DynamicCache, known: Held | None, shape: Shape, batch: int, more: int) -> Held:
    """Return a cache's buffers, with room for more tokens.

    Args:
        cache: its layers become layers that grow in place, with buffers in one block per device.
        known: what was returned for this cache before.
        shape: of the model's keys and values.
        batch: the number of sequences.
        more: tokens.

    Raises:
        Unknown: the cache has other layers; nothing has changed.
    """
    layers: list[Any] = cache.layers
    if known is not None and known.is_of(layers) and layers[0].get_seq_length() + more <= known.capacity:
        return known
    counts = {layer.get_seq_length() for layer in layers}
    require(len(layers) == len(shape.windows) or not layers, "caches with a different number of layers")
    require(len(counts) <= 1, "caches whose layers differ in length")
    count, narrow = max(counts, default=0), is_narrow(cache)
    grown = [_grown(layers[number] if layers else None, seen, narrow) for number, seen in enumerate(shape.windows)]
    form = Form(batch, shape.groups, (shape.width,) * 2, shape.dtype, shape.devices[0].type)
    form = NarrowLayer.stored(form) if narrow else form
    if count:
        require({layer.form for layer in grown} == {form}, "caches with unexpected contents")
        kept = [min(count, seen - 1) if seen else count for seen in shape.windows]
        require([layer.count for layer in grown] == kept, "caches that lack tokens")
    capacity = count + more + max(LEAST, count // 4)
    capacity += -capacity % _CAPACITY
    blocks = {
        device: torch.empty(
            (shape.devices.count(device), 2, batch, shape.groups, capacity, form.widths[0]),
            dtype=form.dtype,
            device=device,
        )
        for device in dict.fromkeys(shape.devices)
    }
    rest = {device: iter(block) for device, block in blocks.items()}
    parts = [next(rest[device]) for device in shape.devices]
    if count and known is not None and known.is_of(layers):
        for block, old in zip(blocks.values(), known.blocks, strict=True):
            block.narrow(4, 0, count).copy_(old.narrow(4, 0, count))
    elif count:
        for layer, both in zip(grown, parts, strict=True):
            both.narrow(3, 0, count - layer.count).zero_()  # hidden tokens are multiplied by zero, as NaN must not be
            for part, tokens in zip(both, (layer.keys, layer.values), strict=True):
                part.narrow(2, count - layer.count, layer.count).copy_(tokens)
    for layer, (keys, values) in zip(grown, parts, strict=True):
        if not layer.is_initialized:
            layer.lazy_initialization(keys[:, :, :0], values[:, :, :0])
    layers[:] = grown
    found = Held(grown, list(blocks.values()), parts)
    found.show(count)
    return found


_CAPACITY = 4
"""Capacities are multiples of it, so that groups of rows of 8-bit codes begin at multiples of 16 bytes."""


def _grown(layer: Any, window: int, narrow: bool) -> Any:
    """Return a cache layer as one that grows in place, or a new one.

    Raises:
        Unknown: the layer keeps other tokens, or keeps them in another form.
    """
    plain: Any = DynamicSlidingWindowLayer if window else DynamicLayer
    kind: Any = _KINDS[bool(window), narrow]
    if layer is None:
        return kind(sliding_window=window) if window else kind()
    require(type(layer) is kind or (type(layer) is plain and not narrow), f"cache layers: {type(layer).__name__}")
    require(not window or (layer.sliding_window == window and not layer.record_past), "caches with other windows")
    return layer if type(layer) is kind else kind.of(layer)


_KINDS = {
    (False, False): GrowingLayer, (False, True): NarrowLayer, (True, False): GrowingWindow, (True, True): NarrowWindow,
}  # fmt: skip


class Passing:
    """Replaces the cache while a pass over several sequences is recorded; only known attention reads it.

    Attributes:
        rooms: of each layer.
        is_prompt: whether rows lie in tiles of one sequence; otherwise each is a token of its own sequence.
    """

    is_compileable = False

    def __init__(self, rooms: Sequence[Rooms], is_prompt: bool) -> None:
        self.rooms, self.is_prompt = rooms, is_prompt

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: the model's own attention knows one sequence only."""
        raise RuntimeError("attention of this form")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are given, so this is not used."""
        return 0

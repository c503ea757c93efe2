"""A key-value cache that grows in place: appending a token copies that token, not all before it.

`GrowingLayer` is transformers' dynamic layer whose tensors are views of buffers with room for more tokens. Whatever
else is done to such a layer (cropping, reordering, selecting, offloading) is what transformers does; where the tensors
are then not the first tokens of the buffers, the next token finds new ones.

Invariants: `keys` and `values` are tensors as transformers keeps them, `[batch, heads, tokens, width]`; tokens that are
in them are not written again, unless the layer has been cropped to fewer.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicLayer

__all__ = ["GrowingLayer", "Room"]

LEAST = 256
"""A new buffer has room for this many tokens more, or a quarter of its tokens."""


class Room(NamedTuple):
    """Buffers.

    Attributes:
        keys: `[batch, heads, capacity, width]`.
        values: the same.
        arrays: the first sequence of both as the core takes them, `[heads, capacity, width]`, float32 or the bits of
            bfloat16; None for other dtypes and devices.
    """

    keys: torch.Tensor
    values: torch.Tensor
    arrays: tuple[NDArray[Any], NDArray[Any]] | None

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.keys.shape[2]

    def starts_with(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether these are the first tokens of the buffers."""
        return _is_start(keys, self.keys) and _is_start(values, self.values)


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of `DynamicCache` that appends in place."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._room: Room | None = None

    @classmethod
    def of(cls, layer: DynamicLayer) -> "GrowingLayer":
        """A layer that goes on where another is."""
        grown = cls()
        grown.__dict__.update(layer.__dict__)
        return grown

    def room(self, count: int) -> Room:
        """Return buffers that start with the layer's tokens and have room for `count` more."""
        keys, values = self.keys, self.values
        length, room = keys.shape[2], self._room
        writable = room is not None and (torch.is_inference_mode_enabled() or not room.keys.is_inference())
        if room is None or not writable or length + count > room.capacity or not room.starts_with(keys, values):
            capacity = length + count + max(LEAST, length // 4)
            room = self._room = _room_for(keys, values, capacity)
            self.show(room, length)
        return room

    def show(self, room: Room, length: int) -> None:
        """Let the layer have the first `length` tokens of its buffers."""
        self.keys, self.values = room.keys.narrow(2, 0, length), room.values.narrow(2, 0, length)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens, `[batch, heads, tokens, width]`; all keys and values of the layer."""
        if self.get_seq_length() == 0 or _has_gradient(key_states, value_states, self.keys, self.values):
            states: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return states
        length, count = self.keys.shape[2], key_states.shape[2]
        room = self.room(count)
        room.keys.narrow(2, length, count).copy_(key_states)
        room.values.narrow(2, length, count).copy_(value_states)
        self.show(room, length + count)
        return self.keys, self.values

    def __getstate__(self) -> dict[str, Any]:
        """Leave the buffers out of copies and pickles: a copy finds its own."""
        return {**self.__dict__, "_room": None, "keys": _compact(self.keys), "values": _compact(self.values)}


def _room_for(keys: torch.Tensor, values: torch.Tensor, capacity: int) -> Room:
    """New buffers that start with these tokens."""
    length = keys.shape[2]
    buffers = []
    for tokens in (keys, values):
        buffer = tokens.new_empty((*tokens.shape[:2], capacity, tokens.shape[3]))
        buffer.narrow(2, 0, length).copy_(tokens)
        buffers.append(buffer)
    return Room(buffers[0], buffers[1], _arrays(*buffers))


def _arrays(keys: torch.Tensor, values: torch.Tensor) -> tuple[NDArray[Any], NDArray[Any]] | None:
    dtypes: dict[torch.dtype, torch.dtype] = {torch.float32: torch.float32, torch.bfloat16: torch.uint16}
    kind = dtypes.get(keys.dtype)
    if kind is None or keys.dtype != values.dtype or keys.device.type != "cpu" or keys.requires_grad:
        return None
    views = [np.asarray(tokens[0].view(kind).numpy()) for tokens in (keys, values)]
    return views[0], views[1]


def _is_start(tokens: torch.Tensor, buffer: torch.Tensor) -> bool:
    return (
        tokens.data_ptr() == buffer.data_ptr()
        and tokens.stride() == buffer.stride()
        and tokens.shape[:2] == buffer.shape[:2]
        and tokens.shape[3:] == buffer.shape[3:]
        and tokens.dtype == buffer.dtype
    )


def _has_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _compact(tokens: torch.Tensor | None) -> torch.Tensor | None:
    """Tokens without the rest of their buffer."""
    return None if tokens is None else tokens.clone()

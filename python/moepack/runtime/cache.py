"""A key-value cache that grows in place: appending a token copies that token, not all before it.

`GrowingLayer` is transformers' dynamic layer whose tensors are views of buffers with room for more tokens. Whatever
else is done to such a layer (cropping, reordering, selecting, offloading) is what transformers does; where the tensors
are then not the first tokens of the buffers, the next token finds new ones.

Invariants: `keys` and `values` are tensors as transformers keeps them, `[batch, heads, tokens, width]`, made when they
are looked at: decoding in the core looks at none. Tokens that are in them are not written again, unless the layer has
been cropped to fewer.
"""

from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicLayer

from moepack.runtime.backends.cpu.views import first_sequence

__all__ = ["Form", "GrowingLayer", "Room", "form_of"]

LEAST = 256
"""A new buffer has room for this many tokens more, or a quarter of its tokens."""


class Form(NamedTuple):
    """What keys and values have in common, but for their tokens."""

    batch: int
    heads: int
    width: int
    dtype: torch.dtype
    device: str


class Room(NamedTuple):
    """Buffers.

    Attributes:
        form: of both.
        keys: `[batch, heads, capacity, width]`.
        values: the same.
        arrays: the first sequence of both as the core takes them; None for dtypes and devices that it does not read.
    """

    form: Form | None
    keys: torch.Tensor
    values: torch.Tensor
    arrays: tuple[Any, Any] | None

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
        self._room: Room | None = None
        self._length = 0
        # None where the layer has the first `_length` tokens of its room.
        self._tensors: tuple[Any, Any] | None = (None, None)
        super().__init__(**kwargs)

    @property
    def keys(self) -> Any:
        """The keys of all tokens."""
        return self._seen()[0]

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self._tensors = keys, self._seen()[1]

    @property
    def values(self) -> Any:
        """The values of all tokens."""
        return self._seen()[1]

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self._tensors = self._seen()[0], values

    def _seen(self) -> tuple[Any, Any]:
        """Keys and values, which from here on may be somebody's."""
        if self._tensors is None:
            assert self._room is not None
            keys, values = (buffer.narrow(2, 0, self._length) for buffer in (self._room.keys, self._room.values))
            self._tensors = keys, values
        return self._tensors

    def get_seq_length(self) -> int:
        """The number of tokens."""
        length: int = self._length if self._tensors is None else super().get_seq_length()
        return length

    @property
    def form(self) -> Form | None:
        """What keys and values have in common; None if they do not fit together."""
        if self._tensors is None:
            return self._room.form if self._room is not None else None
        return form_of(*self._tensors)

    @classmethod
    def of(cls, layer: DynamicLayer) -> "GrowingLayer":
        """A layer that goes on where another is."""
        grown = cls()
        for name, value in vars(layer).items():
            setattr(grown, name, value)
        return grown

    def room(self, count: int) -> Room:
        """Return buffers that start with the layer's tokens and have room for `count` more."""
        length, room = self.get_seq_length(), self._room
        writable = room is not None and (torch.is_inference_mode_enabled() or not room.keys.is_inference())
        if room is None or not writable or length + count > room.capacity or not self._is_start(room):
            capacity = length + count + max(LEAST, length // 4)
            room = _room_for(*self._seen(), capacity)
            self.show(room, length)
        return room

    def _is_start(self, room: Room) -> bool:
        """Whether the layer's tokens are the first of its room."""
        return self._tensors is None or room.starts_with(*self._tensors)

    def show(self, room: Room, length: int) -> None:
        """Let the layer have the first `length` tokens of its buffers."""
        self._room, self._length, self._tensors = room, length, None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens, `[batch, heads, tokens, width]`; all keys and values of the layer."""
        if self.get_seq_length() == 0 or _has_gradient(key_states, value_states, self.keys, self.values):
            states: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return states
        length, count = self.get_seq_length(), key_states.shape[2]
        room = self.room(count)
        room.keys.narrow(2, length, count).copy_(key_states)
        room.values.narrow(2, length, count).copy_(value_states)
        self.show(room, length + count)
        return self.keys, self.values

    def __getstate__(self) -> dict[str, Any]:
        """Leave the buffers out of copies and pickles: a copy finds its own."""
        keys, values = self._seen()
        return {**self.__dict__, "_room": None, "_tensors": (_compact(keys), _compact(values))}


def form_of(keys: torch.Tensor | None, values: torch.Tensor | None) -> Form | None:
    """What keys and values have in common; None if they do not fit together."""
    if keys is None or values is None or keys.dim() != 4 or keys.shape != values.shape:
        return None
    if keys.dtype != values.dtype or keys.device != values.device:
        return None
    return Form(keys.shape[0], keys.shape[1], keys.shape[3], keys.dtype, keys.device.type)


def _room_for(keys: torch.Tensor, values: torch.Tensor, capacity: int) -> Room:
    """New buffers that start with these tokens."""
    length = keys.shape[2]
    buffers = []
    for tokens in (keys, values):
        buffer = tokens.new_empty((*tokens.shape[:2], capacity, tokens.shape[3]))
        buffer.narrow(2, 0, length).copy_(tokens)
        buffers.append(buffer)
    return Room(form_of(*buffers), buffers[0], buffers[1], first_sequence(*buffers))


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

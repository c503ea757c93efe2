"""A key-value cache that grows in place: appending a token copies only that token, not all earlier ones.

`GrowingLayer` is transformers' dynamic layer with tensors that are views of larger buffers. `GrowingWindow` is the
sliding-window variant; its view moves along the buffers. All other operations (cropping, reordering, selecting,
offloading) are inherited from transformers. If they replace the tensors, the next append allocates new buffers.
`Tokens` and `States` describe the cache layers that the core expects, and convert them.

Invariants: `keys` and `values` are tensors as in transformers, `[batch, heads, tokens, width]`. They are created on
access; decoding in the core does not access them. Stored tokens are not overwritten unless the layer was cropped.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from moepack.backends.cpu.views import FLOATS, first_sequence, state_arrays

__all__ = ["Appended", "Form", "GrowingLayer", "GrowingWindow", "Mark", "Room", "States", "Tokens", "form_of"]

LEAST = 256
"""A new buffer has room for this many additional tokens, or for a quarter of its tokens if that is more."""


class Form(NamedTuple):
    """The properties shared by keys and values, except their number of tokens."""

    batch: int
    heads: int
    widths: tuple[int, int]
    dtype: torch.dtype
    device: str


class Room(NamedTuple):
    """The buffers of a layer.

    Attributes:
        form: the form of both.
        keys: `[batch, heads, capacity, width]`.
        values: the same; the width may differ.
        arrays: the first sequence of both as arrays for the core; None for dtypes and devices that it cannot read.
    """

    form: Form | None
    keys: torch.Tensor
    values: torch.Tensor
    arrays: tuple[Any, Any] | None

    @property
    def capacity(self) -> int:
        """The number of tokens that fit."""
        return self.keys.shape[2]

    def has(self, keys: torch.Tensor, values: torch.Tensor, first: int) -> bool:
        """Whether these tensors are views of the buffers that start at token `first`."""
        return _is_part(keys, self.keys, first) and _is_part(values, self.values, first)


class _Growing(DynamicLayer):  # type: ignore[misc]
    """A layer whose tokens are a slice of its buffers that starts at `_first`."""

    def __init__(self, **kwargs: Any) -> None:
        self._room: Room | None = None
        self._first = self._count = 0
        # None if the tokens are `_count` tokens of the room.
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
        """Keys and values; callers may keep references to them."""
        if self._tensors is None:
            assert self._room is not None
            keys, values = (part.narrow(2, self._first, self._count) for part in (self._room.keys, self._room.values))
            self._tensors = keys, values
        return self._tensors

    @property
    def count(self) -> int:
        """The number of stored tokens."""
        if self._tensors is None:
            return self._count
        keys, _ = self._tensors
        return 0 if keys is None or keys.numel() == 0 else int(keys.shape[2])

    @property
    def first(self) -> int:
        """The index of the layer's first token in its room."""
        return self._first

    @property
    def form(self) -> Form | None:
        """The properties shared by keys and values; None if they are inconsistent."""
        if self._tensors is None:
            return self._room.form if self._room is not None else None
        return form_of(*self._tensors)

    @classmethod
    def stored(cls, form: Form) -> Form:
        """The form of the layer's tensors for keys and values of a form."""
        return form

    @classmethod
    def _of(cls, layer: DynamicLayer, **kwargs: Any) -> Self:
        """Create a layer that continues another one."""
        grown = cls(**kwargs)
        for name, value in vars(layer).items():
            setattr(grown, name, value)
        return grown

    def room(self, count: int) -> Room:
        """Return buffers that hold the layer's tokens and have room for `count` more."""
        kept, room = self.count, self._room
        writable = room is not None and (torch.is_inference_mode_enabled() or not room.keys.is_inference())
        if room is None or not writable or self._first + kept + count > room.capacity or not self._is_part_of(room):
            room = _room_for(*self._seen(), kept + count + max(LEAST, kept // 4))
            self.show(room, kept)
        return room

    def _is_part_of(self, room: Room) -> bool:
        return self._tensors is None or room.has(*self._tensors, self._first)

    def show(self, room: Room, count: int, first: int = 0) -> None:
        """Make the layer a view of `count` tokens of the buffers, starting at `first`."""
        self._room, self._first, self._count, self._tensors = room, first, count, None

    def hold(self, room: Room, count: int) -> None:
        """Make the layer a view of those tokens that it keeps of `count` tokens at the start of the buffers."""
        self.show(room, count)

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        kept, count = self.count, keys.shape[2]
        room = self.room(count)
        for buffer, tokens in ((room.keys, keys), (room.values, values)):
            buffer.narrow(2, self._first + kept, count).copy_(tokens)
        self.show(room, kept + count, self._first)

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the buffers from copies and pickles; a copy allocates its own."""
        keys, values = self._seen()
        return {**self.__dict__, "_room": None, "_first": 0, "_tensors": (_compact(keys), _compact(values))}


class GrowingLayer(_Growing):
    """A layer of `DynamicCache` that appends in place."""

    def get_seq_length(self) -> int:
        """The number of tokens."""
        return self.count

    @classmethod
    def of(cls, layer: DynamicLayer) -> Self:
        """Create a layer that continues another one."""
        return cls._of(layer)

    def advance(self) -> None:
        """Include the token that the core wrote after the others."""
        assert self._room is not None
        self.show(self._room, self.count + 1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens, `[batch, heads, tokens, width]`; return all keys and values of the layer."""
        if self.count == 0 or _has_gradient(key_states, value_states, self.keys, self.values):
            states: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return states
        self._append(key_states, value_states)
        return self.keys, self.values


class GrowingWindow(_Growing, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A layer of `DynamicCache` that appends in place and keeps the last `sliding_window - 1` tokens."""

    @classmethod
    def of(cls, layer: DynamicSlidingWindowLayer) -> Self:
        """Create a layer that continues another one."""
        return cls._of(layer, sliding_window=layer.sliding_window)

    def advance(self) -> None:
        """Include the token that the core wrote after the others."""
        self._count, self._tensors = self.count + 1, None
        self._slide(1)

    def hold(self, room: Room, count: int) -> None:
        """Make the layer a view of the last ones of `count` tokens at the start of the buffers."""
        self.cumulative_length = count
        kept = min(count, self.sliding_window - 1)
        self.show(room, kept, count - kept)

    def _slide(self, count: int) -> None:
        """Drop tokens that left the window, after `count` were appended."""
        assert self._room is not None
        self.cumulative_length += count
        kept = min(self._count, self.sliding_window - 1)
        self.show(self._room, kept, self._first + self._count - kept)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens, `[batch, heads, tokens, width]`; return the keys and values that any of them attends to."""
        if self.record_past or self.count == 0 or _has_gradient(key_states, value_states, self.keys, self.values):
            states: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return states
        self._append(key_states, value_states)
        keys, values = self._seen()
        self._slide(key_states.shape[2])
        return keys, values


class Appended:
    """Replaces the cache while a step is recorded: attention appends to it and reads it.

    Attributes:
        rooms: the buffers of each layer.
        place: [1], the index of the new token.
    """

    is_compileable = False

    def __init__(self, rooms: Sequence[Room], place: torch.Tensor) -> None:
        self.rooms, self.place = rooms, place

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the token's keys and values; return the whole buffers."""
        room = self.rooms[layer_idx]
        room.keys.index_copy_(2, self.place, keys)
        room.values.index_copy_(2, self.place, values)
        return room.keys, room.values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Count all slots; the mask determines which hold tokens."""
        return self.rooms[layer_idx].capacity - 1


class Mark:
    """A snapshot of a cache that can be restored.

    Token layers never modify tokens that they hold: they append after them, or get new tensors. A snapshot therefore
    copies references and no tensors.

    Attributes:
        is_exact: whether `restore` brings the cache back. States of linear attention are updated in place, so a cache
            that has them cannot be restored.
    """

    def __init__(self, cache: Any) -> None:
        self._cache, self._layers = cache, list(cache.layers)
        self._attributes = [dict(vars(layer)) for layer in self._layers]
        kinds = {type(layer) for layer in self._layers}
        self.is_exact = type(cache) is DynamicCache and all(
            kind in _PLAIN_LAYERS or issubclass(kind, _Growing) for kind in kinds
        )

    def restore(self) -> None:
        """Restore the layers and their contents."""
        for layer, attributes in zip(self._layers, self._attributes, strict=True):
            vars(layer).clear()
            vars(layer).update(attributes)
        self._cache.layers[:] = self._layers


_PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


class Tokens(NamedTuple):
    """The keys and values that an attention layer expects.

    Attributes:
        form: the form of both.
        window: the number of tokens that a token attends to, including itself; None for all.
    """

    form: Form
    window: int | None

    def taken(self, layer: Any, length: int) -> GrowingLayer | GrowingWindow | None:
        """Convert a cache layer of `length` tokens to one that grows in place; None if it does not match."""
        kinds = {DynamicLayer: GrowingLayer, DynamicSlidingWindowLayer: GrowingWindow}
        kind: Any = kinds.get(type(layer), type(layer))
        if not issubclass(kind, _Growing) or layer.get_seq_length() != length:
            return None
        kept, tokens = length, layer.count if isinstance(layer, _Growing) else layer.keys.shape[2]
        if issubclass(kind, GrowingWindow):
            if layer.record_past or layer.sliding_window != self.window:
                return None
            kept = min(length, layer.sliding_window - 1)
        form = layer.form if type(layer) is kind else form_of(layer.keys, layer.values)
        if form != kind.stored(self.form) or tokens != kept:
            return None
        taken: GrowingLayer | GrowingWindow = layer if type(layer) is kind else kind.of(layer)
        return taken

    def arrays(self, layer: GrowingLayer | GrowingWindow) -> tuple[Any, Any, int, int]:
        """The arguments of the core's step: both buffers, the first attended token and the index of the next token."""
        room, first = layer.room(1), layer.first
        assert room.arrays is not None
        last = layer.first + layer.count
        return *room.arrays, max(layer.first, last + 1 - self.window) if self.window else first, last


class States(NamedTuple):
    """The states that a gated delta rule expects instead of tokens.

    Attributes:
        window: [1, channels, tokens], the most recent inputs of its convolution.
        state: [1, heads, keys, values], float32.
        dtype: the dtype of `window`.
    """

    window: tuple[int, ...]
    state: tuple[int, ...]
    dtype: torch.dtype

    def taken(self, layer: Any, length: int) -> Any:
        """Return the cache layer; None if it does not match."""
        if type(layer) is not LinearAttentionLayer or layer.record_past or layer.number_of_states != 1:
            return None
        window, state = layer.conv_states[0], layer.recurrent_states[0]
        fits = (
            layer.has_previous_state[0]
            and _is_plain(window, self.window, self.dtype)
            and _is_plain(state, self.state, torch.float32)
        )
        return layer if fits else None

    def arrays(self, layer: Any) -> tuple[Any, Any, int, int]:
        """The arguments of the core's step, which updates both states in place."""
        return *state_arrays(layer.conv_states[0], layer.recurrent_states[0]), 0, 0


def _is_plain(tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether the core can read and write a tensor in place."""
    if tensor is None or tensor.shape != shape or tensor.dtype != dtype or dtype not in FLOATS:
        return False
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.requires_grad


def form_of(keys: torch.Tensor | None, values: torch.Tensor | None) -> Form | None:
    """Return the properties shared by keys and values; None if they are inconsistent."""
    if keys is None or values is None or keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        return None
    if keys.dtype != values.dtype or keys.device != values.device:
        return None
    widths = keys.shape[3], values.shape[3]
    return Form(keys.shape[0], keys.shape[1], widths, keys.dtype, keys.device.type)


def _room_for(keys: torch.Tensor, values: torch.Tensor, capacity: int) -> Room:
    """Allocate buffers that start with these tokens."""
    length = keys.shape[2]
    buffers = []
    for tokens in (keys, values):
        buffer = tokens.new_empty((*tokens.shape[:2], capacity, tokens.shape[3]))
        buffer.narrow(2, 0, length).copy_(tokens)
        buffers.append(buffer)
    return Room(form_of(*buffers), buffers[0], buffers[1], first_sequence(*buffers))


def _is_part(tokens: torch.Tensor, buffer: torch.Tensor, first: int) -> bool:
    return (
        tokens.data_ptr() == buffer.data_ptr() + first * buffer.stride(2) * buffer.element_size()
        and tokens.stride() == buffer.stride()
        and tokens.shape[:2] == buffer.shape[:2]
        and tokens.shape[3:] == buffer.shape[3:]
        and tokens.dtype == buffer.dtype
    )


def _has_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _compact(tokens: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of the tokens without the rest of their buffer."""
    return None if tokens is None else tokens.clone()

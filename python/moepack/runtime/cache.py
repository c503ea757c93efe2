"""A key-value cache that grows in place: appending a token copies that token, not all before it.

`GrowingLayer` is transformers' dynamic layer whose tensors are views of buffers with room for more tokens,
`GrowingWindow` that of a sliding window, whose view moves along the buffers. Whatever else is done to such a layer
(cropping, reordering, selecting, offloading) is what transformers does; where the tensors are then no tokens of the
buffers, the next token finds new ones. `Tokens` and `States` say what the core expects of a layer's cache, and take it.

Invariants: `keys` and `values` are tensors as transformers keeps them, `[batch, heads, tokens, width]`, made when they
are looked at: decoding in the core looks at none. Tokens that are in them are not written again, unless the layer has
been cropped to fewer.
"""

from typing import Any, NamedTuple, Self

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from moepack.runtime.backends.cpu.views import FLOATS, first_sequence, state_arrays

__all__ = ["Form", "GrowingLayer", "GrowingWindow", "Mark", "Room", "States", "Tokens", "form_of"]

LEAST = 256
"""A new buffer has room for this many tokens more, or a quarter of its tokens."""


class Form(NamedTuple):
    """What keys and values have in common, but for their tokens."""

    batch: int
    heads: int
    widths: tuple[int, int]
    dtype: torch.dtype
    device: str


class Room(NamedTuple):
    """Buffers.

    Attributes:
        form: of both.
        keys: `[batch, heads, capacity, width]`.
        values: the same, maybe of another width.
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

    def has(self, keys: torch.Tensor, values: torch.Tensor, first: int) -> bool:
        """Whether these are tokens of the buffers, from the first on."""
        return _is_part(keys, self.keys, first) and _is_part(values, self.values, first)


class _Growing(DynamicLayer):  # type: ignore[misc]
    """A layer whose tokens are a part of buffers, from `_first` on."""

    def __init__(self, **kwargs: Any) -> None:
        self._room: Room | None = None
        self._first = self._count = 0
        # None where the layer has `_count` tokens of its room.
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
            keys, values = (part.narrow(2, self._first, self._count) for part in (self._room.keys, self._room.values))
            self._tensors = keys, values
        return self._tensors

    @property
    def count(self) -> int:
        """Tokens that are kept."""
        if self._tensors is None:
            return self._count
        keys, _ = self._tensors
        return 0 if keys is None or keys.numel() == 0 else int(keys.shape[2])

    @property
    def first(self) -> int:
        """Where in its room the layer's tokens begin."""
        return self._first

    @property
    def form(self) -> Form | None:
        """What keys and values have in common; None if they do not fit together."""
        if self._tensors is None:
            return self._room.form if self._room is not None else None
        return form_of(*self._tensors)

    @classmethod
    def _of(cls, layer: DynamicLayer, **kwargs: Any) -> Self:
        """A layer that goes on where another is."""
        grown = cls(**kwargs)
        for name, value in vars(layer).items():
            setattr(grown, name, value)
        return grown

    def room(self, count: int) -> Room:
        """Return buffers that have the layer's tokens and room for `count` more behind them."""
        kept, room = self.count, self._room
        writable = room is not None and (torch.is_inference_mode_enabled() or not room.keys.is_inference())
        if room is None or not writable or self._first + kept + count > room.capacity or not self._is_part_of(room):
            room = _room_for(*self._seen(), kept + count + max(LEAST, kept // 4))
            self.show(room, kept)
        return room

    def _is_part_of(self, room: Room) -> bool:
        return self._tensors is None or room.has(*self._tensors, self._first)

    def show(self, room: Room, count: int, first: int = 0) -> None:
        """Let the layer have so many tokens of its buffers, from the first on."""
        self._room, self._first, self._count, self._tensors = room, first, count, None

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        kept, count = self.count, keys.shape[2]
        room = self.room(count)
        for buffer, tokens in ((room.keys, keys), (room.values, values)):
            buffer.narrow(2, self._first + kept, count).copy_(tokens)
        self.show(room, kept + count, self._first)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the buffers out of copies and pickles: a copy finds its own."""
        keys, values = self._seen()
        return {**self.__dict__, "_room": None, "_first": 0, "_tensors": (_compact(keys), _compact(values))}


class GrowingLayer(_Growing):
    """A layer of `DynamicCache` that appends in place."""

    def get_seq_length(self) -> int:
        """The number of tokens."""
        return self.count

    @classmethod
    def of(cls, layer: DynamicLayer) -> "GrowingLayer":
        """A layer that goes on where another is."""
        return cls._of(layer)

    def advance(self) -> None:
        """Have the token that was written behind the others."""
        assert self._room is not None
        self.show(self._room, self.count + 1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens, `[batch, heads, tokens, width]`; all keys and values of the layer."""
        if self.count == 0 or _has_gradient(key_states, value_states, self.keys, self.values):
            states: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return states
        self._append(key_states, value_states)
        return self.keys, self.values


class GrowingWindow(_Growing, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A layer of `DynamicCache` that appends in place and keeps the last tokens, one less than its window."""

    @classmethod
    def of(cls, layer: DynamicSlidingWindowLayer) -> "GrowingWindow":
        """A layer that goes on where another is."""
        return cls._of(layer, sliding_window=layer.sliding_window)

    def advance(self) -> None:
        """Have the token that was written behind the others."""
        self._count, self._tensors = self.count + 1, None
        self._slide(1)

    def _slide(self, count: int) -> None:
        """Drop tokens before the window, after some were appended."""
        assert self._room is not None
        self.cumulative_length += count
        kept = min(self._count, self.sliding_window - 1)
        self.show(self._room, kept, self._first + self._count - kept)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens, `[batch, heads, tokens, width]`; keys and values from the first that any of them sees on."""
        if self.record_past or self.count == 0 or _has_gradient(key_states, value_states, self.keys, self.values):
            states: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return states
        self._append(key_states, value_states)
        keys, values = self._seen()
        self._slide(key_states.shape[2])
        return keys, values


class Mark:
    """What a cache holds at a moment, to go back to.

    Layers of tokens never change tokens that they hold: they append behind them, or have new tensors. So a mark copies
    references and no tensor.

    Attributes:
        is_exact: whether `restore` brings the cache back. States of linear attention are written in place, so a cache
            that has some cannot go back.
    """

    def __init__(self, cache: Any) -> None:
        self._cache, self._layers = cache, list(cache.layers)
        self._attributes = [dict(vars(layer)) for layer in self._layers]
        kinds = {type(layer) for layer in self._layers}
        self.is_exact = type(cache) is DynamicCache and kinds <= {*_TOKEN_LAYERS}

    def restore(self) -> None:
        """Let the cache hold what it held, in the layers that it had."""
        for layer, attributes in zip(self._layers, self._attributes, strict=True):
            vars(layer).clear()
            vars(layer).update(attributes)
        self._cache.layers[:] = self._layers


_TOKEN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, GrowingLayer, GrowingWindow)


class Tokens(NamedTuple):
    """The keys and values that a layer of attention expects.

    Attributes:
        form: of both.
        window: how many tokens a token sees, itself among them; None for all.
    """

    form: Form
    window: int | None

    def taken(self, layer: Any, length: int) -> GrowingLayer | GrowingWindow | None:
        """The layer of a cache of so many tokens, made to grow in place; None where it is another one."""
        kinds = {DynamicLayer: GrowingLayer, DynamicSlidingWindowLayer: GrowingWindow}
        kind: Any = kinds.get(type(layer), type(layer))
        if kind not in kinds.values() or layer.get_seq_length() != length:
            return None
        kept, tokens = length, layer.count if isinstance(layer, _Growing) else layer.keys.shape[2]
        if kind is GrowingWindow:
            if layer.record_past or layer.sliding_window != self.window:
                return None
            kept = min(length, layer.sliding_window - 1)
        form = layer.form if type(layer) is kind else form_of(layer.keys, layer.values)
        if form != self.form or tokens != kept:
            return None
        taken: GrowingLayer | GrowingWindow = layer if type(layer) is kind else kind.of(layer)
        return taken

    def arrays(self, layer: GrowingLayer | GrowingWindow) -> tuple[Any, Any, int, int]:
        """What the core's step takes: buffers, the first token that is seen, and where the next one goes."""
        room, first = layer.room(1), layer.first
        assert room.arrays is not None
        last = layer.first + layer.count
        return *room.arrays, max(layer.first, last + 1 - self.window) if self.window else first, last


class States(NamedTuple):
    """The states that a delta rule expects instead of tokens.

    Attributes:
        window: [1, channels, tokens], the last inputs of its convolution.
        state: [1, heads, keys, values], float32.
        dtype: of the inputs.
    """

    window: tuple[int, ...]
    state: tuple[int, ...]
    dtype: torch.dtype

    def taken(self, layer: Any, length: int) -> Any:
        """The layer of a cache; None where it is another one."""
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
        """What the core's step takes, and changes: both states."""
        return *state_arrays(layer.conv_states[0], layer.recurrent_states[0]), 0, 0


def _is_plain(tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a tensor is what the core may read and write in place."""
    if tensor is None or tensor.shape != shape or tensor.dtype != dtype or dtype not in FLOATS:
        return False
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.requires_grad


def form_of(keys: torch.Tensor | None, values: torch.Tensor | None) -> Form | None:
    """What keys and values have in common; None if they do not fit together."""
    if keys is None or values is None or keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        return None
    if keys.dtype != values.dtype or keys.device != values.device:
        return None
    widths = keys.shape[3], values.shape[3]
    return Form(keys.shape[0], keys.shape[1], widths, keys.dtype, keys.device.type)


def _room_for(keys: torch.Tensor, values: torch.Tensor, capacity: int) -> Room:
    """New buffers that start with these tokens."""
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
    """Tokens without the rest of their buffer."""
    return None if tokens is None else tokens.clone()

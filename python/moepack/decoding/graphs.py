"""Decoding on a GPU by replaying a recorded step: one launch per token instead of hundreds.

A decoding step of a packed model consists of about a thousand small kernels, and launching them takes longer than
running them. `StepGraphs` captures the kernels of one step in a CUDA graph and replays it for every token. Everything
that changes between tokens is in tensors with fixed addresses: the input, its position and the mask. Keys and values
are appended to buffers with spare room (`moepack.decoding.cache`). Attention reads the whole buffers and masks free
slots.

Invariants:
- A recording is valid for the buffers of one cache and an unchanged model. If the buffers grow, or anything that was
  read is replaced, a new recording is made.
- The first step of a cache is never recorded, because it loads kernels and allocates library workspaces. Caches that
  alternate are therefore not recorded.
- Prompts, and steps with sliding windows, with keys and values in 8 bits, or of models on several GPUs, run in passes
  (`moepack.decoding.passes`), which read any cache.
- Steps that cannot be recorded (layers on the CPU, an operation that synchronizes with the device) run in transformers.
- A recorded step computes norms and rotary embeddings by kernels with the same results (`moepack.backends.gpu.step`),
  and layers of known families in few launches (`moepack.decoding.layers`).
- If experts are moved to and from the device, the host takes part in every layer. The step then consists of one graph
  for each section between two expert layers (`moepack.backends.gpu.recording`).
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicLayer

from moepack.backends.gpu.recording import Unwritten, record
from moepack.decoding.cache import Appended, GrowingLayer, Room
from moepack.decoding.held import Span
from moepack.decoding.layers import Replacements
from moepack.decoding.passes import MOST_PROMPTS, ROWS, STEPS, Passes
from moepack.decoding.signature import cache_name
from moepack.decoding.translation import Guard, Unknown, require
from moepack.modules.embedding import embedding_dtype

__all__ = ["StepGraphs"]

Recorder = Callable[[Callable[[], Tensor], torch.device], tuple[Callable[[], None], Tensor]]
"""Records a function on a device; returns a function that repeats it, and the result that each repeat overwrites."""


Result = TypeVar("Result")


class StepGraphs:
    """The decoding steps of one decoder.

    Attributes:
        in_passes: whether steps can only be recorded as passes (`read`).

    Args:
        recorder: records a step.
    """

    def __init__(self, recorder: Recorder = record) -> None:
        self.in_passes = False
        self._recorder = recorder
        self._recording: _Recording | None = None
        self._last: Callable[[], Any] = lambda: None
        self._refusal: str | None = None
        self._lock = Lock()
        self._replacements: tuple[Guard, Replacements] | None = None
        self._passes: Passes | None = None
        self._has_passes = True

    def step(
        self, model: Any, forward: Callable[..., Any], given: dict[str, Tensor], cache: DynamicCache, **seen: Any
    ) -> Tensor:
        """Run one token of each sequence through the decoder.

        Args:
            model: the decoder without its head.
            forward: the forward of its class.
            given: `input_ids` [B, 1] or `inputs_embeds` [B, 1, H].
            cache: the past tokens; the new tokens are appended.
            **seen: `attention_mask`, None or [B, tokens], and `position_ids`, None or [B, 1].

        Returns:
            [B, 1, H].

        Raises:
            Unknown: the step cannot be replayed; nothing has changed.
        """
        mask, positions = seen.get("attention_mask"), seen.get("position_ids")
        require(self._refusal is None, f"this model ({self._refusal})")
        require(mask is None or mask.ndim == 2, "attention masks that are not 2-D")
        require(positions is None or positions.ndim == 2, "positions that are not 2-D")
        layers = _growing(cache)
        require(self._lock.acquire(blocking=False), "concurrent steps of several threads")
        try:
            with torch.inference_mode():
                length = layers[0].get_seq_length()
                rooms = [layer.room(1) for layer in layers]
                recording = self._ready(model, forward, given, cache, rooms, length)
                output = self._possible(lambda: recording.replay(given, length, mask, positions))
            for layer, room in zip(layers, rooms, strict=True):
                layer.show(room, length + 1)
            return output.clone()
        finally:
            self._lock.release()

    def read(
        self,
        model: Any,
        forward: Callable[..., Any],
        ids: Tensor,
        cache: DynamicCache,
        mask: Tensor | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Run tokens of each sequence through the decoder, in recorded passes.

        Args:
            model: the decoder without its head.
            forward: the forward of its class.
            ids: [B, T].
            cache: the past tokens, if there are any; the new tokens are appended.
            mask: None, or [B, tokens].
            positions: None, or [B, 1] for single tokens.

        Returns:
            [B, T, H].

        Raises:
            Unknown: there are no passes for this model, or for these tokens; nothing has changed.
        """
        require(mask is None or (mask.ndim == 2 and bool(mask.all())), "attention masks that hide tokens")
        own = positions is None or bool((positions == cache.get_seq_length()).all())
        require(own, "positions that are not those of the tokens")
        require(self._lock.acquire(blocking=False), "concurrent steps of several threads")
        try:
            with torch.inference_mode():
                passes = self._passes_of(model, forward)
                try:
                    return _read(passes, ids, cache).clone()
                except Unknown:
                    if not passes.works:
                        self._passes = None
                        self._has_passes = False
                    raise
        finally:
            self._lock.release()

    def _passes_of(self, model: Any, forward: Callable[..., Any]) -> Passes:
        """The recorded passes, made anew if the model changed."""
        require(self._has_passes, "models without passes")
        if self._passes is None or not self._passes.holds():
            self._passes, self._has_passes = None, False
            replacements = self._replacements_of(model)
            require(replacements is not None, "models with hooks")
            assert replacements is not None
            self._passes = Passes(model, forward, replacements, recorder=self._recorder)
            self._has_passes = True
        return self._passes

    @contextmanager
    def replaced(self, model: Any) -> Iterator[None]:
        """Run a model's modules in few launches within the context, if possible and no other thread does."""
        if not self._lock.acquire(blocking=False):
            yield
            return
        try:
            replacements = self._replacements_of(model)
            with nullcontext() if replacements is None else replacements.active():
                yield
        finally:
            self._lock.release()

    def _replacements_of(self, model: Any) -> Replacements | None:
        """The replacements, made anew if the model changed; None if it has hooks."""
        if self._replacements is None or not self._replacements[0].holds():
            guard = Guard.of(model)
            self._replacements = (guard, Replacements(model)) if guard.holds() else None
        return None if self._replacements is None else self._replacements[1]

    def _ready(
        self,
        model: Any,
        forward: Callable[..., Any],
        given: dict[str, Tensor],
        cache: DynamicCache,
        rooms: Sequence[Room],
        length: int,
    ) -> "_Recording":
        """Return a recording for these buffers."""
        if self._recording is not None and self._recording.is_for(given, rooms):
            return self._recording
        replacements = self._replacements_of(model)
        self.in_passes = replacements is not None and replacements.is_spread
        require(not self.in_passes, "a step outside of passes on several devices")
        self._recording = None  # frees its memory for the next one
        again, self._last = self._last() is cache, weakref.ref(cache)
        require(again, "the first step of a cache")
        # A `RuntimeError` here means that an operation synchronized with the device, or runs on another device.
        made = self._possible(
            lambda: _Recording(model, forward, given, rooms, length, self._recorder, replacements),
            refusal=RuntimeError,
        )
        self._recording = made
        return made

    def _possible(self, function: Callable[[], Result], refusal: type[RuntimeError] = Unwritten) -> Result:
        """Call a function; an error of type `refusal` means that this model cannot be recorded."""
        try:
            return function()
        except refusal as error:
            self._recording, self._refusal = None, str(error).partition("\n")[0]
            raise Unknown(f"this model ({self._refusal})") from error


def _read(passes: Passes, ids: Tensor, cache: DynamicCache) -> Tensor:
    """Read a prompt or the next token of each sequence; [B, T, H]."""
    batch, tokens = ids.shape
    if tokens == 1:
        require(batch <= STEPS[-1], "steps of many sequences")
        held, start = passes.held(cache, batch, 1), cache.get_seq_length()
        states = passes.states([Span([], 1, start, held, row) for row in range(batch)], False, ids[:, 0])
        held.show(start + 1)
        return states[:batch, None]
    require(batch <= MOST_PROMPTS, "prompts of many sequences")
    most = ROWS[-1] // batch // passes.tile * passes.tile
    require(most > 0, "prompts of many sequences")
    held, start, found = passes.held(cache, batch, tokens), cache.get_seq_length(), []
    for first in range(0, tokens, most):
        part = ids[:, first : first + most]
        count, rows = part.shape[1], passes.rows(part.shape[1])
        spans = [Span([], count, start + first, held, row) for row in range(batch)]
        padded = functional.pad(part, (0, rows - count)) if rows > count else part
        states = passes.states(spans, True, padded.reshape(-1))
        found.append(states[: batch * rows].view(batch, rows, -1)[:, :count])
        if first + most < tokens:
            found[-1] = found[-1].clone()
    held.show(start + tokens)
    return torch.cat(found, 1) if len(found) > 1 else found[0]


class _Recording:
    """A recorded step and its inputs.

    Attributes:
        replay: repeats the step.
    """

    def __init__(
        self,
        model: Any,
        forward: Callable[..., Any],
        given: dict[str, Tensor],
        rooms: Sequence[Room],
        length: int,
        recorder: Recorder,
        replacements: Replacements | None,
    ) -> None:
        ((self._name, example),) = given.items()
        self._guard = Guard.of(model)
        several = len({tensor.device for tensor in model.parameters()}) > 1
        if replacements is None or several or not self._guard.holds():
            raise RuntimeError("hooks, or several devices")
        self._rooms = list(rooms)
        batch, capacity = len(example), rooms[0].capacity
        self._input = example.clone()
        self._place = torch.full((1,), length, device=example.device)
        self._positions = torch.full((batch, 1), length, device=example.device)
        self._hidden = torch.finfo(_dtype(model)).min
        self._mask = torch.full((batch, 1, 1, capacity), self._hidden, dtype=_dtype(model), device=example.device)
        self._visible, self._sees_all = 0, False  # the mask hides everything from `_visible` on; nothing before it
        for room in rooms:  # masked slots are multiplied by zero, and zero times NaN is NaN
            room.keys[:, :, length:].zero_()
            room.values[:, :, length:].zero_()
        appended = Appended(self._rooms, self._place)
        inputs = {self._name: self._input, str(cache_name(type(model).forward)): appended}
        step = partial(forward, **inputs, attention_mask=self._mask, position_ids=self._positions, use_cache=True)
        with replacements.active():
            step()  # loads the kernels that replace modules; writes what the first replay writes again
            self._replay, self._output = recorder(lambda: step().last_hidden_state, example.device)

    def is_for(self, given: dict[str, Tensor], rooms: Sequence[Room]) -> bool:
        """Whether the recording is valid for an input and buffers."""
        ((name, tensor),) = given.items()
        same = name == self._name and tensor.shape == self._input.shape and tensor.dtype == self._input.dtype
        return same and all(map(_is, rooms, self._rooms)) and len(rooms) == len(self._rooms) and self._guard.holds()

    def replay(self, given: dict[str, Tensor], length: int, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Run the token after `length` others; the next replay overwrites the result."""
        self._input.copy_(given[self._name])
        self._place.fill_(length)
        self._positions.fill_(length) if positions is None else self._positions.copy_(positions)
        self._show(length + 1, mask)
        self._replay()
        return self._output

    def _show(self, tokens: int, mask: Tensor | None) -> None:
        """Unmask the first tokens, except those hidden by `mask`."""
        seen = self._mask[:, 0, 0, :tokens]
        if mask is not None:
            seen.copy_(torch.where(mask.to(seen.device, torch.bool), 0.0, self._hidden))
        elif self._sees_all and self._visible == tokens - 1:
            seen[:, -1].zero_()
        else:
            seen.zero_()
        self._mask[:, 0, 0, tokens : max(tokens, self._visible)].fill_(self._hidden)  # after the cache was cropped
        self._visible, self._sees_all = tokens, mask is None


def _growing(cache: DynamicCache) -> list[GrowingLayer]:
    """Convert the layers of a cache to ones that grow in place.

    Raises:
        Unknown: the layers have other types, or differ in length.
    """
    layers: list[Any] = cache.layers
    lengths = {layer.get_seq_length() for layer in layers}
    kinds = {type(layer) for layer in layers} - {DynamicLayer, GrowingLayer}
    require(not kinds, f"caches with layers of the type {', '.join(kind.__name__ for kind in kinds)}")
    require(len(lengths) == 1 and 0 not in lengths, "caches whose layers differ in length")
    for number, layer in enumerate(layers):
        if type(layer) is DynamicLayer:
            layers[number] = GrowingLayer.of(layer)
    return layers


def _is(room: Room, other: Room) -> bool:
    return room.keys is other.keys and room.values is other.values


def _dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a model's activations, also used for attention masks."""
    return embedding_dtype(model.get_input_embeddings())  # type: ignore[operator]

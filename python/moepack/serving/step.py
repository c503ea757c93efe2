"""One forward pass for tokens of many sequences: those that continue by a token and those whose prompts are read.

The tokens of all sequences lie one after another in a batch of one, without padding: linear layers, routers and experts
do not care whose token a row is. Only attention does: `_attend`, registered with transformers as an attention function,
takes the tokens of one sequence after another, appends their keys and values to the sequence's own cache, and calls the
function that the model would have used. So a sequence's cache is transformers' own from beginning to end, and joins and
leaves a batch at no cost.

A model whose attention does not go through transformers' interface, or that keeps other states than keys and values,
takes its sequences one after another. So do sequences whose rotary frequencies depend on their length
(`moepack.runtime.carried`): each has frequencies of its own.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from moepack.runtime.backends.gpu import lost
from moepack.runtime.cache import GrowingLayer
from moepack.runtime.calls import cache_argument
from moepack.runtime.carried import carried_of
from moepack.runtime.families import decoder_of
from moepack.runtime.prefix import new_cache
from moepack.serving.isolation import Outcome, Part, isolated
from moepack.serving.pace import Pace

__all__ = ["Part", "Stepper"]

NAME = "moepack_sequences"
_LAYERS = (DynamicLayer, GrowingLayer, DynamicSlidingWindowLayer)
PROBE = 12
"""Tokens that a model reads once in one pass and once in two."""
ALIKE = 0.05
"""The relative error up to which logits are the same, but for rounding."""
_KINDS = {"full_attention", "sliding_attention"}


@dataclass
class _Batch:
    """The parts of a step, and what their layers share: masks by part, keys and window."""

    parts: Sequence[Part]
    attention: str
    masks: dict[tuple[int, int, int | None], torch.Tensor | None] = field(default_factory=dict)


class Stepper:
    """Lets a model read the next tokens of sequences.

    A part that is alone takes the model's own way, which for a single token may be the core's decoding step. That way
    may cache something else than what the attention function sees: newer classes of DeepSeek cache less, and compute
    the rest anew. Such models have one way only: sequences go together, unless the core decodes them.

    Attributes:
        together: the model takes tokens of several sequences in one pass.
        pace: which way single tokens go.

    Args:
        model: in evaluation mode, on one device.
        relieve: gives up memory that is not needed, where it has run out; whether there was some.
    """

    def __init__(self, model: Any, relieve: Callable[[], bool] = lambda: False) -> None:
        self.model, self._relieve = model, relieve
        self.together = _goes_together(model)
        self.pace = Pace()
        self._carried = carried_of(model)
        with torch.inference_mode():
            self._in_pieces = _reads_in_pieces(model)
            alike = self.together and _is_cached_alike(model)
            self.together &= alike or not _is_core_s(model)
            self._alone = alike or not self.together

    def forward(self, parts: Sequence[Part]) -> list[Outcome]:
        """Read parts, whose caches grow.

        Args:
            parts: one at least.

        Returns:
            The logits behind each part, `[vocabulary]`, or the error that reading it ends with.

        Raises:
            Exception: a GPU is lost (`moepack.runtime.backends.gpu.lost`).
        """
        apart = [part for part in parts if self._carried.depends_on(part.end)]
        alike = [part for part in parts if not self._carried.depends_on(part.end)]
        found = {id(part): outcome for part, outcome in zip(alike, self._alike(alike), strict=True)}
        for part in apart:
            (found[id(part)],) = isolated(self._each if self._alone else self._together, [part], self._relieve)
        return [found[id(part)] for part in parts]

    @property
    def limit(self) -> int | None:
        """The most tokens of a sequence that may share keys and values with others; None for any."""
        return self._carried.limit

    def reads_whole(self, length: int) -> bool:
        """Whether a prompt of `length` tokens needs one pass, because the model computes something else in pieces."""
        return not self._in_pieces or self._carried.depends_on(length)

    def begins_anew(self, read: int, length: int) -> bool:
        """Whether a sequence with `read` tokens in its cache is read again, as the model's own generation does."""
        carried = self._carried
        return carried.rereads and read > 0 and not carried.depends_on(read) and carried.depends_on(length)

    def _alike(self, parts: Sequence[Part]) -> list[Outcome]:
        """Read parts that may share a pass."""
        count, are_single = len(parts), all(len(part.ids) == 1 for part in parts)
        together = not self._alone or (self.together and count > 1 and (not are_single or self.pace.is_together(count)))
        start = time.perf_counter()
        outcomes: list[Outcome] = []
        for group in [parts] if together and parts else [[part] for part in parts]:
            outcomes += isolated(self._together if together else self._each, group, self._relieve)
        if parts and are_single and not any(isinstance(outcome, Exception) for outcome in outcomes):
            self.pace.note(together, count, time.perf_counter() - start)
        return outcomes

    def _together(self, parts: Sequence[Part]) -> Sequence[torch.Tensor]:
        return _together(self.model, parts).unbind()

    def _each(self, parts: Sequence[Part]) -> Sequence[torch.Tensor]:
        rows = []
        for part in parts:
            self._carried.reset()
            rows.append(_alone(self.model, part)[0])
        return rows


def _goes_together(model: Any) -> bool:
    """Whether a model leaves attention to transformers' functions, and keeps nothing but keys and values."""
    config = model.config.get_text_config(decoder=True)
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and config._attn_implementation in ("sdpa", "eager")
        and set(getattr(config, "layer_types", None) or _KINDS) <= _KINDS
        and all(type(layer) in _LAYERS for layer in new_cache(model).layers)
    )


def _reads_in_pieces(model: Any) -> bool:
    """Whether a model reads a prompt in several passes as in one.

    Layers of tokens do. Those that single models bring may never drop what the first pass has read; and some models
    forget the state of linear attention where more than one token follows.
    """
    kinds = {type(layer) for layer in new_cache(model).layers}
    if kinds and kinds <= {*_LAYERS}:
        return True
    if not {kind.__module__ for kind in kinds} <= {DynamicLayer.__module__, GrowingLayer.__module__}:
        return False
    ids, cache, first = list(range(PROBE)), new_cache(model), PROBE // 2
    try:
        whole = _alone(model, Part(ids, 0, new_cache(model)))
        _alone(model, Part(ids[:first], 0, cache))
        pieces = _alone(model, Part(ids[first:], first, cache))
    except Exception as error:
        if lost(error):
            raise
        return False
    return bool((pieces - whole).norm() <= ALIKE * whole.norm())


def _is_cached_alike(model: Any) -> bool:
    """Whether a model that reads a token itself caches what its attention function sees."""
    forms = []
    for read in (_alone, lambda model, part: _together(model, [part])):
        cache = new_cache(model)
        read(model, Part([0], 0, cache))
        forms.append([(layer.keys.shape, layer.values.shape) for layer in cache.layers])
    return forms[0] == forms[1]


def _is_core_s(model: Any) -> bool:
    """Whether the core takes a single token behind another."""
    cache = new_cache(model)
    for position in range(2):
        _alone(model, Part([0], position, cache))
    return getattr(decoder_of(model).forward, "steps", 0) > 0


def _together(model: Any, parts: Sequence[Part]) -> torch.Tensor:
    ids = [token for part in parts for token in part.ids]
    places = [part.position + i for part in parts for i in range(len(part.ids))]
    ends = torch.tensor([len(part.ids) for part in parts]).cumsum(0) - 1
    with _attending(model) as attention:
        output = model(
            input_ids=torch.tensor([ids], device=model.device),
            position_ids=torch.tensor([places], device=model.device),
            use_cache=False,
            logits_to_keep=ends.to(model.device),
            sequences=_Batch(parts, attention),
        )
    logits: torch.Tensor = output.logits[0]
    return logits if len(logits) == len(parts) else logits[ends]  # some classes return logits of all tokens


def _alone(model: Any, part: Part) -> torch.Tensor:
    inputs = {"input_ids": torch.tensor([part.ids], device=model.device), **cache_argument(model, part.cache)}
    logits: torch.Tensor = model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]
    return logits


@contextmanager
def _attending(model: Any) -> Iterator[str]:
    """Let the model's attention be `_attend`; the name of what it was."""
    config = model.config.get_text_config(decoder=True)
    attention = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield attention
    finally:
        config._attn_implementation = attention


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    sequences: _Batch,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the tokens of several sequences, `[1, heads, tokens, width]`; `[1, tokens, heads, width]`."""
    attend = _function(module, sequences.attention)
    is_plain = sequences.attention == "sdpa" and all(others.get(name) is None for name in ("position_bias", "softcap"))
    sizes = [len(part.ids) for part in sequences.parts]
    split = [torch.split(states, sizes, dim=2) for states in (query, key, value)]
    outputs = []
    for number, (part, queries, keys, values) in enumerate(zip(sequences.parts, *split, strict=True)):
        keys, values = part.cache.update(keys, values, module.layer_idx)
        place = number, keys.shape[2], others.get("sliding_window")
        if place not in sequences.masks:
            sequences.masks[place] = _mask(queries, place[1], place[2], sequences.attention)
        mask = sequences.masks[place]
        if is_plain and mask is None:
            outputs.append(_attend_all(queries, keys, values, others.get("scaling")))
        else:
            outputs.append(attend(module, queries, keys, values, mask, **others)[0])
    return torch.cat(outputs, dim=1), None


def _attend_all(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Attention of a token that sees all others, `[1, heads, 1, width]`; `[1, 1, heads, width]`.

    The heads that share keys and values are taken as tokens of one head. Where torch is left to repeat keys and values
    for each head, it takes 5 times as long behind 50 tokens, and 18 times behind 600 (32 heads in 4 groups, Zen 3).
    """
    heads, groups = queries.shape[1], keys.shape[1]
    grouped = queries.reshape(1, groups, heads // groups, -1)
    found = functional.scaled_dot_product_attention(grouped, keys, values, scale=scale)
    return found.reshape(1, 1, heads, -1)


def _function(module: Any, attention: str) -> Callable[..., Any]:
    """An attention function by name; the eager one is a model's own."""
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function: Callable[..., Any] = AttentionInterface().get(attention, own)
    return function


def _mask(queries: torch.Tensor, keys: int, window: int | None, attention: str) -> torch.Tensor | None:
    """What the last tokens of a sequence see of its `keys` last ones; None where each sees all."""
    count = queries.shape[2]
    if count == 1 and (window is None or keys <= window):
        return None
    places = torch.arange(keys, device=queries.device)
    own = places[keys - count :, None]
    seen = places <= own
    if window is not None:
        seen &= places > own - window
    if attention == "eager":
        hidden = torch.finfo(queries.dtype).min
        return torch.zeros_like(seen, dtype=queries.dtype).masked_fill(~seen, hidden)[None, None]
    return seen[None, None]


AttentionInterface.register(NAME, _attend)

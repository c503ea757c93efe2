"""One forward pass for tokens of many sequences, both single next tokens and prompts.

The tokens of all sequences are concatenated in a batch of one, without padding, because linear layers, routers and
experts treat rows independently. Only attention depends on the sequence: `_attend`, registered with transformers as an
attention function, processes the sequences in turn, appends their keys and values to each sequence's own cache, and
calls the model's original attention function. A sequence's cache is therefore always transformers' own, and joins and
leaves a batch at no cost.

On a GPU, models with recorded passes (`moepack.decoding.passes`) use these instead: one for single tokens, others for
prompts. The device chooses tokens, and the next step can begin before the host has read them (`Flight`).

Models whose attention bypasses transformers' interface, or that keep states other than keys and values, run their
sequences one after another. So do sequences whose rotary frequencies depend on their length
(`moepack.decoding.carried`), because each needs its own frequencies.
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

from moepack.backends.gpu import lost
from moepack.decoding.cache import GrowingLayer, GrowingWindow
from moepack.decoding.carried import carried_of
from moepack.decoding.decoder import passes_of
from moepack.decoding.drawing import GREEDY, Draw
from moepack.decoding.families import decoder_of
from moepack.decoding.held import Held, Span
from moepack.decoding.passes import MOST_PROMPTS, ROWS, STEPS, Passes, Ready
from moepack.decoding.prefix import kv_bits, new_cache
from moepack.decoding.signature import cache_argument
from moepack.decoding.translation import Unknown
from moepack.serving.adapters import Adapters
from moepack.serving.isolation import Chosen, Outcome, Part, isolated
from moepack.serving.pace import Pace
from moepack.serving.reading import Reading

__all__ = ["Flight", "Part", "Stepper"]

NAME = "moepack_sequences"
_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Transformers' layers that keep only keys and values. The models' own subclasses may keep more."""
PROBE = 12
"""Number of tokens of the test that compares one pass with two."""
ALIKE = 0.05
"""Relative error below which logits count as equal up to rounding."""
_KINDS = {"full_attention", "sliding_attention"}


@dataclass
class _Batch:
    """The parts of a step, and the masks shared by all layers, keyed by part, number of keys and window."""

    parts: Sequence[Part]
    attention: str
    masks: dict[tuple[int, int, int | None], torch.Tensor | None] = field(default_factory=dict)


@dataclass
class Flight:
    """A step of single tokens that the device runs while the host does something else.

    Attributes:
        parts: its parts; their caches get the tokens when the results are taken.
    """

    parts: list[Part]
    _held: list[Held]
    _ready: Ready

    def outcomes(self, wanted: Sequence[bool]) -> list[Outcome]:
        """Wait for the results; caches of parts that are not wanted stay as they are."""
        tokens = self._ready.tokens()
        for part, held, is_wanted in zip(self.parts, self._held, wanted, strict=True):
            if is_wanted:
                held.show(part.end)
        return [Chosen(*pair) for pair in zip(self._ready.logits, tokens, strict=True)]


class Stepper:
    """Runs the next tokens of sequences through a model.

    A single part uses the model's own forward, which for a single token may be the core's decoding step. That forward
    may cache something other than what the attention function sees: newer DeepSeek classes cache less and recompute the
    rest. Such models always run sequences together, unless the core decodes them.

    Attributes:
        together: whether the model can run tokens of several sequences in one pass.
        pace: chooses how single tokens are run.

    Args:
        model: a model in evaluation mode on one device.
        relieve: frees memory that is not needed, called when memory runs out; returns whether it freed any.
        adapters: adapters of the model that parts may use.
        apart: run each part in a pass of its own, so that its rounding does not depend on others.
    """

    def __init__(
        self,
        model: Any,
        relieve: Callable[[], bool] = lambda: False,
        adapters: Adapters | None = None,
        apart: bool = False,
    ) -> None:
        self.model, self._relieve, self._apart = model, relieve, apart
        self._adapters = adapters or Adapters(model)
        self.together = _goes_together(model)
        self.pace = Pace()
        self._carried = carried_of(model)
        self._passes = None if apart or self._adapters.names else passes_of(model)
        with torch.inference_mode():
            self._in_pieces = _reads_in_pieces(model)
            alike = self.together and _is_cached_alike(model)
            self.together &= alike or not _is_core_s(model)
            self._alone = alike or not self.together

    def prepare(self, slots: int, context: int) -> None:
        """Record the passes that sequences will need, each for a fraction of a second, before any of them waits."""
        if self._passes is None:
            return
        try:
            self._passes.prepare(slots, slots * context, kv_bits(self.model) is not None)
        except Unknown:
            self._keep_passes()

    def _keep_passes(self) -> None:
        """Drop the passes after one was refused, unless others may still run."""
        if self._passes is not None and not (self._passes.works and self._passes.holds()):
            self._passes = None

    def forward(self, parts: Sequence[Part]) -> list[Outcome]:
        """Read parts and extend their caches.

        Args:
            parts: at least one part.

        Returns:
            For each part, the logits after it, shape (vocabulary,), those of each token of a scored part, shape
            (tokens, vocabulary), or the error that reading it raised.

        Raises:
            Exception: a GPU is lost (`moepack.backends.gpu.lost`).
        """
        apart = [part for part in parts if self._carried.depends_on(part.end)]
        alike = [part for part in parts if not self._carried.depends_on(part.end)]
        found = {id(part): outcome for part, outcome in zip(alike, self._alike(alike), strict=True)}
        for part in apart:
            (found[id(part)],) = isolated(self._each if self._alone else self._together, [part], self._relieve)
        return [found[id(part)] for part in parts]

    def begin(self, parts: list[Part]) -> Flight | None:
        """Begin a step of single tokens; None if the model has no recorded passes."""
        if self._passes is None or not 0 < len(parts) <= STEPS[-1]:
            return None
        try:
            return self._flight(parts, [part.ids for part in parts])
        except (Unknown, torch.OutOfMemoryError):
            return None

    def follow(self, flight: Flight) -> Flight | None:
        """Begin the step after one that still runs, with the tokens that it chooses; None if there is no room."""
        passes = self._passes
        if passes is None or not all(passes.fits(part.cache, 2) for part in flight.parts):
            return None
        parts = [part.following() for part in flight.parts]
        return self._flight(parts, [[-1 - row] for row in range(len(parts))])

    def _flight(self, parts: list[Part], ids: list[list[int]]) -> Flight:
        """Begin a step with these tokens."""
        passes = self._passes
        assert passes is not None
        held = [passes.held(part.cache, 1, 1) for part in parts]
        spans = [Span(*each) for each in zip(ids, [1] * len(parts), [p.position for p in parts], held, strict=True)]
        return Flight(parts, held, passes.ready(spans, is_prompt=False, draws=_draws(parts)))

    @property
    def limit(self) -> int | None:
        """Maximum tokens of a sequence that may share keys and values with others; None for no limit."""
        return self._carried.limit

    def reads_whole(self, length: int) -> bool:
        """Return whether a prompt of `length` tokens needs one pass, because chunks would change the outputs."""
        return not self._in_pieces or self._carried.depends_on(length)

    def begins_anew(self, read: int, length: int) -> bool:
        """Return whether a sequence with `read` cached tokens must be read again, as in the model's own generation."""
        carried = self._carried
        return carried.rereads and read > 0 and not carried.depends_on(read) and carried.depends_on(length)

    def read(self, reading: Reading, most: int) -> bool:
        """Read the next tokens of a text, at most `most` unless it needs one pass; return whether it was read."""
        self._adapters.activate(reading.adapter)
        if reading.cache is None:
            reading.cache = new_cache(self.model)
        start = reading.position
        end = len(reading.ids) if self.reads_whole(len(reading.ids)) else start + most
        self._carried.reset()
        ids = torch.tensor([reading.ids[start:end]], device=self.model.device)
        cached = cache_argument(self.model, reading.cache)
        output = decoder_of(self.model)(input_ids=ids, **cached, use_cache=True)
        states: torch.Tensor = output.last_hidden_state[0]
        return reading.take(states)

    def _alike(self, parts: Sequence[Part]) -> list[Outcome]:
        """Read parts that can share a pass."""
        if self._passes is not None and parts and not any(part.is_scored or part.adapter for part in parts):
            return isolated(self._passed, parts, self._relieve)
        count, are_single = len(parts), all(len(part.ids) == 1 for part in parts)
        can_share = self.together and count > 1 and not self._apart
        together = not self._alone or (can_share and (not are_single or self.pace.is_together(count)))
        start = time.perf_counter()
        outcomes: list[Outcome] = []
        for group in [parts] if together and parts and not self._apart else [[part] for part in parts]:
            outcomes += isolated(self._together if together else self._each, group, self._relieve)
        if parts and are_single and not any(isinstance(outcome, Exception) for outcome in outcomes):
            self.pace.note(together, count, time.perf_counter() - start)
        return outcomes

    def _passed(self, parts: Sequence[Part]) -> Sequence[torch.Tensor | Chosen]:
        """Read parts in recorded passes: one for single tokens, and others for prompts."""
        passes = self._passes
        assert passes is not None
        try:
            if not passes.holds():
                raise Unknown("the model changed")
            held = {id(part): passes.held(part.cache, 1, len(part.ids)) for part in parts}
            found: dict[int, Chosen] = {}
            for group in _groups(parts, passes):
                spans = [Span(part.ids, len(part.ids), part.position, held[id(part)]) for part in group]
                is_prompt = len(group[0].ids) > 1
                ready = passes.ready(spans, is_prompt, _draws(group))
                logits = ready.logits.clone()  # another pass of this size may follow
                for part, row, token in zip(group, logits, ready.tokens(), strict=True):
                    found[id(part)] = Chosen(row, token)
        except Unknown:
            self._keep_passes()
            return self._together(parts) if self.together else self._each(parts)
        for part in parts:
            held[id(part)].show(part.end)
        return [found[id(part)] for part in parts]

    def _together(self, parts: Sequence[Part]) -> Sequence[torch.Tensor]:
        """Read parts in one pass, or in one for each adapter if they cannot share it."""
        if self._adapters.can_mix or len({part.adapter for part in parts}) == 1:
            with self._adapters.of([part.adapter for part in parts for _ in part.ids]):
                return _together(self.model, parts)
        found: dict[int, torch.Tensor] = {}
        for adapter in sorted({part.adapter for part in parts}, key=lambda name: name != self._adapters.active):
            group = [part for part in parts if part.adapter == adapter]
            found |= zip(map(id, group), self._together(group), strict=True)
        return [found[id(part)] for part in parts]

    def _each(self, parts: Sequence[Part]) -> Sequence[torch.Tensor]:
        rows = []
        for part in parts:
            self._adapters.activate(part.adapter)
            self._carried.reset()
            rows.append(_alone(self.model, part))
        return rows


def _draws(parts: Sequence[Part]) -> list[Draw] | None:
    """The draws of a step; None if all tokens are the likeliest."""
    drawn = any(part.draw is not None for part in parts)
    return [part.draw or GREEDY for part in parts] if drawn else None


def _groups(parts: Sequence[Part], passes: Passes) -> Iterator[list[Part]]:
    """Divide parts into passes: single tokens, and prompts."""
    singles = [part for part in parts if len(part.ids) == 1]
    for first in range(0, len(singles), STEPS[-1]):
        yield singles[first : first + STEPS[-1]]
    group: list[Part] = []
    for part in parts:
        if len(part.ids) == 1:
            continue
        rows = sum(passes.rows(len(each.ids)) for each in (*group, part))
        if group and (rows > ROWS[-1] or len(group) == MOST_PROMPTS):
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _goes_together(model: Any) -> bool:
    """Return whether a model uses transformers' attention interface and caches only keys and values."""
    config = model.config.get_text_config(decoder=True)
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and config._attn_implementation in ("sdpa", "eager")
        and set(getattr(config, "layer_types", None) or _KINDS) <= _KINDS
        and all(_keeps_tokens(layer) for layer in new_cache(model).layers)
    )


def _keeps_tokens(layer: Any) -> bool:
    """Return whether a cache layer keeps keys and values and nothing else."""
    return type(layer) in _LAYERS or isinstance(layer, (GrowingLayer, GrowingWindow))


def _reads_in_pieces(model: Any) -> bool:
    """Return whether reading a prompt in several passes gives the same logits as in one.

    True for caches of keys and values. Other models are tested: some models' own cache layers never drop what the first
    pass has read, and some models lose the state of linear attention if more than one token follows.
    """
    layers = new_cache(model).layers
    if layers and all(map(_keeps_tokens, layers)):
        return True
    if not all(_keeps_tokens(layer) or type(layer).__module__ == DynamicLayer.__module__ for layer in layers):
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
    """Return whether a model's own forward caches the same shapes as its attention function sees."""
    forms = []
    for read in (_alone, lambda model, part: _together(model, [part])):
        cache = new_cache(model)
        read(model, Part([0], 0, cache))
        forms.append([(layer.keys.shape, layer.values.shape) for layer in cache.layers])
    return forms[0] == forms[1]


def _is_core_s(model: Any) -> bool:
    """Return whether the core runs the step of a single token."""
    cache = new_cache(model)
    for position in range(2):
        _alone(model, Part([0], position, cache))
    return getattr(decoder_of(model).forward, "steps", 0) > 0


def _together(model: Any, parts: Sequence[Part]) -> list[torch.Tensor]:
    ids = [token for part in parts for token in part.ids]
    places = [part.position + i for part in parts for i in range(len(part.ids))]
    sizes = [len(part.ids) if part.is_scored else 1 for part in parts]
    ends = torch.tensor([len(part.ids) for part in parts]).cumsum(0).tolist()
    kept = torch.tensor([row for end, size in zip(ends, sizes, strict=True) for row in range(end - size, end)])
    with _attending(model) as attention:
        output = model(
            input_ids=torch.tensor([ids], device=model.device),
            position_ids=torch.tensor([places], device=model.device),
            use_cache=False,
            logits_to_keep=kept.to(model.device),
            sequences=_Batch(parts, attention),
        )
    logits: torch.Tensor = output.logits[0]
    rows = logits if len(logits) == len(kept) else logits[kept]  # some classes return the logits of all tokens
    return [own if part.is_scored else own[0] for part, own in zip(parts, torch.split(rows, sizes), strict=True)]


def _alone(model: Any, part: Part) -> torch.Tensor:
    inputs = {"input_ids": torch.tensor([part.ids], device=model.device), **cache_argument(model, part.cache)}
    kept = len(part.ids) if part.is_scored else 1
    logits: torch.Tensor = model(**inputs, use_cache=True, logits_to_keep=kept).logits[0, -kept:]
    return logits if part.is_scored else logits[0]


@contextmanager
def _attending(model: Any) -> Iterator[str]:
    """Set the model's attention to `_attend` temporarily; yield the name of the original."""
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
    """Compute attention for the tokens of several sequences.

    The inputs have shape (1, heads, tokens, width), the output (1, tokens, heads, width).
    """
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
    """Compute unmasked attention for one token.

    The queries have shape (1, heads, 1, width), the output (1, 1, heads, width). Heads that share keys and values are
    treated as tokens of one head. Letting torch repeat keys and values for each head takes 5 times as long after 50
    tokens, and 18 times after 600 (32 heads in 4 groups, Zen 3).
    """
    heads, groups = queries.shape[1], keys.shape[1]
    grouped = queries.reshape(1, groups, heads // groups, -1)
    found = functional.scaled_dot_product_attention(grouped, keys, values, scale=scale)
    return found.reshape(1, 1, heads, -1)


def _function(module: Any, attention: str) -> Callable[..., Any]:
    """Return an attention function by name. The eager one is defined in the model's own module."""
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function: Callable[..., Any] = AttentionInterface().get(attention, own)
    return function


def _mask(queries: torch.Tensor, keys: int, window: int | None, attention: str) -> torch.Tensor | None:
    """Return the mask of the last tokens over the last `keys` keys; None if no mask is needed."""
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

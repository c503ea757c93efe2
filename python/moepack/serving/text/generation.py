"""Text generation and timing: runs transformers' `generate` and streams each token."""

import functools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import Cache

from moepack.backends.gpu import lost
from moepack.decoding.carried import carried_of
from moepack.decoding.finite import are_finite, non_finite
from moepack.decoding.prefix import Prefix, kv_bits, new_cache
from moepack.decoding.signature import cache_argument, cache_name
from moepack.decoding.vocabulary import require_head, require_known, vocabulary_of
from moepack.errors import MoepackWarning, NonFiniteError
from moepack.serving.text.prompts import Prompt, positions, prompt_ids
from moepack.serving.text.sampling import Sampling, Steered
from moepack.serving.text.stream import TextStream, end_strings, end_tokens, hidden_tokens

__all__ = ["GenerationReport", "Memory", "generate"]

_CACHE = cache_name(GenerationMixin.prepare_inputs_for_generation) or "past_key_values"
"""The name of the argument for keys and values in the installed transformers' `generate`."""

_NEVER = -1
"""An id that no token has: transformers' `generate` takes None for the published end tokens."""

_PLAIN = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "cache_implementation": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "stop_strings": None,
}
"""Overrides of published settings: search methods that cannot stream text, other caches, and stop strings, which are
handled like those of `Sampling`."""


@dataclass(frozen=True)
class GenerationReport:
    """The result of `generate`.

    Attributes:
        text: the generated text, without the prompt.
        prompt_tokens: the number of tokens in the prompt.
        tokens: the number of generated tokens.
        first_token_seconds: time from the call to the first token, including the prompt.
        tokens_per_second: speed after the first token; 0 if there was only one.
    """

    text: str
    prompt_tokens: int
    tokens: int
    first_token_seconds: float
    tokens_per_second: float

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


@dataclass
class Memory:
    """Keys and values of the last call of `generate`. The next call reuses them for a common prefix of the prompt."""

    prefix: Prefix | None = field(default=None, repr=False)


class _Streamer:
    """The streamer for transformers' `generate`: called with the prompt's ids first, then with each new id."""

    def __init__(self, stream: TextStream, on_text: Callable[[str], None]) -> None:
        self.stream = stream
        self.on_text = on_text
        self.ids: list[int] = []
        self.times: list[float] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Skip the prompt, then add tokens."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times.append(time.perf_counter())
        new = value.reshape(-1).tolist()
        self.ids += new
        self._hand_out(self.stream.put(new))

    def end(self) -> None:
        """Pass on the remaining text."""
        self._hand_out(self.stream.end())

    def _hand_out(self, text: str) -> None:
        if text:
            self.on_text(text)

    def is_done(self, input_ids: torch.Tensor, scores: torch.Tensor, **others: Any) -> torch.Tensor:
        """Stopping criterion: whether a stop string was generated."""
        return torch.full((len(input_ids),), self.stream.stopped, device=input_ids.device)


class _Logits:
    """A logits processor that checks the scores of the next token and changes nothing."""

    def __init__(self) -> None:
        self._read: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Check the scores of the next token, given the tokens so far."""
        if not are_finite(scores):
            self._read = input_ids
            raise NonFiniteError("the model's logits are not finite")
        return scores

    @contextmanager
    def located(self, model: Any, prompt: torch.Tensor) -> Iterator[None]:
        """Make the error name the layer."""
        try:
            yield
        except NonFiniteError as error:
            if self._read is None:
                raise
            beside = {"decoder_input_ids": self._read} if model.config.is_encoder_decoder else {}
            raise non_finite(model, {"input_ids": prompt if beside else self._read, **beside}) from error


def generate(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    sampling: Sampling | None = None,
    *,
    on_text: Callable[[str], None] | None = None,
    memory: Memory | None = None,
) -> GenerationReport:
    """Continue a prompt or answer a chat; with an encoder-decoder, generate its target (for Switch, of sentinels).

    Args:
        model: a loaded model, on any device.
        tokenizer: its tokenizer.
        prompt: the text (for Switch, with `<extra_id_0>` and so on in place of missing text), or chat messages.
        sampling: sampling and stopping settings; None generates 64 tokens greedily. The states of torch's generators
            are restored afterwards.
        on_text: called with each new piece of text.
        memory: keeps keys and values for the next call. Not supported for encoder-decoders.

    Raises:
        UnsupportedModelError: the model has no language-model head.
        ValueError: the prompt has no tokens, or it is a chat and the tokenizer has no template.
        TokenError: the model's embedding has no row for a token of the prompt.
        NonFiniteError: the model computes NaN or infinity; the message names the layer.
        DeviceError: a GPU failed or disappeared during generation.

    Warns:
        MoepackWarning: prompt and answer may exceed the model's context length.
    """
    sampling = sampling or Sampling()
    ids = _checked_ids(model, tokenizer, prompt, sampling.max_new_tokens)
    published = end_tokens(model, tokenizer)
    streamer = _streamer(tokenizer, sampling, {*published, *sampling.stop_token_ids}, end_strings(model), on_text)
    inputs = torch.tensor([ids], device=model.device)
    logits = _Logits()
    ends = sampling.ends(published)
    steered = Steered(sampling, 1 if model.config.is_encoder_decoder else len(ids), ends)
    carried_of(model)  # reset per-sequence state at the start of each sequence
    start = time.perf_counter()
    with (
        _device_failures(),
        logits.located(model, inputs),
        torch.inference_mode(),
        _seeded(sampling.seed, model.device),
        _remembered(memory, model, ids, streamer) as kept,
    ):
        model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList([streamer.is_done]),
            logits_processor=LogitsProcessorList([logits, *([steered] if steered.is_needed else [])]),
            remove_invalid_values=False,
            **_PLAIN,
            **({} if ends == published else {"eos_token_id": sorted(ends) or _NEVER}),
            **kept,
            **sampling.arguments(),
        )
    return _report(streamer, len(ids), start)


def _checked_ids(model: Any, tokenizer: Any, prompt: Prompt, new: int) -> list[int]:
    """Return the tokens of a prompt; raises and warns as `generate` does before it runs the model."""
    require_head(model)
    ids = prompt_ids(tokenizer, prompt)
    require_known(ids, vocabulary_of(model), tokenizer)
    require_known(_forced(model), vocabulary_of(model), tokenizer, "generation_config.json")
    _warn_of_length(model, len(ids), new)
    return ids


def _streamer(
    tokenizer: Any,
    sampling: Sampling,
    ends: Iterable[int],
    published: tuple[str, ...],
    on_text: Callable[[str], None] | None,
) -> _Streamer:
    """Create a streamer that ends at the first stop string, including the model's, and hides end tokens."""
    stream = TextStream(tokenizer, (*sampling.stop, *published), hidden_tokens(ends, tokenizer))
    return _Streamer(stream, on_text or (lambda text: None))


def _forced(model: Any) -> list[int]:
    """Tokens that the published settings force into every text."""
    names = ("forced_bos_token_id", "forced_eos_token_id")
    given = [getattr(model.generation_config, name, None) for name in names]
    return [token for value in given for token in (value if isinstance(value, list) else [value]) if token is not None]


@contextmanager
def _device_failures() -> Iterator[None]:
    """Convert GPU failures to `DeviceError`."""
    try:
        yield
    except RuntimeError as error:
        failure = lost(error)
        if failure is None:
            raise
        raise failure from error


def _warn_of_length(model: Any, prompt: int, new: int) -> None:
    limit = positions(model)
    if not model.config.is_encoder_decoder and limit is not None and prompt + new > limit:
        message = f"{prompt} prompt tokens and {new} new tokens exceed the context length of {limit} tokens"
        warnings.warn(message, MoepackWarning, stacklevel=4)


@contextmanager
def _remembered(memory: Memory | None, model: Any, ids: list[int], streamer: _Streamer) -> Iterator[dict[str, Any]]:
    """Yield the initial cache as an argument of `generate`. After an interrupted call the memory is empty.

    Without a memory, transformers' `generate` makes the cache, unless the model stores keys and values in 8 bits.
    """
    if memory is None:
        with _renewed(model):
            yield {_CACHE: new_cache(model)} if kv_bits(model) is not None else {}
        return
    carried, prefix = carried_of(model), memory.prefix
    cache = prefix.continued(ids) if prefix is not None and prefix.shared(ids) else new_cache(model)
    memory.prefix = None
    carried.reset()
    with _renewed(model):
        yield {_CACHE: cache}
    prefix = Prefix((ids + streamer.ids)[: cache.get_seq_length()], cache, carried.limit)
    memory.prefix = prefix if prefix.is_useful else None


@contextmanager
def _renewed(model: Any) -> Iterator[None]:
    """Give a model that drops its cache and reads the sequence again (`Carried.rereads`) a new one in 8 bits."""
    if kv_bits(model) is None or not carried_of(model).rereads:
        yield
        return
    prepare = model.prepare_inputs_for_generation

    @functools.wraps(prepare)
    def renewed(*args: Any, **kwargs: Any) -> Any:
        inputs = prepare(*args, **kwargs)
        has_cache = any(isinstance(value, Cache) for value in inputs.values())
        return inputs if has_cache else {**inputs, **cache_argument(model, new_cache(model))}

    model.prepare_inputs_for_generation = renewed
    try:
        yield
    finally:
        del model.prepare_inputs_for_generation


def _report(streamer: _Streamer, prompt_tokens: int, start: float) -> GenerationReport:
    times = streamer.times
    first = times[0] - start if times else 0.0
    speed = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    return GenerationReport(streamer.stream.text, prompt_tokens, len(streamer.ids), first, speed)


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed) if seed is not None else torch.seed()
        yield

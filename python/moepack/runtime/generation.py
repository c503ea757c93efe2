"""Generating text and saying how fast: transformers' `generate`, with each token handed out as it comes.

Invariant: the pieces handed to `on_text` join to the whole text, and none ends inside a UTF-8 character.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["GenerationReport", "generate"]


@dataclass(frozen=True)
class GenerationReport:
    """What was generated.

    Attributes:
        text: the generated text, without the prompt.
        prompt_tokens: tokens of the prompt.
        tokens: generated tokens.
        first_token_seconds: from the call to the first token, that is, reading the prompt.
        tokens_per_second: of the tokens after the first; 0 where there was none.
    """

    text: str
    prompt_tokens: int
    tokens: int
    first_token_seconds: float
    tokens_per_second: float

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


class _Streamer:
    """What transformers' `generate` calls with the prompt's ids first, then with each new id."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None], hidden: set[int]) -> None:
        self.tokenizer = tokenizer
        self.on_text = on_text
        self.hidden = hidden
        self.ids: list[int] = []
        self.times: list[float] = []
        self.text = ""
        self._prompt_seen = False
        self._shown: list[int] = []
        self._pending: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt once, then tokens."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times.append(time.perf_counter())
        new = value.reshape(-1).tolist()
        self.ids += new
        self._pending += [token for token in new if token not in self.hidden]
        self._emit(final=False)

    def end(self) -> None:
        """Hand out what is left."""
        self._emit(final=True)

    def _emit(self, final: bool) -> None:
        """Hand out the text of the pending tokens, unless it ends within a character.

        A token's text may depend on its neighbour (leading spaces), so the pending tokens are decoded after the last
        one that was handed out, and its text is cut off again.
        """
        ids = self._shown + self._pending
        text = self._decode(ids)[len(self._decode(self._shown)) :]
        if not final and text.endswith("\ufffd"):
            return
        self._shown, self._pending = ids[-1:], []
        if text:
            self.text += text
            self.on_text(text)

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    on_text: Callable[[str], None] | None = None,
) -> GenerationReport:
    """Continue a prompt; with an encoder-decoder, write its target (for Switch, what the sentinels stand for).

    Args:
        model: a loaded model, on any device.
        tokenizer: its tokenizer.
        prompt: the text; for Switch with `<extra_id_0>` and so on where text is missing.
        max_new_tokens: the most tokens to generate.
        temperature: 0 takes the likeliest token each time, anything above samples.
        seed: of torch's generators, for sampling; their states are restored afterwards.
        on_text: called with each new piece of text.

    Raises:
        ValueError: the prompt has no tokens, or a number is out of range.
    """
    if max_new_tokens < 1 or temperature < 0:
        raise ValueError("max_new_tokens must be at least 1, and temperature at least 0")
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    if inputs.input_ids.numel() == 0:
        raise ValueError("the prompt has no tokens")
    hidden = {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id} - {None}
    streamer = _Streamer(tokenizer, on_text or (lambda text: None), hidden)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    with torch.inference_mode(), _seeded(seed, model.device):
        start = time.perf_counter()
        model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            **sampling,
        )
    return _report(streamer, inputs.input_ids.numel(), start)


def _report(streamer: _Streamer, prompt_tokens: int, start: float) -> GenerationReport:
    times = streamer.times
    first = times[0] - start if times else 0.0
    speed = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0
    return GenerationReport(streamer.text, prompt_tokens, len(streamer.ids), first, speed)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield

"""One answer in the making: its tokens, its sampler, its text, and whom it is handed to."""

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch

from moepack.runtime.sampling import Sampler, Sampling
from moepack.runtime.text import TextStream, hidden_tokens
from moepack.serving.isolation import Part

__all__ = ["Piece", "Sequence"]

Finish = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Piece:
    """What a sequence hands out: text, and at the end, once, how it ended.

    Attributes:
        text: new text; may be empty.
        finish: "stop" at an end token or a stop string, "length" at the most tokens or the time limit, "error" where
            the sequence failed; None before the end.
        tokens: generated so far.
        error: what went wrong, for the user.
    """

    text: str
    finish: Finish | None = None
    tokens: int = 0
    error: str = ""


class Sequence:
    """A prompt and what follows it.

    Attributes:
        ids: prompt and generated tokens.
        read: tokens whose keys and values are in the cache.
        cache: of the model; None before the sequence has its turn.
        cancelled: nobody waits for it any more.

    Args:
        ids: of the prompt.
        sampling: how tokens are chosen, and when the text ends.
        on_piece: takes the pieces, in the engine's thread; must not raise.
        tokenizer: of the model.
        ends: tokens that end an answer.
        seconds: the time from now on that the answer may take.
    """

    def __init__(
        self,
        ids: list[int],
        sampling: Sampling,
        on_piece: Callable[[Piece], None],
        tokenizer: Any,
        ends: frozenset[int],
        seconds: float,
    ) -> None:
        self.ids = list(ids)
        self.prompt = len(ids)
        self.read = 0
        self.cache: Any = None
        self.cancelled = False
        self._sampling, self._sampler, self._ends = sampling, Sampler(sampling), ends
        self._stream = TextStream(tokenizer, sampling.stop, hidden_tokens(ends, tokenizer))
        self._on_piece = on_piece
        self._until = time.monotonic() + seconds

    @property
    def is_late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() > self._until

    def part(self, most: int | None) -> Part:
        """Return the tokens that the model reads next, at most `most` of them; None takes all others, in one pass."""
        end = None if most is None else self.read + most
        return Part(self.ids[self.read : end], self.read, self.cache, most is None)

    def begin(self, cache: Any) -> None:
        """Go on behind the tokens that a cache holds."""
        self.cache, self.read = cache, cache.get_seq_length()

    def take(self, part: Part, logits: torch.Tensor) -> bool:
        """Go on from what the model said behind a part; whether this was the end."""
        self.read += len(part.ids)
        if self.read < len(self.ids):
            return False
        token = self._sampler.choose(logits, self.ids)
        self.ids.append(token)
        text = self._stream.put([token])
        if token in self._ends or self._stream.stopped:
            return self.finish("stop", text)
        if len(self.ids) - self.prompt >= self._sampling.max_new_tokens:
            return self.finish("length", text)
        if text:
            self._on_piece(Piece(text, tokens=len(self.ids) - self.prompt))
        return False

    def finish(self, how: Finish, text: str = "", error: str = "") -> bool:
        """Hand out the end; True.

        A stop string in text that was held back until now counts as the end. A sequence that failed ends even if its
        last tokens cannot be decoded.
        """
        with suppress(Exception) if how == "error" else nullcontext():
            text += self._stream.end()
        how = "stop" if how == "length" and self._stream.stopped else how
        self._on_piece(Piece(text, how, len(self.ids) - self.prompt, error))
        return True

"""One running answer: its tokens, sampler, text and receiver."""

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch

from moepack.serving.isolation import Part
from moepack.serving.text.sampling import Sampler, Sampling
from moepack.serving.text.stream import TextStream, hidden_tokens

__all__ = ["Piece", "Sequence"]

Finish = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Piece:
    """A piece of an answer. The last piece says how the answer ended.

    Attributes:
        text: new text; may be empty.
        finish: "stop" at an end token or a stop string, "length" at the token or time limit, "error" after a failure;
            None before the end.
        tokens: number of tokens generated so far.
        error: error message for the user.
    """

    text: str
    finish: Finish | None = None
    tokens: int = 0
    error: str = ""


class Sequence:
    """A prompt and its answer.

    Attributes:
        ids: prompt and generated token ids.
        read: number of tokens whose keys and values are in the cache.
        cache: the cache of the sequence; None until it has a slot.
        cancelled: whether the client no longer waits for it.

    Args:
        ids: token ids of the prompt.
        sampling: sampling settings and end conditions.
        on_piece: called with each piece, in the engine's thread. Must not raise.
        tokenizer: the tokenizer of the model.
        ends: token ids that end an answer.
        seconds: time limit of the answer in seconds, from now.
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
        """Whether the time limit has passed."""
        return time.monotonic() > self._until

    def part(self, most: int | None) -> Part:
        """Return the next tokens to read, at most `most`; None returns all remaining tokens, for one pass."""
        end = None if most is None else self.read + most
        return Part(self.ids[self.read : end], self.read, self.cache, most is None)

    def begin(self, cache: Any) -> None:
        """Continue after the tokens that a cache holds."""
        self.cache, self.read = cache, cache.get_seq_length()

    def take(self, part: Part, logits: torch.Tensor) -> bool:
        """Process the logits after a part; return whether the sequence ended."""
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
        """Emit the last piece and return True.

        A stop string found in text held back until now counts as the end. A failed sequence ends even if its last
        tokens cannot be decoded.
        """
        with suppress(Exception) if how == "error" else nullcontext():
            text += self._stream.end()
        how = "stop" if how == "length" and self._stream.stopped else how
        self._on_piece(Piece(text, how, len(self.ids) - self.prompt, error))
        return True

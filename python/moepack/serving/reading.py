"""A text whose hidden states are wanted, not an answer: it is read in parts between the steps of the engine."""

from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal

import torch

__all__ = ["Pooling", "Reading"]

Pooling = Literal["mean", "last"]


class Reading:
    """The hidden states of one text after the last norm, pooled.

    Attributes:
        ids: token ids.
        position: number of tokens that have been read.
        cache: keys and values of these; None at the start.
        cancelled: whether the client no longer waits for it.
        result: the pooled state, shape (hidden,), float32.

    Args:
        ids: token ids, at least one.
        pooling: "mean" of all tokens' states, or the "last" one.
        adapter: name of the adapter that reads it; None for the model itself.
    """

    def __init__(self, ids: list[int], pooling: Pooling, adapter: str | None = None) -> None:
        self.ids, self._pooling, self.adapter = ids, pooling, adapter
        self.position = 0
        self.cache: Any = None
        self.cancelled = False
        self.result: Future[torch.Tensor] = Future()
        self._sum: torch.Tensor | None = None

    def take(self, states: torch.Tensor) -> bool:
        """Add the states of the next tokens, shape (tokens, hidden); return whether the text was read."""
        self.position += len(states)
        states = states.float()
        part = states.sum(0) if self._pooling == "mean" else states[-1]
        self._sum = part if self._sum is None or self._pooling == "last" else self._sum + part
        if self.position < len(self.ids):
            return False
        with suppress(Exception):  # the client is gone
            self.result.set_result((self._sum / len(self.ids) if self._pooling == "mean" else self._sum).cpu())
        return True

    def fail(self, error: Exception) -> None:
        """End with an error."""
        with suppress(Exception):
            self.result.set_exception(error)

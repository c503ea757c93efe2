"""Restricts answers to a grammar, with llguidance: a mask of allowed tokens for each step.

llguidance was chosen over xgrammar because it has no dependencies (xgrammar requires triton and TVM), has wheels for
x86-64 and Arm, compiles a grammar in milliseconds without a pass over the vocabulary, and reads JSON schemas, regular
expressions, Lark and GBNF.

Invariant: a grammar that does not compile raises `ValueError` when it is compiled, not while an answer is written.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from moepack.errors import MoepackError

__all__ = ["Budget", "Budgeted", "Grammars"]

CACHED = 32
"""Number of compiled grammars that are kept."""


class Grammars:
    """The grammars for one model.

    Args:
        tokenizer: the model's tokenizer.
        rows: number of logits.
        ends: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, rows: int, ends: Iterable[int]) -> None:
        self._tokenizer, self._rows, self._ends = tokenizer, rows, sorted(ends)
        self._vocabulary: Any = None
        self._lock = threading.Lock()
        self._compiled: dict[str, Any] = {}

    def compiled(self, lark: str) -> "Matched":
        """Return a constraint for one answer, from a grammar in llguidance's Lark syntax. Takes up to a second.

        Raises:
            ValueError: llguidance is not installed, the grammar is not valid, or the tokenizer is not supported.
        """
        if find_spec("llguidance") is None:
            raise ValueError("constrained answers need llguidance: pip install 'moepack[serve]'")
        from llguidance import LLMatcher

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
            matcher = self._compiled.get(lark)
            if matcher is None:
                matcher = LLMatcher(self._vocabulary, LLMatcher.grammar_from_lark(lark), log_level=0)
                if matcher.is_error():
                    raise ValueError(matcher.get_error().strip())
                while len(self._compiled) >= CACHED:
                    self._compiled.pop(next(iter(self._compiled)))
                self._compiled[lark] = matcher
            return Matched(matcher.deep_copy(), self._rows)

    def _read_vocabulary(self) -> Any:
        from llguidance.hf import from_tokenizer

        size = max(self._rows, len(self._tokenizer))
        try:
            return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=self._ends or None)
        except Exception as error:
            raise ValueError(f"the tokenizer does not support constrained answers: {error}") from error


class Matched:
    """The state of one answer in a grammar."""

    def __init__(self, matcher: Any, rows: int) -> None:
        self._matcher, self._rows = matcher, rows

    @property
    def is_complete(self) -> bool:
        """Whether no further token can follow."""
        return bool(self._matcher.is_stopped())

    def allows(self, token: int) -> bool:
        """Return whether a token can follow: 2 us, a tenth of the time of a mask."""
        found = bool(self._matcher.validate_tokens([token]))
        self._check()
        return found

    def allowed(self) -> torch.Tensor:
        """Return the mask of tokens that can follow, shape (logits,)."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return torch.from_numpy(np.unpackbits(packed, count=self._rows, bitorder="little").view(bool))

    def take(self, token: int) -> None:
        """Add a token."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise MoepackError(f"the grammar cannot continue: {self._matcher.get_error().strip()}")


@dataclass(frozen=True)
class Budget:
    """Bounds the tokens of reasoning.

    Attributes:
        limit: maximum tokens.
        opens, closes: the tokens around reasoning; the first may be unknown.
        is_inside: the answer starts inside reasoning.
    """

    limit: int
    opens: int | None
    closes: int
    is_inside: bool


class Budgeted:
    """The state of one answer whose reasoning is bounded, and which may follow a grammar."""

    def __init__(self, budget: Budget, rows: int, grammar: Any = None) -> None:
        self._budget, self._rows, self._grammar = budget, rows, grammar
        self._is_inside, self._count = budget.is_inside, 0

    @property
    def is_complete(self) -> bool:
        """Whether no further token can follow."""
        return self._grammar is not None and self._grammar.is_complete

    @property
    def _must_close(self) -> bool:
        return self._is_inside and self._count >= self._budget.limit

    def allows(self, token: int) -> bool:
        """Return whether a token can follow."""
        if self._must_close:
            return token == self._budget.closes
        return self._grammar is None or self._grammar.allows(token)

    def allowed(self) -> torch.Tensor | None:
        """Return the mask of tokens that can follow, shape (logits,)."""
        if self._must_close:
            mask = torch.zeros(self._rows, dtype=torch.bool)
            mask[self._budget.closes] = True
            return mask
        return None if self._grammar is None else self._grammar.allowed()

    def take(self, token: int) -> None:
        """Add a token."""
        if self._grammar is not None:
            self._grammar.take(token)
        if token in (self._budget.opens, self._budget.closes):
            self._is_inside = token == self._budget.opens
        elif self._is_inside:
            self._count += 1

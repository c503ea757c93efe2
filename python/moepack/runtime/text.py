"""Tokens into text as they come, up to a stop string.

Invariants: the pieces join to the whole text; none ends inside a UTF-8 character, and none holds anything of the stop
string that is complete first, or behind it. What could still become a stop string is held back until it cannot.
"""

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["TextStream", "end_tokens"]


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: those that the model was published with, and the tokenizer's."""
    published = model.generation_config.eos_token_id
    ends = published if isinstance(published, list) else [published]
    return frozenset({*ends, tokenizer.eos_token_id} - {None})


class TextStream:
    """The text of one answer.

    Attributes:
        text: all pieces so far.
        stopped: a stop string has come; whatever comes after it is dropped.

    Args:
        tokenizer: of the model.
        stop: strings that end the text.
        hidden: ids of tokens that are not shown.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), hidden: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.hidden = frozenset(hidden)
        self.text = ""
        self.stopped = False
        self._held = ""
        self._shown: list[int] = []
        self._pending: list[int] = []

    def put(self, ids: Iterable[int]) -> str:
        """Take tokens; return the text that has become certain."""
        self._pending += [token for token in ids if token not in self.hidden]
        return self._release(final=False)

    def end(self) -> str:
        """Return what was held back: no more tokens come."""
        return self._release(final=True)

    def _release(self, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + self._decoded(final)
        found = [(place + len(string), place) for string in self.stop if (place := text.find(string)) >= 0]
        self.stopped = bool(found)
        _, certain = min(found, default=(0, len(text) - (0 if final else self._uncertain(text))))
        self._held = text[certain:]
        self.text += text[:certain]
        return text[:certain]

    def _decoded(self, final: bool) -> str:
        """The text of the pending tokens, or nothing while it ends within a character.

        A token's text may depend on its neighbour (leading spaces), so the pending tokens are decoded after the last
        one that was decoded before, whose text is cut off again.
        """
        ids = self._shown + self._pending
        text = self._decode(ids)[len(self._decode(self._shown)) :]
        if not final and text.endswith("\ufffd"):
            return ""
        self._shown, self._pending = ids[-1:], []
        return text

    def _uncertain(self, text: str) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = max(map(len, self.stop), default=1) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((size for size in lengths if any(string.startswith(text[-size:]) for string in self.stop)), 0)

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

"""The text of an answer, streamed up to a stop string.

Invariants: the pieces join to the text that the tokenizer's `decode` returns for all visible tokens, up to the stop
string that is completed first. No piece ends inside a character. Text that may be the start of a stop string is held
back.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from moepack.decoding.vocabulary import require_head
from moepack.serving.text.detokenizer import Detokenizer

__all__ = ["TextStream", "end_strings", "end_tokens", "hidden_tokens"]


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer, from the generation config and the tokenizer.

    Raises:
        UnsupportedModelError: the model has no language-model head.
    """
    require_head(model)
    published = model.generation_config.eos_token_id
    ends = published if isinstance(published, list) else [published]
    return frozenset({*ends, tokenizer.eos_token_id} - {None})


def end_strings(model: Any) -> tuple[str, ...]:
    """Return the stop strings in the model's generation config."""
    published = getattr(model.generation_config, "stop_strings", None) or []
    return (published,) if isinstance(published, str) else tuple(published)


def hidden_tokens(ends: Iterable[int], tokenizer: Any) -> frozenset[int]:
    """Return the tokens of an answer that are not part of its text: `ends`, padding and the start of a text."""
    return frozenset({*ends, tokenizer.pad_token_id, tokenizer.bos_token_id} - {None})


class TextStream:
    """The text of one answer.

    Attributes:
        text: all pieces so far.
        stopped: whether a stop string was generated; all later text is dropped.
        found: that stop string; None before.

    Args:
        tokenizer: the model's tokenizer.
        stop: strings that end the text.
        hidden: ids of tokens that are not part of the text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), hidden: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.hidden = frozenset(hidden)
        self.text = ""
        self.stopped = False
        self.found: str | None = None
        self._held = ""
        self._detokenizer = Detokenizer(tokenizer)

    def put(self, ids: Iterable[int]) -> str:
        """Add tokens; return the text that has become final."""
        return self._release(self._detokenizer.put(token for token in ids if token not in self.hidden), final=False)

    def end(self) -> str:
        """Return the held-back text after the last token."""
        return self._release(self._detokenizer.end(), final=True)

    def _release(self, text: str, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [(place + len(string), place, string) for string in self.stop if (place := text.find(string)) >= 0]
        self.stopped = bool(found)
        uncertain = 0 if final else self._uncertain(text)
        _, certain, self.found = min(found, default=(0, len(text) - uncertain, None))
        self._held = text[certain:]
        self.text += text[:certain]
        return text[:certain]

    def _uncertain(self, text: str) -> int:
        """The number of characters at the end that may start a stop string."""
        longest = max(map(len, self.stop), default=1) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((size for size in lengths if any(string.startswith(text[-size:]) for string in self.stop)), 0)

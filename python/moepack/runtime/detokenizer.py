"""Tokens into text as they come: the pieces join to what the tokenizer makes of all tokens at once.

The text of a token depends on its neighbours: the first token loses its space, a character may take several tokens, and
a run of byte tokens that is not UTF-8 becomes one replacement character for each byte, valid characters of the run
included. So text is handed out only once no further token can change it:

* A run of byte tokens (SentencePiece's byte fallback) waits for the token that ends it.
* Replacement characters at the end of the text wait: the next token may complete the character.
* Where transformers removes spaces before punctuation, characters that can belong to such a pattern wait.

Each step decodes a window of the last tokens and not the whole text, so the work per token does not grow. A window that
begins inside a character reads correctly from its fourth token on, because a character has at most four bytes. Windows
keep at least `KEPT` tokens.
"""

from collections.abc import Iterable
from typing import Any

from moepack.errors import MoepackError
from moepack.runtime.panics import contained

__all__ = ["Detokenizer"]

#: Tokens that a window keeps, and tokens beyond which it is shortened.
KEPT, MOST = 8, 32
#: Most bytes of an incomplete character. Some decoders write a replacement character for each of them.
INCOMPLETE = 3
REPLACEMENT = "\ufffd"
JOINED = " 'nvr"
"""Characters that occur in transformers' clean-up patterns (" .", " n't", " 've", ...) before the last one. The
clean-up keeps every other character, so no pattern can span the place behind it."""


class Detokenizer:
    """The text of one sequence of tokens.

    Args:
        tokenizer: of transformers. Its decoder may treat the first token of a text differently, strip characters at
            both ends, and spell bytes. It must not change the text of earlier tokens otherwise.

    Raises:
        MoepackError: the tokenizer's decoder fails.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cleans = _cleans(tokenizer)
        self._window: list[int] = []
        self._bytes = 0  # byte tokens at the end of the window
        self._given = 0  # characters of the window's text that were handed out
        self._most = MOST
        self._uncleaned = ""

    def put(self, ids: Iterable[int]) -> str:
        """Take tokens; return the text that no further token can change."""
        settled = len(self._window) - self._bytes
        for token in ids:
            spelled = self._tokenizer.convert_ids_to_tokens(token)
            if spelled is not None:  # ids without a token have no text
                self._bytes = self._bytes + 1 if _is_byte(spelled) else 0
                self._window.append(token)
        end = len(self._window) - self._bytes
        return self._clean(self._settle(end), final=False) if end > settled else ""

    def end(self) -> str:
        """Return the rest of the text: no more tokens come."""
        text = self._decode(self._window)[self._given :] if self._window else ""
        self._window, self._bytes, self._given = [], 0, 0
        return self._clean(text, final=True)

    def _settle(self, end: int) -> str:
        """New text of the window's tokens before `end`."""
        if end > self._most and not self._decode(self._window[end - KEPT : end]):
            return ""  # such as spaces, which decoders strip at the end of a text: they wait for what follows
        text = self._decode(self._window[:end])
        complete = len(text[:-INCOMPLETE]) + len(text[-INCOMPLETE:].rstrip(REPLACEMENT))
        new = text[self._given : complete]
        self._given += len(new)
        if end > self._most:
            self._shorten(text, end)
        return new

    def _shorten(self, text: str, end: int) -> None:
        """Forget the first tokens of the window, unless the text behind what was handed out depends on them."""
        first = end - KEPT
        shorter = self._decode(self._window[first:end])
        if self._given and shorter.endswith(text[self._given - 1 :]):
            self._given += len(shorter) - len(text)
            self._window = self._window[first:]
            self._most = MOST
        else:
            self._most = 2 * end

    def _clean(self, text: str, final: bool) -> str:
        """Remove spaces as transformers does after decoding, in text that is complete up to such a place."""
        if not self._cleans:
            return text
        text = self._uncleaned + text
        complete = text if final else text.rstrip(JOINED)
        self._uncleaned = text[len(complete) :]
        cleaned: str = self._tokenizer.clean_up_tokenization(complete)
        return cleaned

    def _decode(self, ids: list[int]) -> str:
        try:
            with contained():
                text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        except Exception as error:
            raise MoepackError(f"the tokenizer cannot write the text of its tokens: {error}") from error
        return text


def _is_byte(token: str) -> bool:
    """Whether a token spells a byte, as `<0x0A>` does."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _cleans(tokenizer: Any) -> bool:
    """Whether the tokenizer's own `decode` removes spaces; transformers leaves the text of BPE alone."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    return forced or type(model).__name__ != "BPE"

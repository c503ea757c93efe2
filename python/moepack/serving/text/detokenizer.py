"""Incremental detokenization: the pieces join to the text that the tokenizer produces for all tokens at once.

The text of a token depends on its neighbors. The first token loses its space, a character may span several tokens, and
a run of byte tokens that is not valid UTF-8 becomes one replacement character per byte, including valid characters in
the run. Text is therefore returned only once no further token can change it:

* A run of byte tokens (SentencePiece's byte fallback) is held back until another token ends it.
* Replacement characters at the end of the text are held back, because the next token may complete the character.
* If transformers removes spaces before punctuation, characters that can belong to such a pattern are held back.

Each step decodes a window of the last tokens, not the whole text, so the work per token is constant. A window that
starts inside a character decodes correctly from its fourth token on, because a character has at most four bytes.
Windows keep at least `KEPT` tokens.
"""

from collections.abc import Iterable
from typing import Any

from moepack.errors import MoepackError
from moepack.panics import contained

__all__ = ["Detokenizer"]

#: The tokens that a shortened window keeps, and the window length that triggers shortening.
KEPT, MOST = 8, 32
#: The most bytes of an incomplete character. Some decoders write a replacement character for each byte.
INCOMPLETE = 3
REPLACEMENT = "\ufffd"
JOINED = " 'nvr"
"""Characters that occur before the last one in transformers' clean-up patterns (" .", " n't", " 've", ...). Clean-up
keeps all other characters, so no pattern spans the position after one of them."""


class Detokenizer:
    """The text of one sequence of tokens.

    Args:
        tokenizer: a transformers tokenizer. Its decoder may treat the first token differently, strip characters at
            both ends, and spell bytes. Otherwise it must not change the text of earlier tokens.

    Raises:
        MoepackError: the tokenizer's decoder fails.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cleans = _cleans(tokenizer)
        self._window: list[int] = []
        self._bytes = 0  # byte tokens at the end of the window
        self._given = 0  # characters of the window's text that were returned
        self._most = MOST
        self._uncleaned = ""

    def put(self, ids: Iterable[int]) -> str:
        """Add tokens; return the text that no further token can change."""
        settled = len(self._window) - self._bytes
        for token in ids:
            spelled = self._tokenizer.convert_ids_to_tokens(token)
            if spelled is not None:  # ids beyond the vocabulary have no text
                self._bytes = self._bytes + 1 if _is_byte(spelled) else 0
                self._window.append(token)
        end = len(self._window) - self._bytes
        return self._clean(self._settle(end), final=False) if end > settled else ""

    def end(self) -> str:
        """Return the rest of the text after the last token."""
        text = self._decode(self._window)[self._given :] if self._window else ""
        self._window, self._bytes, self._given = [], 0, 0
        return self._clean(text, final=True)

    def _settle(self, end: int) -> str:
        """Return the new final text of the window's tokens before `end`."""
        if end > self._most and not self._decode(self._window[end - KEPT : end]):
            return ""  # for example spaces, which decoders strip at the end of a text: wait for the next token
        text = self._decode(self._window[:end])
        complete = len(text[:-INCOMPLETE]) + len(text[-INCOMPLETE:].rstrip(REPLACEMENT))
        new = text[self._given : complete]
        self._given += len(new)
        if end > self._most:
            self._shorten(text, end)
        return new

    def _shorten(self, text: str, end: int) -> None:
        """Drop the first tokens of the window, unless the text not yet returned depends on them."""
        first = end - KEPT
        shorter = self._decode(self._window[first:end])
        if self._given and shorter.endswith(text[self._given - 1 :]):
            self._given += len(shorter) - len(text)
            self._window = self._window[first:]
            self._most = MOST
        else:
            self._most = 2 * end

    def _clean(self, text: str, final: bool) -> str:
        """Remove spaces like transformers' clean-up, in the prefix that no further text can change."""
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
    """Whether the tokenizer's `decode` removes spaces; transformers does not do this for BPE."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    return forced or type(model).__name__ != "BPE"

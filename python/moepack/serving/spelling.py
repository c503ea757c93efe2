"""The bytes that tokens stand for. A token may hold a part of a character, which has no text of its own."""

import re
from functools import lru_cache
from typing import Any

__all__ = ["Spelling"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Spelling:
    """The bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._is_byte_level = "ByteLevel" in repr(decoder)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; none for an id beyond the vocabulary."""
        added = self._tokenizer.added_tokens_decoder.get(token)
        if added is not None:
            return str(added.content).encode()
        spelled = self._tokenizer.convert_ids_to_tokens(token) if token < len(self._tokenizer) else None
        if spelled is None:
            return b""
        if self._is_byte_level:
            table = _byte_level()
            if all(character in table for character in spelled):
                return bytes(table[character] for character in spelled)
        byte = _BYTE.fullmatch(spelled)
        return bytes([int(byte[1], 16)]) if byte else spelled.replace("▁", " ").encode()

    def text_of(self, token: int) -> str:
        """Return the text of a token. Bytes that are no text are written as `bytes:\\xe2`, as OpenAI does."""
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@lru_cache(1)
def _byte_level() -> dict[str, int]:
    """Return the byte of each character in GPT-2's spelling: printable bytes spell themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + i): byte for i, byte in enumerate(others)}}

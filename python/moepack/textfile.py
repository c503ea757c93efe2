"""Reads text from files and standard input: UTF-8, or the encoding given by a byte order mark.

The mark is not part of the text. Line ends become "\\n". Other input, such as Latin-1 or a binary file, is rejected
with the offset of the first invalid byte.
"""

import codecs
import io
import sys
from os import PathLike, fspath
from typing import Any, BinaryIO

from moepack.errors import TextError

__all__ = ["BUILT_IN", "NO_TEXT", "OWN_SAMPLES", "TextReader", "read_text", "standard_input"]

BUILT_IN = "built-in"
"""Given instead of a calibration file: the text that comes with the package (`moepack.calibration.built_in`)."""

NO_TEXT = "none"
"""Given instead of a calibration file: no text."""

OWN_SAMPLES = "self"
"""Given instead of a calibration file: text that the model generates (`moepack.calibration.own`)."""

CHUNK = 1 << 20
MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",  # before UTF-16, whose mark is a prefix of it
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


def read_text(file: str | PathLike[str], chars: int | None = None) -> str:
    """Read a text file, or its first `chars` characters.

    Raises:
        TextError: the file cannot be read or is not text.
    """
    try:
        with open(file, "rb") as stream:
            return TextReader(stream, fspath(file)).read(chars)
    except OSError as error:
        raise TextError(f"cannot be read: {error.strerror or error}", file=file) from error


def standard_input() -> "TextReader":
    """Return a reader of standard input."""
    # A program may have replaced sys.stdin by a text stream.
    stream = getattr(sys.stdin, "buffer", None) or io.BytesIO(sys.stdin.read().encode())
    return TextReader(stream, "standard input")


class TextReader:
    """Decodes text from a binary stream incrementally, so that the other end of a pipe may wait for an answer.

    Args:
        stream: a buffered binary stream.
        name: name of the file, for error messages.
    """

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream: Any = stream
        self._name = name
        self._decoder: io.IncrementalNewlineDecoder | None = None
        self._place = 0  # offset of the next byte in the file
        self._encoding = ""
        self._text = ""
        self._ended = False

    def read(self, chars: int | None = None) -> str:
        """Return the next `chars` characters, or all remaining ones.

        Raises:
            OSError: the stream cannot be read.
            TextError: the stream is not text.
        """
        pieces, count = [self._text], len(self._text)
        while not self._ended and (chars is None or count < chars):
            pieces.append(self._more())
            count += len(pieces[-1])
        text = "".join(pieces)
        end = len(text) if chars is None else chars
        self._text = text[end:]
        return text[:end]

    def readline(self) -> str:
        """Return the next line with its end, or an empty string at the end. Raises the errors of `read`."""
        while "\n" not in self._text and not self._ended:
            self._text += self._more()
        line, end, self._text = self._text.partition("\n")
        return line + end

    def _more(self) -> str:
        """Decode the bytes that are available."""
        data = self._stream.read1(CHUNK)
        if self._decoder is None:
            data = self._start(data)
        self._ended = not data
        if self._encoding == "utf-8" and b"\0" in data:
            place = self._place + data.index(b"\0")
            raise self._refused(f"is binary, or UTF-16 without a byte order mark (a zero at byte {place})")
        assert self._decoder is not None
        try:
            text: str = self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            # The error's object starts with the bytes of a character that the previous call left incomplete.
            place = self._place + len(data) - len(error.object) + error.start
            raise self._refused(f"is not {self._encoding[:6].upper()} text ({error.reason} at byte {place})") from error
        self._place += len(data)
        return text

    def _start(self, data: bytes) -> bytes:
        """Choose the encoding; return the first bytes after the mark."""
        while any(len(data) < len(mark) and mark.startswith(data) for mark in MARKS) and data:
            more = self._stream.read1(CHUNK)
            if not more:
                break
            data += more
        mark = next((mark for mark in MARKS if data.startswith(mark)), b"")
        self._encoding, self._place = MARKS.get(mark, "utf-8"), len(mark)
        self._decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(self._encoding)(), translate=True)
        return data[len(mark) :] or self._stream.read1(CHUNK)

    def _refused(self, message: str) -> TextError:
        return TextError(f"{message}; save it as UTF-8", file=self._name)

"""Calibration text: turns a file, a directory or a data set into token windows.

A source is plain text, JSON lines (field "text", or the only string field), a directory of both, the name of a hub data
set, or `BUILT_IN` (`built_in`). The tokens of all documents are concatenated, and windows are evenly spaced over them,
so that a short calibration run still covers the whole text. No step is random.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from moepack.calibration.built_in import built_in_documents, built_in_windows
from moepack.decoding.vocabulary import first_unknown, unknown
from moepack.errors import CalibrationError, MoepackWarning, TextError
from moepack.textfile import BUILT_IN, OWN_SAMPLES, read_text

__all__ = ["Tokenizer", "check_source", "read_texts", "token_windows"]

#: Maximum characters read per requested token; natural text has 3 to 6.
CHARACTERS_PER_TOKEN = 32
#: File suffixes read from a directory.
TEXT_SUFFIXES, JSON_SUFFIXES = (".txt", ".md", ".text"), (".jsonl", ".ndjson", ".json")


_JSON_ERRORS = (ValueError, RecursionError)
"""Exceptions of Python's JSON parser, including integers with too many digits and excessive nesting."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> Any:
        """Return an object whose `input_ids` is a list of token ids."""


def check_source(source: str | PathLike[str]) -> None:
    """Check early that a file or directory exists; hub data sets are not checked.

    Raises:
        CalibrationError: no such file or directory exists, and the name cannot be that of a data set.
    """
    if source in (BUILT_IN, OWN_SAMPLES):
        return
    path = Path(source)
    named = path.suffix in TEXT_SUFFIXES + JSON_SUFFIXES or str(source).partition(":")[0].count("/") != 1
    if not path.exists() and (named or str(source).startswith(("/", "."))):
        raise CalibrationError("no such calibration file or directory", file=path)


def read_texts(source: str | PathLike[str], *, limit: int | None = None) -> Iterator[str]:
    """Yield the documents of a calibration source, in a fixed order.

    Args:
        source: a file, a directory (read in sorted order, without subdirectories), a hub data set as ``owner/name`` or
            ``owner/name:split``, or `BUILT_IN`.
        limit: stop after this many characters.

    Raises:
        CalibrationError: the source does not exist, is empty, or is not text.
    """
    path = Path(source)
    documents: Iterator[str]
    if source == BUILT_IN:
        documents = built_in_documents()
    elif path.is_dir():
        files = sorted(f for f in path.iterdir() if f.is_file() and f.suffix in TEXT_SUFFIXES + JSON_SUFFIXES)
        if not files:
            raise CalibrationError(f"no {', '.join(TEXT_SUFFIXES + JSON_SUFFIXES)} file in the directory", file=path)
        documents = (document for file in files for document in _file_documents(file))
    elif path.exists():
        documents = _file_documents(path)
    else:
        documents = _hub_documents(str(source))
    return _limited(documents, limit)


def token_windows(
    tokenizer: Tokenizer, source: str | PathLike[str], samples: int, length: int, vocabulary: int
) -> Tensor:
    """Return token windows [N, length] int64, N <= samples. Too short a text gives fewer, with a `MoepackWarning`.

    Args:
        tokenizer: tokenizer of the model to calibrate.
        source: see `read_texts`.
        samples: requested number of windows.
        length: tokens per window.
        vocabulary: number of rows of the model's embedding; all ids must be below it.

    Raises:
        CalibrationError: the text is empty, binary or shorter than one window, or a token is out of the vocabulary.
    """
    if samples < 1 or length < 1:
        raise ValueError(f"samples and length must be positive, not {samples} and {length}")
    windows = (
        built_in_windows(tokenizer, samples, length)
        if source == BUILT_IN
        else _spaced_windows(tokenizer, source, samples, length)
    )
    if not len(windows):
        raise CalibrationError(f"the text is shorter than one sample of {length} tokens", file=source)
    if (token := first_unknown(windows, vocabulary)) is not None:
        raise CalibrationError(unknown(token, vocabulary, tokenizer), file=source)
    return windows


def _spaced_windows(tokenizer: Tokenizer, source: str | PathLike[str], samples: int, length: int) -> Tensor:
    """Return windows at even distances over a text; arguments, result and errors as for `token_windows`."""
    ids: list[int] = []
    for document in read_texts(source, limit=samples * length * CHARACTERS_PER_TOKEN):
        ids += tokenizer(document, add_special_tokens=False, verbose=False).input_ids
    if len(ids) < length:
        raise CalibrationError(f"{len(ids)} tokens are less than one sample of {length}", file=source)
    tokens = torch.tensor(ids, dtype=torch.int64)
    count = min(samples, len(ids) // length)
    if count < samples:
        message = f"{source}: the text holds {count} samples of {length} tokens, but {samples} were requested"
        warnings.warn(message, MoepackWarning, stacklevel=2)
    slack = len(ids) - count * length
    starts = [i * length + (slack * i // (count - 1) if count > 1 else 0) for i in range(count)]
    return torch.stack([tokens[start : start + length] for start in starts])


def _limited(documents: Iterator[str], limit: int | None) -> Iterator[str]:
    used = 0
    for document in documents:
        if limit is not None and used >= limit:
            return
        yield document if limit is None else document[: limit - used]
        used += len(document)


def _file_documents(file: Path) -> Iterator[str]:
    try:
        text = read_text(file)
    except TextError as error:
        raise CalibrationError(error.detail, file=file) from error
    if not text.strip():
        raise CalibrationError("the file is empty", file=file)
    if file.suffix not in JSON_SUFFIXES:
        yield text
        return
    if file.suffix == ".json":
        # Many ".json" files hold one array; other files are read as lines.
        try:
            rows = json.loads(text)
        except _JSON_ERRORS:
            rows = None
        if isinstance(rows, list):
            yield from (_field(row, file, number) for number, row in enumerate(rows, 1))
            return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except _JSON_ERRORS as error:
                raise CalibrationError(f"line {number} is not valid JSON: {error}", file=file) from error
            yield _field(row, file, number)


def _field(row: object, file: Path | str, number: int) -> str:
    text = _only_string(row, file, number)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CalibrationError(f"record {number} has a lone surrogate at character {error.start}", file=file) from error
    return text


def _only_string(row: object, file: Path | str, number: int) -> str:
    if isinstance(row, str):
        return row
    if isinstance(row, dict):
        if isinstance(row.get("text"), str):
            return str(row["text"])
        strings = [value for value in row.values() if isinstance(value, str)]
        if len(strings) == 1:
            return strings[0]
    raise CalibrationError(f"record {number} has neither a field 'text' nor exactly one string field", file=file)


def _hub_documents(name: str) -> Iterator[str]:
    repository, _, split = name.partition(":")
    if repository.count("/") != 1 or repository.startswith(("/", ".")):
        raise CalibrationError("no such file, directory or data set (owner/name[:split])", file=name)
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise CalibrationError(
            "not a file; reading a hub data set requires `pip install datasets`", file=name
        ) from error
    try:
        rows = load_dataset(repository, split=split or "train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield _field(row, name, number)
    except (OSError, ValueError) as error:
        raise CalibrationError(f"the data set cannot be read: {error}", file=name) from error

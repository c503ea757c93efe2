"""Reads the header of a GGUF file (versions 2 and 3, little-endian) as untrusted bytes.

The file is: magic, version, number of tensors, number of metadata entries, the entries, the tensors' names, shapes,
types and offsets, padding, data. Everything is checked here before it is used: counts and lengths against the bytes
that are left, types against the known ones, and each tensor's bytes against the size of the file.

The result has the form of a safetensors header. A tensor of quantized blocks appears as bytes, with its rows on the
second-last axis; `GgufHeader.kinds` and `shapes` say what they are.
"""

import hashlib
import mmap
import struct
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from moepack.checkpoint.gguf.files import MAGIC
from moepack.errors import CheckpointError, UnsupportedModelError
from moepack.format.header import Header, TensorInfo, stamp_of
from moepack.format.regular import IS_POINTER, is_pointer, open_regular

__all__ = ["FLOAT_KINDS", "GgufHeader", "Sliced", "block_sizes", "parse_gguf", "read_gguf"]

FLOAT_KINDS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
"""The types that are not quantized."""

MAX_METADATA = 512 << 20
"""Largest accepted header in bytes. A vocabulary of 256,000 tokens with merges takes about 12 MB."""

_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of the metadata types, for `struct`."""
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufHeader:
    """A validated header.

    Attributes:
        header: the places of the tensors' bytes.
        metadata: the entries by key: numbers, strings, and lists of them.
        kinds: name of each tensor's type, such as "Q4_K".
        shapes: shape of each tensor, outermost axis first.
        entries: bytes of the file before the description of the first tensor.
        nbytes: bytes of the file before the padding after the header.
    """

    header: Header
    metadata: Mapping[str, Any]
    kinds: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    entries: int
    nbytes: int


class Sliced(Protocol):
    """The content of a file, which slices read."""

    def __getitem__(self, place: slice) -> bytes:
        """Return the bytes from `place.start` to `place.stop`, which lie in the file."""


def block_sizes() -> dict[int, tuple[str, int, int]]:
    """Return name, values per block and bytes per block of each type, by number.

    Raises:
        UnsupportedModelError: the package `gguf` is not installed.
    """
    try:
        import gguf
    except ImportError as cause:
        message = "reading GGUF files needs the package gguf: pip install 'moepack[export]'"
        raise UnsupportedModelError(message) from cause
    return {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}


def read_gguf(file: Path) -> GgufHeader:
    """Read and validate the header of `file`. No tensor is read.

    Raises:
        CheckpointError: the file is unreadable, truncated or contradicts itself.
        UnsupportedModelError: another version or byte order, an unknown type, or the package `gguf` is not installed.
    """
    try:
        if is_pointer(file):
            raise CheckpointError(IS_POINTER, file=file)
        with open_regular(file) as stream:
            stamp, size = stamp_of(stream), stream.seek(0, 2)
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if size else nullcontext(b"") as data:
                return parse_gguf(data, size, file, stamp)
    except OSError as cause:
        raise CheckpointError(f"cannot be read: {cause.strerror or cause}", file=file) from cause


def parse_gguf(data: Sliced, size: int, file: Path, stamp: str) -> GgufHeader:
    """Validate the header of a file's content; errors as for `read_gguf`.

    Args:
        data: the content, which is read from the front.
        size: its size in bytes.
        file: the file, for errors and places.
        stamp: stamp of the header.
    """
    sizes = block_sizes()
    if size < 24:
        raise CheckpointError(f"truncated: {size} bytes, a GGUF file has at least 24", file=file)
    return _parsed(_Bytes(data, min(size, MAX_METADATA), file), size, stamp, sizes)


class _Bytes:
    """Takes values from the front of a file's bytes. Raises a CheckpointError at their end."""

    def __init__(self, data: Sliced, end: int, file: Path) -> None:
        self._data, self._end, self.file, self.position = data, end, file, 0

    def take(self, count: int) -> bytes:
        if count > self._end - self.position:
            raise CheckpointError(f"truncated: the header goes on after byte {self._end}", file=self.file)
        self.position += count
        return self._data[self.position - count : self.position]

    def fits(self, count: int, least: int) -> int:
        """Return a count of items of at least `least` bytes each, after checking that the file can hold them."""
        if count * least > self._end - self.position:
            message = f"truncated: the header claims {count} items after byte {self.position}"
            raise CheckpointError(message, file=self.file)
        return count

    def number(self, kind: str) -> Any:
        found = struct.unpack(f"<{kind}", self.take(struct.calcsize(kind)))[0]
        return float(str(np.float32(found))) if kind == "f" else found  # 1e-5 rather than 9.99999974e-6

    def text(self) -> str:
        raw = self.take(self.number("Q"))
        return raw.decode("utf-8", "replace")

    def value(self, kind: int, key: str) -> Any:
        """Return a value of metadata."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise CheckpointError(f"the metadata '{key}' has the unknown type {kind}", file=self.file)
        inner, count = self.number("I"), self.number("Q")
        if inner == _TEXT:
            return [self.text() for _ in range(self.fits(count, 8))]
        if inner not in _SCALARS:
            raise CheckpointError(f"the metadata '{key}' is an array of the unknown type {inner}", file=self.file)
        width = struct.calcsize(_SCALARS[inner])
        raw = self.take(self.fits(count, width) * width)
        return list(struct.unpack(f"<{count}{_SCALARS[inner]}", raw))


def _parsed(data: _Bytes, size: int, stamp: str, sizes: Mapping[int, tuple[str, int, int]]) -> GgufHeader:
    file = data.file
    if data.take(len(MAGIC)) != MAGIC:
        raise CheckpointError("is not a GGUF file", file=file)
    version = data.number("I")
    if version not in (2, 3):
        order = " (big-endian?)" if version & 0xFFFF == 0 and version else ""
        raise UnsupportedModelError(f"has GGUF version {version}{order}; 2 and 3 are read", file=file)
    tensors, entries = data.number("Q"), data.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(data.fits(entries, 13)):
        key = data.text()
        if key in metadata:
            raise CheckpointError(f"has the metadata '{key}' twice", file=file)
        metadata[key] = data.value(data.number("I"), key)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise CheckpointError(f"general.alignment is {alignment!r}", file=file)
    described = data.position
    found = [_tensor(data, sizes) for _ in range(data.fits(tensors, 24))]
    start = -(-data.position // alignment) * alignment
    infos, kinds, shapes = {}, {}, {}
    for name, shape, number, offset in found:
        if name in infos:
            raise CheckpointError("is in the file twice", file=file, tensor=name)
        infos[name] = _placed(name, shape, sizes[number], start + offset, file)
        kinds[name], shapes[name] = sizes[number][0], shape
    ordered = sorted(infos.values(), key=lambda info: (info.offset, info.nbytes))
    _check_places(ordered, start, size, file)
    stop, data.position = data.position, 0
    header = Header(
        file, size, {info.name: info for info in ordered}, {}, hashlib.sha256(data.take(stop)).hexdigest(), stamp
    )
    return GgufHeader(header, metadata, kinds, shapes, described, stop)


def _tensor(data: _Bytes, sizes: Mapping[int, tuple[str, int, int]]) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape, type and offset of the next tensor."""
    name, axes = data.text(), data.number("I")
    if not 1 <= axes <= 4:
        raise CheckpointError(f"has {axes} axes", file=data.file, tensor=name)
    shape = tuple(reversed([data.number("Q") for _ in range(axes)]))
    if prod(shape) >= 1 << 48:
        raise CheckpointError(f"the shape {list(shape)} is too large", file=data.file, tensor=name)
    kind, offset = data.number("I"), data.number("Q")
    if kind not in sizes:
        message = f"has the type {kind}, which the installed gguf package does not know"
        raise UnsupportedModelError(message, file=data.file, tensor=name)
    return name, shape, kind, offset


def _placed(name: str, shape: tuple[int, ...], kind: tuple[str, int, int], offset: int, file: Path) -> TensorInfo:
    """Return the place of a tensor: in its own dtype if it is not quantized, otherwise as bytes."""
    title, values, nbytes = kind
    if title in FLOAT_KINDS:
        dtype = FLOAT_KINDS[title]
        return TensorInfo(name, shape, dtype, file, offset, prod(shape) * dtype.itemsize)
    if shape[-1] % values:
        message = f"has rows of {shape[-1]} values, {title} stores blocks of {values}"
        raise CheckpointError(message, file=file, tensor=name)
    stored = (*shape[:-1], shape[-1] // values * nbytes)
    return TensorInfo(name, stored, torch.uint8, file, offset, prod(stored))


def _check_places(infos: list[TensorInfo], start: int, size: int, file: Path) -> None:
    """Check that the tensors, sorted by offset, lie in the file after byte `start` and do not overlap."""
    position = start
    for info in infos:
        if info.nbytes and info.offset < position:
            raise CheckpointError("overlaps the tensor before it", file=file, tensor=info.name)
        position = info.offset + info.nbytes
        if position > size:
            message = f"truncated: the tensor ends at byte {position}, the file at {size}"
            raise CheckpointError(message, file=file, tensor=info.name)

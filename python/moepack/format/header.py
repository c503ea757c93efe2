"""Reads the header of a safetensors file as untrusted bytes.

A safetensors file is `u64 length | JSON header | data`. All other code trusts the result of this module, so everything
is checked here:

* the header's length is at most `MAX_HEADER` and inside the file, before the header is read;
* the JSON is one object without duplicate keys; names, dtypes, shapes and offsets have their types;
* sorted by offset, the tensors tile the data exactly: no hole, no overlap, nothing after the last one;
* each tensor's byte range is its element count times its dtype's size.

A slice built from a `TensorInfo` is therefore inside the file, and truncation is detected before a tensor is read.
"""

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from moepack.errors import CheckpointError, MoepackError
from moepack.format.regular import IS_POINTER, open_regular, parse_json

__all__ = ["DTYPES", "MAX_HEADER", "Header", "TensorInfo", "header_length", "parse_header", "read_header", "stamp_of"]

MAX_HEADER = 100_000_000
"""Largest accepted JSON header in bytes, as in the safetensors library."""

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Maps safetensors dtype names to torch dtypes. Sub-byte dtypes are not accepted."""


_LFS_POINTER = b"version "
"""First bytes of a git-lfs pointer file. As a header length, they would be too large."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The place of a tensor.

    Attributes:
        name: name in the file.
        shape: dimensions.
        dtype: element type.
        file: the file that holds the tensor.
        offset: offset of the first byte from the start of the file.
        nbytes: size in bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header.

    Attributes:
        file: the file.
        size: the file's size in bytes.
        tensors: the tensors by name, in the order of their data.
        metadata: the free-form strings under `__metadata__`.
        digest: SHA-256 hex digest of the length and the JSON.
        stamp: file system stamp that changes with a later write (`stamp_of`).
    """

    file: Path
    size: int
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    digest: str
    stamp: str


def stamp_of(stream: BinaryIO) -> str:
    """Return size, modification time and inode of an open file."""
    status = os.fstat(stream.fileno())
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"


def read_header(file: Path, error: type[MoepackError] = CheckpointError) -> Header:
    """Read and validate the header of `file`.

    Args:
        file: a safetensors file.
        error: the exception class to raise.

    Raises:
        error: the file cannot be opened, is truncated, or contradicts the format.
    """
    try:
        with open_regular(file) as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            stamp = stamp_of(stream)
            raw = _read_json_bytes(stream, size, file, error)
    except OSError as cause:
        raise error(f"cannot be read: {cause.strerror or cause}", file=file) from cause
    return parse_header(raw, size, file, stamp, error)


def parse_header(raw: bytes, size: int, file: Path, stamp: str, error: type[MoepackError] = CheckpointError) -> Header:
    """Validate the header of a file, which need not exist on this machine.

    Args:
        raw: the 8 bytes of the length and the JSON after them.
        size: the file's size in bytes.
        file: the file's path, for tensors and errors.
        stamp: the file's stamp.
        error: the exception class to raise.

    Raises:
        error: the header contradicts the format or the size.
    """
    fields = parse_json(raw[8:], file, error)
    metadata = _metadata(fields.pop("__metadata__", {}), file, error)
    infos = [_tensor_info(name, field, len(raw), file, error) for name, field in fields.items()]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    _check_tiling(infos, len(raw), size, file, error)
    return Header(file, size, {info.name: info for info in infos}, metadata, hashlib.sha256(raw).hexdigest(), stamp)


def _read_json_bytes(stream: BinaryIO, size: int, file: Path, error: type[MoepackError]) -> bytes:
    """Return the 8 bytes of the length and the JSON after them."""
    prefix = stream.read(8)
    return prefix + stream.read(header_length(prefix, size, file, error))


def header_length(prefix: bytes, size: int, file: Path, error: type[MoepackError] = CheckpointError) -> int:
    """Return the length of the JSON from the first 8 bytes of a file of `size` bytes; errors as for `parse_header`."""
    if len(prefix) < 8:
        raise error(f"truncated: {size} bytes, a safetensors file has at least 8", file=file)
    if prefix == _LFS_POINTER:
        raise error(IS_POINTER, file=file)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER:
        raise error(f"the header claims {length} bytes, the limit is {MAX_HEADER}: not a safetensors file?", file=file)
    if 8 + length > size:
        raise error(f"truncated: the header ends at byte {8 + length}, the file at {size}", file=file)
    return length


def _metadata(field: object, file: Path, error: type[MoepackError]) -> dict[str, str]:
    if not isinstance(field, dict) or not all(isinstance(value, str) for value in field.values()):
        raise error("__metadata__ is not an object of strings", file=file)
    return field


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _tensor_info(name: str, field: object, start: int, file: Path, error: type[MoepackError]) -> TensorInfo:
    """Check one entry of the header. `start` is the offset of the data."""
    if not isinstance(field, dict) or set(field) != {"dtype", "shape", "data_offsets"}:
        raise error("the header's entry needs exactly dtype, shape and data_offsets", file=file, tensor=name)
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise error(f"unknown dtype {dtype!r}", file=file, tensor=name)
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise error(f"the shape {shape!r} is not a list of sizes", file=file, tensor=name)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise error(f"the offsets {offsets!r} are not two sizes", file=file, tensor=name)
    begin, end = offsets
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != nbytes:
        raise error(
            f"shape {shape} of {dtype} needs {nbytes} bytes, but the offsets {offsets} span {end - begin}",
            file=file,
            tensor=name,
        )
    return TensorInfo(name, tuple(shape), DTYPES[dtype], file, start + begin, nbytes)


def _check_tiling(infos: list[TensorInfo], start: int, size: int, file: Path, error: type[MoepackError]) -> None:
    """Check that the tensors, sorted by offset, cover the data from `start` to `size` without holes or overlaps."""
    position = start
    for info in infos:
        if info.offset != position:
            kind = "overlaps the tensor before it" if info.offset < position else "leaves a hole before it"
            raise error(f"{kind}: begins at byte {info.offset}, expected {position}", file=file, tensor=info.name)
        position += info.nbytes
    if position > size:
        raise error(f"truncated: the tensors end at byte {position}, the file at {size}", file=file)
    if position < size:
        raise error(f"{size - position} bytes after the last tensor", file=file)

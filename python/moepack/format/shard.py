"""Writes safetensors files with streaming, alignment and hashing.

The writers of the safetensors package need all tensors at once and do not align them. Packed blobs must start at
multiples of 64 bytes, because kernels read them in place from the mapped file.

Invariants of a written file: the data begin at a multiple of 64 (the header is padded with spaces); packed blobs, whose
lengths are multiples of 64, come first and are therefore aligned; the other tensors follow by decreasing element size
and are therefore aligned to their elements; equal entries give equal bytes.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from moepack.format.atomic import publish_file, write_all
from moepack.format.header import DTYPES

ALIGNMENT = 64

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Maps torch dtypes to safetensors names."""

_CHUNK = 1 << 24


@dataclass(frozen=True)
class Entry:
    """A tensor to write.

    Attributes:
        dtype: safetensors name of the element type.
        data: returns the tensor's bytes, little-endian and C-contiguous, as a flat buffer. It is called once, when the
            writer reaches the tensor, so that only one tensor needs to be in memory.
        packed: whether the tensor is a packed blob, which is placed first and 64-byte aligned.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], memoryview]
    packed: bool = False

    @property
    def nbytes(self) -> int:
        """Size in bytes, from dtype and shape."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class WrittenShard:
    """A written file: its size in bytes, its SHA-256 (hex) and the CRC-32 of each tensor."""

    size: int
    sha256: str
    crc32: dict[str, int]


def _order(entry: Entry) -> tuple[bool, int, str]:
    return not entry.packed, -DTYPES[entry.dtype].itemsize, entry.name


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for entry in entries:
        stop = start + entry.nbytes
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_shard(path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> WrittenShard:
    """Write `entries` atomically to the safetensors file `path`.

    Raises:
        DiskError: writing failed.
        ValueError: a packed blob's length is not a multiple of 64, or an entry's data have a wrong length.
    """
    ordered = sorted(entries, key=_order)
    if any(entry.packed and entry.nbytes % ALIGNMENT for entry in ordered):
        raise ValueError(f"a packed blob's length must be a multiple of {ALIGNMENT}")
    digest, crc32 = hashlib.sha256(), {}
    with publish_file(path) as file:
        header = _header(ordered, metadata)
        digest.update(header)
        write_all(file, memoryview(header))
        for entry in ordered:
            crc32[entry.name] = _write_tensor(file, entry, digest.update)
        size = file.tell()
    return WrittenShard(size, digest.hexdigest(), crc32)


def _write_tensor(file: FileIO, entry: Entry, update: Callable[[memoryview], None]) -> int:
    """Write one tensor in chunks, hashing each chunk while it is in the cache; return its CRC-32."""
    data, crc32 = entry.data(), 0
    if data.nbytes != entry.nbytes:
        raise ValueError(f"tensor '{entry.name}' has {data.nbytes} bytes, but its shape needs {entry.nbytes}")
    for start in range(0, data.nbytes, _CHUNK):
        chunk = data[start : start + _CHUNK]
        update(chunk)
        crc32 = zlib.crc32(chunk, crc32)
        write_all(file, chunk)
    return crc32

"""Reads the places of tensors in a PyTorch pickle (`pytorch_model.bin`), as untrusted bytes.

`torch.save` writes a zip archive: `data.pkl` describes the tensors, and every storage is an uncompressed member. The
description is unpickled with `weights_only`, so it cannot run code, and with fake tensors, so no storage is read. The
result has the form of a safetensors header. Tensors are then mapped one at a time, as from safetensors.

Invariant: every place lies within one member of the archive, whatever the description says.
"""

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moepack.errors import CheckpointError, MoepackError, UnsupportedModelError
from moepack.format.header import DTYPES, MAX_HEADER, Header, TensorInfo, stamp_of
from moepack.format.regular import IS_POINTER, is_pointer, open_regular

__all__ = ["PICKLED", "read_pickle", "read_pickled"]

PICKLED = "The weights are PyTorch pickles (.bin). Their tensors are mapped; no code in them runs."
"""A note for the user."""

_LOCAL_HEADER = 30
"""Bytes of a member's local header before its name and extra field."""

_DTYPES = frozenset(DTYPES.values())


def read_pickle(file: Path) -> Header:
    """Read and validate the description of the tensors in `file`. No tensor is read.

    Args:
        file: a dictionary of tensors, written by `torch.save`. Tensors may share storages and have any strides.

    Raises:
        CheckpointError: the file is unreadable, truncated or contradicts itself.
        UnsupportedModelError: the file has the format before PyTorch 1.6, compressed members, or other objects than
            tensors.
    """
    try:
        if is_pointer(file):
            raise CheckpointError(IS_POINTER, file=file)
        with open_regular(file) as stream:
            return read_pickled(stream, file, stamp_of(stream))
    except OSError as cause:
        raise CheckpointError(f"cannot be read: {cause.strerror or cause}", file=file) from cause


def read_pickled(stream: Any, file: Path, stamp: str) -> Header:
    """Read the description of the tensors in a binary stream, as `read_pickle` does.

    Args:
        stream: the content of `file`; only the directory of the archive, its headers and `data.pkl` are read.
        file: the file, for errors and places.
        stamp: stamp of the header.
    """
    size = stream.seek(0, 2)
    members, description = _members(stream, file)
    stream.seek(0)
    tensors = {name: _place(name, tensor, members, file) for name, tensor in _described(stream, file).items()}
    ordered = sorted(tensors.values(), key=lambda info: info.offset)
    return Header(file, size, {info.name: info for info in ordered}, {}, hashlib.sha256(description).hexdigest(), stamp)


def _members(stream: Any, file: Path) -> tuple[Mapping[int, int], bytes]:
    """Return the sizes of the archive's members by the offsets of their data, and the content of `data.pkl`."""
    try:
        if not zipfile.is_zipfile(stream):
            raise _no_archive(stream, file)
        with zipfile.ZipFile(stream) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise UnsupportedModelError("has compressed members, which torch.save does not write", file=file)
            description = next((each for each in entries if each.filename.endswith("/data.pkl")), None)
            if description is None or description.file_size > MAX_HEADER:
                raise CheckpointError(f"has no data.pkl of at most {MAX_HEADER} bytes", file=file)
            order = next((each for each in entries if each.filename.endswith("/byteorder")), None)
            if order is not None and archive.read(order) != b"little":
                raise UnsupportedModelError("was written on a big-endian machine", file=file)
            content = archive.read(description)
    except MoepackError:
        raise
    except Exception as cause:  # zipfile raises several kinds for a damaged archive
        raise CheckpointError(f"is a damaged archive: {cause}", file=file) from cause
    size = stream.seek(0, 2)
    members = {_data_offset(stream, entry.header_offset): entry.file_size for entry in entries}
    if any(start + length > size for start, length in members.items()):
        raise CheckpointError("is a damaged archive: a member lies past the end of the file", file=file)
    return members, content


def _no_archive(stream: Any, file: Path) -> MoepackError:
    stream.seek(0)
    if stream.read(2) == b"PK":
        return CheckpointError("truncated: the archive has no directory at its end", file=file)
    advice = "load it with transformers and save it with save_pretrained, which writes safetensors"
    message = f"is not an archive of torch.save, or has the format before PyTorch 1.6; {advice}"
    return UnsupportedModelError(message, file=file)


def _data_offset(stream: Any, header: int) -> int:
    """Return the offset of a member's data from that of its local header."""
    stream.seek(header)
    fixed = stream.read(_LOCAL_HEADER)
    return header + _LOCAL_HEADER + int.from_bytes(fixed[26:28], "little") + int.from_bytes(fixed[28:30], "little")


def _described(stream: Any, file: Path) -> dict[str, torch.Tensor]:
    """Return the fake tensors of a file by name."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            content = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as cause:  # torch.load passes on any exception of the unpickler
        reason = next(iter(str(cause).splitlines()), type(cause).__name__)
        raise CheckpointError(f"cannot be unpickled: {reason}", file=file) from cause
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise UnsupportedModelError("is not a dictionary of tensors alone", file=file)
    return {str(name): tensor for name, tensor in content.items()}


def _place(name: str, tensor: torch.Tensor, members: Mapping[int, int], file: Path) -> TensorInfo:
    """Return the place of a tensor, after checking that it lies within a member of the archive."""
    if tensor.dtype not in _DTYPES:
        raise UnsupportedModelError(f"is stored as {str(tensor.dtype).removeprefix('torch.')}", file=file, tensor=name)
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    offset = tensor.storage_offset() * tensor.dtype.itemsize
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    nbytes = tensor.numel() * tensor.dtype.itemsize
    place = int(offset) + (start or 0)
    info = TensorInfo(name, tuple(tensor.shape), tensor.dtype, file, place, nbytes, strides)
    if nbytes and offset + info.span > members.get(-1 if start is None else start, -1):
        raise CheckpointError("lies outside of its member of the archive", file=file, tensor=name)
    return info

"""Converts coded integers to their GPU layout on the GPU: launches of `cuda/coded_upload.cu`.

A CPU decodes streams for the new layout at 1 to 2 GB/s; a GPU decodes all streams at once. The host only creates the
small part before the records.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moepack import _core
from moepack.backends.gpu.device import allocate
from moepack.backends.gpu.layer import BLOCK_ROWS
from moepack.backends.gpu.program import Program
from moepack.backends.gpu.structs import Struct, StructValue
from moepack.backends.gpu.upload import Uploader
from moepack.errors import LoadError

__all__ = ["lay_out"]

_UNIT = 16
"""The unit of record offsets in bytes."""

_WARPS = 4
"""Streams per block."""

_CHUNK, _QUAD = 256, 4
"""Columns per record, and columns that a step decodes."""

_ALIGNMENT, _SLACK = 64, 256
"""The alignment of a layout's size; bytes after the last record."""

_HEADER_WORDS, _LONGEST = 26, 6
_TABLES, _BLOCKS, _STARTS, _RECORDS = 3, 4, 5, 8
"""Sections of the layout (`rust/core`, formats/coded/device)."""

_UPLOAD = Struct("coded_upload.cu", "Upload")


def lay_out(data: Tensor, details: Mapping[str, Any], uploader: Uploader, what: str) -> Tensor:
    """Return the GPU layout of a packed `coded` tensor, identical to `_core.coded_to_device`.

    Args:
        data: the packed tensor, flat uint8 on the CPU.
        details: the tensor's properties other than its shape.
        uploader: the uploader of the GPU, which must be the current device.
        what: a description of the tensor, for messages.

    Raises:
        CorruptionError: the bytes are not such a tensor.
        DeviceMemoryError: the bytes do not fit; they are needed twice during the conversion.
        LoadError: the number of records exceeds the kernels' limit.
    """
    frame, starts = _core.coded_frame(data.numpy())
    words = frame[: 8 * _HEADER_WORDS].view(np.int64)
    sections = words[8:].reshape(-1, 2)
    first, device = int(sections[_RECORDS, 0]), uploader.device
    packed = allocate(len(data), device, what)
    uploader.copy(data, packed)
    streams, head = torch.from_numpy(starts.view(np.int64)).to(device), torch.from_numpy(frame[:first]).to(device)
    upload = _upload(words, len(starts) - 1, details)
    upload["packed"], upload["streams"] = packed.data_ptr(), streams.data_ptr()
    upload["tables"], upload["blocks"] = (head.data_ptr() + sections[which, 0] for which in (_TABLES, _BLOCKS))
    units = torch.zeros(int(sections[_STARTS, 1]) // 4, dtype=torch.int32, device=device)
    upload["units"] = units[1:].data_ptr()
    _launch("measure", upload)

    ends = units.cumsum(0)
    size = _UNIT * int(ends[-1])
    if size // _UNIT >= 1 << 32:
        raise LoadError(f"{what} has more records than GPU kernels can address")
    words[_LONGEST], sections[_RECORDS, 1] = _UNIT * int(units.max()), size
    out = allocate(-(-(first + size + _SLACK) // _ALIGNMENT) * _ALIGNMENT, device, what)
    out[:first], out[first + size :] = head, 0
    out[: 8 * _HEADER_WORDS] = torch.from_numpy(frame[: 8 * _HEADER_WORDS])
    at, length = sections[_STARTS].tolist()
    out[at : at + length] = ends.int().view(torch.uint8)
    upload["starts"], upload["records"] = out.data_ptr() + at, out.data_ptr() + first
    _launch("write_records", upload)
    return out


def _upload(words: NDArray[np.int64], count: int, details: Mapping[str, Any]) -> StructValue:
    """The kernels' `Upload` structure for `count` streams, without GPU pointers."""
    experts, rows, columns, _, of_segment = map(int, words[1:6])
    return _UPLOAD(
        packed=None, streams=None, tables=None, blocks=None, starts=None, units=None, records=None,
        count=count, of_expert=count // max(experts, 1), stream_blocks=details["stream_rows"] // BLOCK_ROWS,
        row_blocks=-(-rows // BLOCK_ROWS), rows=rows, quads=-(-columns // _QUAD), chunks=-(-columns // _CHUNK),
        of_segment=of_segment, dependent=details["symbols"] == "dependent",
    )  # fmt: skip


def _launch(kernel: str, upload: StructValue) -> None:
    if streams := int(upload["count"][0]):
        _program().launch(kernel, -(-streams // _WARPS), 32 * _WARPS, [upload.copy()])


@cache
def _program() -> Program:
    return Program("coded_upload.cu")

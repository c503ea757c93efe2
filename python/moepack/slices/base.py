"""The vocabulary of slices, and helpers for the layouts of all formats."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bytes", "Cutter", "Grain", "Selection", "aligned", "joined_sections", "number", "room", "with_numbers"]

Bytes = NDArray[np.uint8]

ALIGNMENT = 64


@dataclass(frozen=True)
class Grain:
    """Where a tensor can be cut.

    Attributes:
        rows: row slices begin and end at multiples of this number, or end at the last row; 0 if rows cannot be cut.
        columns: the same of columns.
        experts: whether experts can be chosen.
        least: minimum of rows and of columns of a slice.
    """

    rows: int
    columns: int
    experts: bool = True
    least: int = 1


@dataclass(frozen=True)
class Selection:
    """A part of a packed tensor.

    Attributes:
        experts: the experts, in the order of the slice.
        rows: the rows of each expert, with step 1.
        columns: the columns of each row, with step 1.
    """

    experts: Sequence[int]
    rows: range
    columns: range


class Cutter(Protocol):
    """Cuts the tensors of one format."""

    def grain(self, data: Bytes) -> Grain:
        """Return where a tensor can be cut."""
        ...

    def cut(self, data: Bytes, selection: Selection) -> Bytes:
        """Return the bytes of a slice, which the grain allows."""
        ...


def number(data: Bytes, at: int, size: int = 8) -> int:
    """Read an unsigned number of a header."""
    return int.from_bytes(data[at : at + size].tobytes(), "little")


def with_numbers(header: Bytes, numbers: dict[int, int]) -> Bytes:
    """Copy a header, with u64 numbers by offset."""
    copied = header.copy()
    for at, value in numbers.items():
        copied[at : at + 8] = np.frombuffer(value.to_bytes(8, "little"), np.uint8)
    return copied


def aligned(size: int) -> int:
    """Round up to the alignment of sections."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def room(size: int) -> Bytes:
    """Allocate zeros at an address that is a multiple of 64, as kernels prefer."""
    data = np.zeros(size + ALIGNMENT, np.uint8)
    return data[-data.ctypes.data % ALIGNMENT :][:size]


def joined_sections(header: Bytes, sections: Sequence[Bytes], tail: int = 0) -> Bytes:
    """Lay out a header and sections, each at the next multiple of 64.

    Args:
        header: the header.
        sections: the sections' bytes, flat.
        tail: minimum number of zeros after the last section.
    """
    starts, end = [], len(header)
    for section in sections:
        starts.append(aligned(end))
        end = starts[-1] + section.size
    out = room(aligned(end + tail))
    out[: len(header)] = header
    for start, section in zip(starts, sections, strict=True):
        out[start : start + section.size] = section
    return out

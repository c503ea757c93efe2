"""Slices of formats with 16-row blocks of equal size: group-wise and codebook tensors (docs/format.md, 6 and 7)."""

from math import lcm

import numpy as np

from moepack import _core
from moepack.slices.base import Bytes, Grain, Selection, number, room, with_numbers

__all__ = ["CODEBOOK", "GROUPWISE"]

HEADER, BLOCK, REGISTER, UNIT = 128, 16, 64, 32

EXPERTS, ROWS, COLUMNS, SIZE = 16, 24, 32, 40
"""Offsets of the header's numbers. The last is the group size, or the block size of codebooks."""


def _blocks(data: Bytes) -> Bytes:
    """View a tensor's blocks, [experts, blocks, bytes]."""
    experts, blocks = number(data, EXPERTS), -(-number(data, ROWS) // BLOCK)
    return data[HEADER:].reshape(experts, blocks, -1) if experts * blocks else data[HEADER:].reshape(experts, blocks, 0)


def _taken(data: Bytes, selection: Selection, parts: list[slice]) -> Bytes:
    """Copy byte ranges of the selected blocks, side by side; [experts, blocks, bytes]."""
    blocks = _blocks(data)
    rows = slice(selection.rows.start // BLOCK, -(-selection.rows.stop // BLOCK))
    sizes = [part.stop - part.start for part in parts]
    count = rows.stop - rows.start
    out = np.empty((len(selection.experts), count, sum(sizes)), np.uint8)
    for place, expert in enumerate(selection.experts):
        at = 0
        for part, size in zip(parts, sizes, strict=True):
            out[place, :, at : at + size] = blocks[expert, rows, part]
            at += size
    return out


def _assembled(data: Bytes, selection: Selection, blocks: Bytes, size: int) -> Bytes:
    """Put a header in front of blocks."""
    numbers = {EXPERTS: len(selection.experts), ROWS: len(selection.rows), COLUMNS: len(selection.columns), SIZE: size}
    out = room(HEADER + blocks.size)
    out[:HEADER] = with_numbers(data[:HEADER], numbers)
    out[HEADER:] = blocks.reshape(-1)
    return out


class _Groupwise:
    """Cuts columns at records, or at units of 32 if a row is one group."""

    def grain(self, data: Bytes) -> Grain:
        group = number(data, SIZE)
        return Grain(BLOCK, UNIT if group == 0 else self._record(data)[1])

    def _record(self, data: Bytes) -> tuple[int, int, int]:
        """Return a record's bytes of parameters, columns, and bytes."""
        bits, symmetric, group = int(data[10]), bool(data[13]), number(data, SIZE)
        groups = 1 + (symmetric or group < UNIT) if group else 1
        parameters = -(-groups * 2 * BLOCK * (2 - symmetric) // REGISTER) * REGISTER
        columns = groups * group if group else max(1, -(-number(data, COLUMNS) // UNIT)) * UNIT
        return parameters, columns, parameters + columns // UNIT * REGISTER * bits

    def cut(self, data: Bytes, selection: Selection) -> Bytes:
        parameters, columns, size = self._record(data)
        block = _blocks(data).shape[-1]
        start, stop = selection.columns.start, selection.columns.stop
        if number(data, SIZE):
            parts = [slice(start // columns * size, min(-(-stop // columns) * size, block))]
        else:
            unit = REGISTER * int(data[10])
            codes = slice(parameters + start // UNIT * unit, parameters + -(-stop // UNIT) * unit)
            parts = [slice(0, parameters), codes]
        return _assembled(data, selection, _taken(data, selection, parts), number(data, SIZE))


class _Codebook:
    """Cuts columns at blocks. Inside a row's only block it cuts at steps, and counts the sums of centroids again."""

    def grain(self, data: Bytes) -> Grain:
        block, rotated = number(data, SIZE), 1 << int(data[13])
        only = block >= number(data, COLUMNS)
        return Grain(BLOCK, lcm(self._step(data)[0] if only else block, rotated))

    def _step(self, data: Bytes) -> tuple[int, int]:
        """Return a step's columns and bytes."""
        columns, registers = {2: (64, 1), 3: (128, 3), 4: (32, 1)}[int(data[10])]
        return columns, 4 * REGISTER * registers

    def _parameters(self, data: Bytes) -> tuple[int, int]:
        """Return the bytes of a block's parameters, and the number of stored bytes of a centroid."""
        planes = 2 if data[11] == 0 else 1
        return BLOCK * (4 + planes * ((1 << int(data[10])) + 4)), planes

    def cut(self, data: Bytes, selection: Selection) -> Bytes:
        (columns, step), (parameters, planes) = self._step(data), self._parameters(data)
        block, width, bytes_ = number(data, SIZE), number(data, COLUMNS), _blocks(data).shape[-1]
        start, stop = selection.columns.start, selection.columns.stop
        if block < width or (start, stop) == (0, width):
            whole = parameters + block // columns * step
            parts = [slice(start // block * whole, min(-(-stop // block) * whole, bytes_))]
            return _assembled(data, selection, _taken(data, selection, parts), block)
        codes = slice(parameters + start // columns * step, parameters + -(-stop // columns) * step)
        blocks = _taken(data, selection, [slice(0, parameters), codes])
        size = max(BLOCK * 8, -(-(stop - start) // 128) * 128)
        self._count(data, selection, blocks, size, parameters - BLOCK * 4 * planes)
        return _assembled(data, selection, blocks, size)

    def _count(self, data: Bytes, selection: Selection, blocks: Bytes, size: int, at: int) -> None:
        """Write the sums of the centroids of the remaining columns, expert by expert."""
        one = Selection([0], selection.rows, selection.columns)
        for panels in blocks:
            tensor = _core.PackedTensor(_assembled(data, one, panels, size))
            codes = tensor.decode()[0].astype(np.int64)
            values = tensor.parameters("centroids").reshape(len(selection.rows), -1).astype(np.int64)
            high = (values + 128) >> 8
            sums = [np.take_along_axis(each, codes, 1).sum(1) for each in (high, values)]
            for number_, sum_ in enumerate(sums[: 2 if data[11] == 0 else 1]):
                padded = np.zeros(len(panels) * BLOCK, np.int32)
                padded[: len(sum_)] = sum_
                place = slice(at + number_ * BLOCK * 4, at + (number_ + 1) * BLOCK * 4)
                panels[:, place] = padded.view(np.uint8).reshape(len(panels), -1)


GROUPWISE, CODEBOOK = _Groupwise(), _Codebook()

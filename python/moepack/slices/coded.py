"""Slices of coded tensors (docs/format.md, 9). Columns cannot be cut, because the lanes of a stream run along them."""

import numpy as np

from moepack.slices.base import Bytes, Grain, Selection, aligned, joined_sections, number, with_numbers

__all__ = ["CODED"]

HEADER, BLOCK, STATES, PLANE, LANES = 64, 16, 128, 8, 64

EXPERTS, ROWS, COLUMNS, PAYLOAD, EXCEPTIONS = 16, 24, 32, 40, 48


class _Coded:
    """Cuts rows at streams."""

    def grain(self, data: Bytes) -> Grain:
        return Grain(BLOCK * int(data[11]), 0)

    def cut(self, data: Bytes, selection: Selection) -> Bytes:
        tables, scales, columns, index, exceptions, payload = _sections(data)
        experts, streams = number(data, EXPERTS), _streams(data, number(data, ROWS))
        entries = index.view(np.uint32 if data[56] == 4 else np.uint64).reshape(experts, streams)
        sizes, counts = _sizes(data, entries)
        starts, firsts = _starts(sizes), _starts(counts)
        grain = BLOCK * int(data[11])
        kept = slice(selection.rows.start // grain, -(-selection.rows.stop // grain))
        width = int(data[57])
        streams_of, exceptions_of = [], []
        for expert in selection.experts:
            begin, end = expert * streams + kept.start, expert * streams + kept.stop
            streams_of.append(payload[starts[begin] : starts[end]])
            exceptions_of.append(exceptions[firsts[begin] * width : firsts[end] * width])
        kind, scale = int(data[60]), 4 if data[13] else 2
        if data[12]:
            by_row = scales.reshape(experts, -1, scale)[:, selection.rows.start : selection.rows.stop]
            scales = by_row[list(selection.experts)].reshape(-1)
        if kind == 2:
            columns = columns.reshape(experts, -1)[list(selection.experts)].reshape(-1)
        chosen = entries[list(selection.experts), kept]
        codes, marks = np.concatenate(streams_of), np.concatenate(exceptions_of)
        numbers = {EXPERTS: len(selection.experts), ROWS: len(selection.rows), PAYLOAD: codes.size}
        header = with_numbers(data[:HEADER], numbers | {EXCEPTIONS: marks.size // width})
        if kind == 2 and len(selection.experts) == 1:
            header[60] = 1
        bytes_ = np.ascontiguousarray(chosen).view(np.uint8).reshape(-1)
        return joined_sections(header, [tables, scales, columns, bytes_, marks, codes], LANES)


def _streams(data: Bytes, rows: int) -> int:
    return -(-rows // (BLOCK * int(data[11]))) if number(data, COLUMNS) else 0


def _sections(data: Bytes) -> list[Bytes]:
    experts, rows, columns = (number(data, at) for at in (EXPERTS, ROWS, COLUMNS))
    scale = 4 if data[13] else 2
    sizes = [
        int(data[14]) * (1 + int(data[15])),
        scale * (experts * rows if data[12] else 1),
        scale * columns * (0, 1, experts)[int(data[60])],
        experts * _streams(data, rows) * int(data[56]),
        number(data, EXCEPTIONS) * int(data[57]),
        number(data, PAYLOAD),
    ]
    sections, at = [], HEADER
    for size in sizes:
        sections.append(data[at : at + size])
        at = aligned(at + size)
    return sections


def _sizes(data: Bytes, entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes and the exceptions of each stream, [experts, streams]."""
    narrow = data[56] == 4
    lengths = (entries & (0xFFFF if narrow else 0xFFFFFFFF)).astype(np.int64)
    counts = (entries >> (24 if narrow else 40)).astype(np.int64)
    rows, columns, blocks = number(data, ROWS), number(data, COLUMNS), int(data[11])
    first = np.arange(entries.shape[1]) * blocks
    existing = np.minimum(-(-rows // BLOCK) - first, blocks)
    planes = existing * (-(-columns // 4)) * int(data[58]) * PLANE
    return STATES + lengths + planes, counts


def _starts(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes.reshape(-1))])


CODED = _Coded()

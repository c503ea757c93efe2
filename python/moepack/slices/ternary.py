"""Slices of ternary tensors (docs/format.md, 5). Columns cannot be cut, because a code spans several of them.

The header of a slice counts the non-zero weights of the whole tensor, or all weights of the slice if these are fewer,
because an exact count takes decoding. No kernel reads the count, and slices are not written to files.
"""

import numpy as np

from moepack.slices.base import Bytes, Grain, Selection, aligned, joined_sections, number, with_numbers

__all__ = ["TERNARY"]

HEADER, GROUP, RAW = 128, 64, 4095

EXPERTS, ROWS, COLUMNS, PAYLOAD, NONZEROS = 24, 32, 40, 48, 56


class _Ternary:
    """Cuts rows at groups of 64 (`fsv8`), or anywhere (`dict16`)."""

    def grain(self, data: Bytes) -> Grain:
        return Grain(1 if data[10] else GROUP, 0)

    def cut(self, data: Bytes, selection: Selection) -> Bytes:
        levels, index, starts, payload = _sections(data)
        experts, rows = list(selection.experts), slice(selection.rows.start, selection.rows.stop)
        levels, entries = (each[experts, rows] for each in (levels, index))
        offsets, pieces = (_dict16 if data[10] else _fsv8)(selection, number(data, ROWS), index, starts, payload)
        if data[10]:
            entries = entries.view(np.uint32)
            entries = (entries - entries[:, :1]).view(np.uint8)
        codes = np.concatenate(pieces)
        weights = len(experts) * len(selection.rows) * number(data, COLUMNS)
        numbers = {EXPERTS: len(experts), ROWS: len(selection.rows), PAYLOAD: codes.size}
        header = with_numbers(data[:HEADER], numbers | {NONZEROS: min(weights, number(data, NONZEROS))})
        sections = [np.ascontiguousarray(each).view(np.uint8).reshape(-1) for each in (levels, entries, offsets)]
        return joined_sections(header, [*sections, codes], GROUP)


def _sections(data: Bytes) -> tuple[Bytes, Bytes, np.ndarray, Bytes]:
    """Return levels and index, [experts, rows, bytes], the starts, and the payload."""
    experts, rows, columns = (number(data, at) for at in (EXPERTS, ROWS, COLUMNS))
    level = (4 if data[11] == 2 else 2) * (1 if data[22] else 2)
    entry = 4 if data[10] or -(-columns // 4) > RAW else 2
    starts = experts * (1 if data[10] else -(-rows // GROUP)) + 1
    sections, at = [], HEADER
    for size in (experts * rows * level, experts * rows * entry, starts * 8, number(data, PAYLOAD)):
        sections.append(data[at : at + size])
        at = aligned(at + size)
    levels, index = sections[0].reshape(experts, rows, level), sections[1].reshape(experts, rows, entry)
    return levels, index, sections[2].view(np.uint64).astype(np.int64), sections[3]


def _fsv8(
    selection: Selection, rows: int, index: Bytes, starts: np.ndarray, payload: Bytes
) -> tuple[np.ndarray, list[Bytes]]:
    """Return the starts and the codes of the selected rows."""
    groups = -(-rows // GROUP)
    begin, end = selection.rows.start // GROUP, -(-selection.rows.stop // GROUP)
    offsets, pieces, at = [], [], 0
    for expert in selection.experts:
        own = starts[expert * groups + begin : expert * groups + end + 1]
        offsets.append(own[:-1] - own[0] + at)
        pieces.append(payload[own[0] : own[-1]])
        at += int(own[-1] - own[0])
    return np.concatenate([*offsets, [at]]).astype(np.uint64), pieces


def _dict16(
    selection: Selection, rows: int, index: Bytes, starts: np.ndarray, payload: Bytes
) -> tuple[np.ndarray, list[Bytes]]:
    """Return the starts and the codes of the selected rows."""
    first = index.view(np.uint32)[..., 0].astype(np.int64)
    offsets, pieces, at = [0], [], 0
    for expert in selection.experts:
        ends = np.append(first[expert], starts[expert + 1] - starts[expert]) + starts[expert]
        begin, end = ends[selection.rows.start], ends[selection.rows.stop]
        pieces.append(payload[2 * begin : 2 * end])
        at += int(end - begin)
        offsets.append(at)
    return np.array(offsets, np.uint64), pieces


TERNARY = _Ternary()

"""Slices of compensated tensors (docs/format.md, 8): of the group-wise part, and of the chunks of the factors."""

from math import lcm

import numpy as np

from moepack.slices.base import Bytes, Grain, Selection, aligned, joined_sections, number, with_numbers
from moepack.slices.blocks import COLUMNS, EXPERTS, GROUPWISE, ROWS

__all__ = ["COMPENSATED"]

HEADER, CHUNK, BASE, TOTAL = 128, 64, 16, 24


class _Compensated:
    """Cuts rows and columns at chunks of 64 and where the group-wise part can be cut.

    A slice has at least as many rows and columns as the largest rank.
    """

    def grain(self, data: Bytes) -> Grain:
        base, ranks, _ = _sections(data)
        grain = GROUPWISE.grain(base)
        return Grain(lcm(CHUNK, grain.rows), lcm(CHUNK, grain.columns), least=max(1, int(ranks.max(initial=0))))

    def cut(self, data: Bytes, selection: Selection) -> Bytes:
        base, ranks, sides = _sections(data)
        own = GROUPWISE.cut(base, selection)
        kept = ranks[list(selection.experts)]
        total = int(kept.sum())
        if total == 0:
            return own
        starts = np.concatenate([[0], np.cumsum(ranks)]).astype(np.int64)
        parts = []
        for pair, span in zip(sides, (selection.columns, selection.rows), strict=True):
            chunks = slice(span.start // CHUNK, -(-span.stop // CHUNK))
            for section in pair:
                taken = [section[starts[e] : starts[e + 1], chunks].reshape(-1) for e in selection.experts]
                parts.append(np.concatenate(taken))
        header = with_numbers(data[:HEADER], {BASE: own.size, TOTAL: total})
        return joined_sections(header, [own, kept.view(np.uint8), *parts])


def _sections(data: Bytes) -> tuple[Bytes, np.ndarray, list[tuple[Bytes, Bytes]]]:
    """Return the group-wise part, the ranks, and (scales, chunks) of both factors, [ranks, chunks, bytes] each."""
    size, total, bits = number(data, BASE), number(data, TOTAL), int(data[10])
    base = data[HEADER : HEADER + size]
    at = aligned(HEADER + size)
    experts = number(base, EXPERTS)
    ranks = data[at : at + 4 * experts].view(np.uint32)
    end, sides = at + 4 * experts, []
    for length in (number(base, COLUMNS), number(base, ROWS)):
        chunks = -(-length // CHUNK)
        pair = []
        for width in (0 if bits == 16 else 2, 8 * bits):
            start = aligned(end)
            end = start + total * chunks * width
            pair.append(data[start:end].reshape(total, chunks, width))
        sides.append((pair[0], pair[1]))
    return base, ranks, sides


COMPENSATED = _Compensated()

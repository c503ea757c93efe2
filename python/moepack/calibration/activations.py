"""Inputs of the last projections of a group of experts, kept from the moments until the group's outputs are computed.

Moments and outputs need the same products for nearly the same tokens: moments read the tokens that the original router
sends to an expert, outputs the tokens that each model's own router sends. Activations beyond the budget are computed
again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Activations", "budget"]

LEAST, MOST = 64 << 20, 256 << 20
"""Bytes of the activations of a group of experts: in the smallest layers, and in any."""


def budget(weights: int) -> int:
    """Return the bytes of activations that are kept for a layer of experts with a number of weights."""
    return min(LEAST + 4 * weights, MOST)


class Activations:
    """Activations by stream and expert.

    Attributes:
        room: bytes left.
    """

    def __init__(self, room: int = MOST) -> None:
        """Create an empty store."""
        self.room = room
        self._kept: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}

    def keep(self, stream: int, expert: int, rows: Tensor, values: Tensor) -> None:
        """Keep activations [n, I] of the tokens `rows` [n], ascending, if there is room and they are not kept yet."""
        if self.takes(stream, expert, rows, values.nbytes):
            self.room -= values.nbytes
            self._kept.setdefault((stream, expert), []).append((rows, values))

    def takes(self, stream: int, expert: int, rows: Tensor, nbytes: int) -> bool:
        """Return whether there is room for activations of a size, and they are not kept yet."""
        pieces = self._kept.get((stream, expert), ())
        return 0 < nbytes <= self.room and not any(torch.equal(known, rows) for known, _ in pieces)

    def clear(self) -> None:
        """Drop all activations; whoever still holds this store holds no memory."""
        self._kept.clear()

    def of(self, stream: int, expert: int, rows: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the activations [n, I] of tokens [n]. `compute` is called for tokens that are not kept."""
        pieces = self._kept.get((stream, expert), ())
        for known, values in pieces:
            if torch.equal(known, rows):
                return values
        if not pieces:
            return compute(rows)
        out = pieces[0][1].new_empty(len(rows), pieces[0][1].shape[1])
        missing = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        for known, values in pieces:
            places = torch.searchsorted(known, rows).clamp_(max=len(known) - 1)
            found = known[places] == rows
            out[found.to(out.device)] = values[places[found].to(values.device)]
            missing &= ~found
        if bool(missing.any()):
            out[missing.to(out.device)] = compute(rows[missing])
        return out

"""Low-rank adapters on packed experts: `y = W x + up (down x)`, with separate factors for each expert.

Adapters target parameters of the transformers module (for example gate and up fused into one), in the layout of that
parameter. Packed modules multiply by projection. `by_projection` converts the former into the latter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from moepack.checkpoint.experts import ExpertsForm

__all__ = ["NONE", "Adapters", "LowRank", "Place", "by_projection", "joined", "split"]


@dataclass(frozen=True)
class LowRank:
    """The low-rank update of one projection of E experts.

    Attributes:
        down: [E, r, C].
        up: [E, R, r].
        own: [T] bool, the tokens of a call that the update applies to; None for all.
    """

    down: Tensor
    up: Tensor
    own: Tensor | None = None

    def to(self, device: torch.device) -> Self:
        """Return the factors on the given device."""
        own = None if self.own is None else self.own.to(device)
        return type(self)(self.down.to(device), self.up.to(device), own)

    def of(self, own: Tensor) -> Self:
        """Return the update of some tokens, [T] bool."""
        return replace(self, own=own)

    def scaled(self, rows: Tensor | None, columns: Tensor | None) -> Self:
        """Return the update where rows were multiplied by [E, R], and columns divided by [E or 1, C]; None means 1."""
        down = self.down if columns is None else self.down / columns[:, None].to(self.down)
        up = self.up if rows is None else self.up * rows[..., None].to(self.up)
        return type(self)(down, up)

    def product(self, x: Tensor, offsets: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Multiply x [N, C], sorted by expert. Return [N, R] in the dtype of the factors.

        Args:
            x: any floating-point dtype.
            offsets: [E + 1], the first row of each expert; rows after the last expert's produce zeros.
            tokens: [N], the token of each row; needed if the update does not apply to all tokens.
        """
        if self.own is not None:
            rows = self.own[tokens].nonzero()[:, 0]
            zeros = torch.zeros(len(x), self.up.shape[1], dtype=self.up.dtype, device=x.device)
            found = replace(self, own=None).product(x[rows], torch.searchsorted(rows, offsets))
            return zeros.index_copy(0, rows, found)
        counts = offsets.diff().tolist()
        *parts, rest = _split(x.to(self.down.dtype), [*counts, len(x) - sum(counts)])
        factors = zip(parts, self.down.unbind(), self.up.unbind(), strict=True)
        products = [functional.linear(functional.linear(part, down), up) for part, down, up in factors if len(part)]
        return torch.cat([*products, rest.new_zeros(len(rest), self.up.shape[1])])


Adapters = Mapping[str, Sequence[LowRank]]
"""The updates of each projection, by its name."""

NONE: Adapters = {}

_split: Any = torch.split  # torch.split is untyped


def by_projection(form: ExpertsForm, parameter: str, left: Tensor, right: Tensor, scaling: float) -> dict[str, LowRank]:
    """Split the factors of a parameter into factors of its projections.

    Args:
        form: how the transformers module stores its experts.
        parameter: its name relative to the module; a stack [E, X, Y] of all experts.
        left: [E, X, r].
        right: [E, r, Y]; the adapter adds `scaling * left @ right` to the parameter.
        scaling: see `right`.
    """
    found = {}
    for projection, place in form.places.items():
        if place.parameter == parameter:
            experts = form.shapes[projection][0]
            up, down = (right.mT, left.mT) if place.transposed else (left, right)
            found[projection] = LowRank(down[:experts], up[:experts, place.rows] * scaling)
    return found


Place = tuple[str, Tensor | None]
"""The projection of an update, and the tokens that it applies to."""


def split(adapters: Adapters, device: torch.device) -> tuple[list[Place], list[Tensor]]:
    """Flatten adapters into their places and their factors on a device, two tensors for each place."""
    pairs = [(projection, factors.to(device)) for projection, each in adapters.items() for factors in each]
    places = [(name, factors.own) for name, factors in pairs]
    return places, [tensor for _, factors in pairs for tensor in (factors.down, factors.up)]


def joined(places: Sequence[Place], factors: Sequence[Tensor]) -> Adapters:
    """The inverse of `split`."""
    found: dict[str, list[LowRank]] = {}
    for (projection, own), down, up in zip(places, factors[::2], factors[1::2], strict=True):
        found.setdefault(projection, []).append(LowRank(down, up, own))
    return found

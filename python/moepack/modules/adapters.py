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
        shares: [T, r], multiplied by `down x` of each token of a call, so that tokens can have updates of their own;
            None for 1.
    """

    down: Tensor
    up: Tensor
    shares: Tensor | None = None

    def to(self, device: torch.device) -> Self:
        """Return the factors on the given device."""
        shares = None if self.shares is None else self.shares.to(device)
        return type(self)(self.down.to(device), self.up.to(device), shares)

    @classmethod
    def stacked(cls, updates: Sequence["LowRank"]) -> "LowRank":
        """Return the sum of updates, with their ranks in order."""
        return cls(torch.cat([each.down for each in updates], 1), torch.cat([each.up for each in updates], 2))

    def of(self, shares: Tensor) -> Self:
        """Return the update with shares of tokens, [T, r]."""
        return replace(self, shares=shares.to(self.down))

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
            tokens: [N], the token of each row; needed if tokens have shares.
        """
        counts = offsets.diff().tolist()
        counts.append(len(x) - sum(counts))
        *parts, rest = _split(x.to(self.down.dtype), counts)
        shares = [None] * len(parts) if self.shares is None else _split(self.shares[tokens], counts)[:-1]
        factors = zip(parts, shares, self.down.unbind(), self.up.unbind(), strict=True)
        products = [_product(part, share, down, up) for part, share, down, up in factors if len(part)]
        return torch.cat([*products, rest.new_zeros(len(rest), self.up.shape[1])])


def _product(x: Tensor, share: Tensor | None, down: Tensor, up: Tensor) -> Tensor:
    """Multiply the rows of one expert."""
    inner = functional.linear(x, down)
    return functional.linear(inner if share is None else inner * share, up)


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
"""The projection of an update, and the shares of tokens."""


def split(adapters: Adapters, device: torch.device) -> tuple[list[Place], list[Tensor]]:
    """Flatten adapters into their places and their factors on a device, two tensors for each place."""
    pairs = [(projection, factors.to(device)) for projection, each in adapters.items() for factors in each]
    places = [(name, factors.shares) for name, factors in pairs]
    return places, [tensor for _, factors in pairs for tensor in (factors.down, factors.up)]


def joined(places: Sequence[Place], factors: Sequence[Tensor]) -> Adapters:
    """The inverse of `split`."""
    found: dict[str, list[LowRank]] = {}
    for (projection, shares), down, up in zip(places, factors[::2], factors[1::2], strict=True):
        found.setdefault(projection, []).append(LowRank(down, up, shares))
    return found

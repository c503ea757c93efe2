"""Low-rank adapters beside packed experts: `y = W x + up (down x)`, with factors of each expert's own.

An adapter is given for a parameter that transformers' module would have (gate and up in one, say), in the layout of
that parameter; the packed module multiplies by projections. `by_projection` turns the one into the other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from moepack.checkpoint.experts import ExpertsForm

__all__ = ["NONE", "Adapters", "LowRank", "by_projection", "joined", "split"]


@dataclass(frozen=True)
class LowRank:
    """What is added to a projection of E experts.

    Attributes:
        down: [E, r, C].
        up: [E, R, r].
    """

    down: Tensor
    up: Tensor

    def to(self, device: torch.device) -> Self:
        """The factors on a device."""
        return type(self)(self.down.to(device), self.up.to(device))

    def product(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Multiply x [N, C], sorted by expert, to [N, R] in the dtype of the factors.

        Args:
            x: of any floating dtype.
            offsets: [E + 1], where each expert's rows begin; rows behind the last expert's give zeros.
        """
        counts = offsets.diff().tolist()
        *parts, rest = _split(x.to(self.down.dtype), [*counts, len(x) - sum(counts)])
        factors = zip(parts, self.down.unbind(), self.up.unbind(), strict=True)
        products = [functional.linear(functional.linear(part, down), up) for part, down, up in factors if len(part)]
        return torch.cat([*products, rest.new_zeros(len(rest), self.up.shape[1])])


Adapters = Mapping[str, Sequence[LowRank]]
"""By projection, what is added to it."""

NONE: Adapters = {}

_split: Any = torch.split  # which has no types


def by_projection(form: ExpertsForm, parameter: str, left: Tensor, right: Tensor, scaling: float) -> dict[str, LowRank]:
    """Split the factors of a parameter into factors of its projections.

    Args:
        form: how the module of transformers holds its experts.
        parameter: its name below the module; a stack [E, X, Y] of all experts.
        left: [E, X, r].
        right: [E, r, Y]; `scaling * left @ right` is added to the parameter.
        scaling: see `right`.
    """
    found = {}
    for projection, place in form.places.items():
        if place.parameter == parameter:
            experts = form.shapes[projection][0]
            up, down = (right.mT, left.mT) if place.transposed else (left, right)
            found[projection] = LowRank(down[:experts], up[:experts, place.rows] * scaling)
    return found


def split(adapters: Adapters, device: torch.device) -> tuple[list[str], list[Tensor]]:
    """The projections of all adapters, one by one, and their factors, two of each, on a device."""
    pairs = [(projection, factors.to(device)) for projection, each in adapters.items() for factors in each]
    return [name for name, _ in pairs], [tensor for _, factors in pairs for tensor in (factors.down, factors.up)]


def joined(projections: Sequence[str], factors: Sequence[Tensor]) -> Adapters:
    """The inverse of `split`."""
    found: dict[str, list[LowRank]] = {}
    for projection, factor in zip(projections, _pairs(factors), strict=True):
        found.setdefault(projection, []).append(factor)
    return found


def _pairs(factors: Sequence[Tensor]) -> Iterator[LowRank]:
    return map(LowRank, factors[::2], factors[1::2])

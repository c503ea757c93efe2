"""The balanced form of a checkpoint, computed tensor by tensor when tensors are read."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moepack.checkpoint.balanced.factors import Factors, matrix_of
from moepack.checkpoint.balanced.seams import Edge, Seam, find_seams
from moepack.checkpoint.model import MoeModel, Part
from moepack.checkpoint.reader import Checkpoint
from moepack.checkpoint.rewritten import Rewriting, RewrittenCheckpoint

__all__ = ["Balanced", "BalancedCheckpoint", "balanced"]

IDENTITY = "balanced"
"""Identifies how factors are computed; changes with the rule."""

ENDS = ("rows", "columns")

NAMES = 700
"""Bytes of the names of the factors around a norm, with those of the layer's experts."""


@dataclass(frozen=True)
class _Change:
    """A multiplication of one axis of a matrix or vector: 0 multiplies rows or a vector, 1 divides columns."""

    edge: Edge
    seam: Seam
    axis: Literal[0, 1]


class Balanced:
    """The tensors of the balanced form.

    Factors are computed when the first tensor that needs them is read, from that tensor's neighbours alone, and are
    kept: two bytes for each norm's feature and each expert's channel.
    """

    def __init__(self, checkpoint: Checkpoint, seams: Iterable[Seam], packed: Collection[str]) -> None:
        self.checkpoint, self.packed, seams = checkpoint, frozenset(packed), tuple(seams)
        self.factors = Factors(checkpoint, seams)
        self._changes: dict[str, dict[int | None, list[_Change]]] = {}
        for seam in seams:
            changes = [_Change(edge, seam, 0) for edge in (*seam.vectors, *seam.writes)]
            changes += [_Change(edge, seam, 1) for edge in seam.reads]
            for change in changes:
                tensor, first = matrix_of(change.edge.part)
                self._changes.setdefault(tensor, {}).setdefault(first, []).append(change)

    @property
    def nbytes(self) -> int:
        """The size of the file of all factors, which are two or four bytes each, to within that of their names."""
        seams = {
            change.seam.name: change.seam for each in self._changes.values() for own in each.values() for change in own
        }
        total = NAMES
        for seam in seams.values():
            edge = (*seam.writes, *seam.vectors)[0].part
            count = edge.of(torch.empty(self.checkpoint.info(edge.tensor).shape, device="meta")).shape[0]
            total += 2 * count if seam.writes else 4 * count + NAMES
        return total

    def source(self, name: str) -> str:
        """Return the name: every tensor is computed from itself."""
        return name

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype in which a tensor is stored; None if it is packed."""
        return None if name in self.packed else self.checkpoint.info(name).dtype

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, in float32 or higher precision if it is changed."""
        value = self.checkpoint.tensor(name)
        changes = [change for each in self._changes.get(name, {}).values() for change in each]
        return self._changed(value, changes) if changes else value

    def part(self, name: str, expert: int) -> Tensor:
        """Return one matrix of a tensor that stacks experts."""
        value = self.checkpoint.part(name, expert)
        changes = self._changes.get(name, {}).get(expert)
        return self._changed(value, changes, inside=True) if changes else value

    def matrix(self, part: Part, device: torch.device) -> Tensor:
        """Copy a matrix to a device, and change it there. The values are the same as from `tensor` and `part`."""
        if not part.index and not self._changes.get(part.tensor, {}).keys() <= {None}:
            return self.tensor(part.tensor).to(device)  # a stack of matrices
        value, changes = self.checkpoint.matrix(part, device), self._inside(part)
        if not changes:
            return value
        changed = value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
        for change in changes:
            self._scale(changed, change)
        return changed

    def _inside(self, part: Part) -> list[_Change]:
        """Return the changes of a matrix, in order. Those of columns may name a matrix that it shares rows with."""
        tensor, first = matrix_of(part)
        return [
            change
            for change in self._changes.get(tensor, {}).get(first, ())
            if (other := change.edge.part) == part
            or (change.axis == 1 and other.index == part.index[: len(other.index)])
        ]

    def factors_of(self, part: Part) -> tuple[Tensor | None, Tensor | None]:
        """Return by what the rows of a matrix, or a vector, are multiplied, and its columns divided; None for 1."""
        found: list[Tensor | None] = [None, None]
        for change in self._inside(part):
            found[change.axis] = change.edge.spread(self.factors.of(change.seam))
        return found[0], found[1]

    def record(self, model: MoeModel, channels: bool = True) -> dict[str, Tensor]:
        """Return all factors by tensor, for the packed directory (`moepack.format.balance`).

        Args:
            model: the description of the checkpoint.
            channels: include the factors of experts' channels. Without them, restored weights compute the same.
        """
        found: dict[str, Tensor] = {}
        experts = [(f"{layer.name}.{part.name}", part.parts) for layer in model.layers for part in layer.projections]
        stacked = {part.tensor for _, parts in experts for part in parts}
        downs = {f"{layer.name}.{layer.projections[-1].name}" for layer in model.layers}
        for key, parts in experts:
            for end, each in zip(ENDS, zip(*map(self.factors_of, parts), strict=True), strict=True):
                inner = end == "rows" or key in downs
                known = [one for one in each if one is not None and (channels or not inner)]
                if known and len(known) == len(each):
                    same = all(one.equal(known[0]) for one in known[1:])
                    found[f"{key}.{end}"] = known[0] if same else torch.stack(known)
        for name in self._changes.keys() - stacked:
            for end, one in zip(ENDS, self.factors_of(Part(name)), strict=True):
                if one is not None:
                    found[f"{name}.{end}"] = one
        return {name: _short(factors) for name, factors in found.items()}

    def _changed(self, value: Tensor, changes: Iterable[_Change], inside: bool = False) -> Tensor:
        """Return a changed copy; `inside` if it is only the matrix that the changes' first index selects."""
        changed = value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
        for change in changes:
            part = change.edge.part
            view = changed[part.index[1:] if inside else part.index]
            self._scale(view.mT if part.transposed else view, change)
        return changed

    def _scale(self, view: Tensor, change: _Change) -> None:
        """Change a matrix [R, C] or a vector in place."""
        factors = change.edge.spread(self.factors.of(change.seam)).to(view.device)
        if change.axis == 1:
            view /= factors
        else:
            view *= factors if view.ndim == 1 else factors[:, None]


class BalancedCheckpoint(RewrittenCheckpoint):
    """A checkpoint in its balanced form.

    Attributes:
        form: its tensors and factors.
    """

    def __init__(self, original: Checkpoint, form: Balanced) -> None:
        self.form = form
        super().__init__(
            original,
            Rewriting(original.names(), form.source, form.tensor, form.dtype, {}, {}, IDENTITY, form.part),
        )

    def matrix(self, part: Part, device: torch.device | None = None) -> Tensor:
        """Return a matrix, changed on the device if one is given. Errors as for `tensor`."""
        if device is None:
            return super().matrix(part)
        value, dtype = self.form.matrix(part, device), self.form.dtype(part.tensor)
        return value if dtype is None else value.to(dtype)


def _short(factors: Tensor) -> Tensor:
    """Return factors as bfloat16 if they fit."""
    return short if (short := factors.bfloat16()).float().equal(factors) else factors


def balanced(
    checkpoint: Checkpoint, model: MoeModel, packed: Collection[str], kept: Collection[str] = ()
) -> BalancedCheckpoint | None:
    """Return the balanced form of a checkpoint; None if it has no seam.

    Args:
        checkpoint: the checkpoint.
        model: its description.
        packed: names of the tensors that will be packed in a format without factors of columns.
        kept: names of tensors that must keep their scales.
    """
    seams = [seam for seam in find_seams(checkpoint, model, packed) if seam.tensors.isdisjoint(kept)]
    return BalancedCheckpoint(checkpoint, Balanced(checkpoint, seams, packed)) if seams else None

"""Formats of fixed width, chosen tensor by tensor: fewer bits or larger groups where errors count less.

Their products are several times as fast as those of coded integers (docs/performance.md), and a tensor needs no text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from moepack.allocation import Candidate, allocate
from moepack.calibration import Stage
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.dense import ROLES
from moepack.methods.auto.importance import Importance
from moepack.methods.auto.packer import Packer
from moepack.methods.base import Expected, PackedTensor, Shape, Solution, Weights
from moepack.methods.finequant import FineQuant
from moepack.methods.finequant.planning import proposals
from moepack.methods.finequant.sizes import packed_bytes
from moepack.solvers.groupwise import BITS

__all__ = ["Grouped"]

SIZES = (32, 64, 128)
"""Columns that share a scale: smaller groups pay for theirs with bits, larger ones lose more than they save."""

Choice = tuple[int, int | None]
"""Bits of a code, and columns that share a scale."""


@dataclass(frozen=True)
class Grouped(Packer):
    """A width and a group size for each tensor.

    Attributes:
        choices: by the packed tensor's name.
        loss: that is expected.
    """

    choices: Mapping[str, Choice]
    loss: float

    @staticmethod
    def least_bits(shapes: Collection[Shape]) -> float:
        """The fewest bits a weight that all tensors together can take."""
        least = sum(packed_bytes(shape, min(BITS), max(SIZES)) for shape in shapes)
        return 8 * least / max(sum(map(math.prod, shapes)), 1)

    @classmethod
    def chosen(cls, checkpoint: Checkpoint, model: MoeModel, importance: Importance, room: int) -> Grouped:
        """Choose within so many bytes.

        Raises:
            InvalidTensorError: a sampled weight is NaN or infinite.
        """
        found: dict[str, list[Candidate[Choice]]] = {}
        for bits in BITS:
            widths = {"experts": bits, **dict.fromkeys(ROLES, bits)}
            for one in proposals(checkpoint, model, widths, importance=importance.values, sizes=SIZES):
                found.setdefault(one.name, []).extend(
                    Candidate(each.format, (bits, each.specification), each.nbytes, each.loss)
                    for each in one.candidates
                )
        picked = dict(zip(found, allocate(list(found.values()), room), strict=True))
        losses = (choice.candidate.loss for choice in picked.values())
        return cls({name: choice.candidate.specification for name, choice in picked.items()}, importance.loss(losses))

    @property
    def identity(self) -> str:
        """What the bytes follow from: some digits of a digest of all choices."""
        return hashlib.sha256(json.dumps(sorted(self.choices.items())).encode()).hexdigest()[:16]

    def _method(self, name: str) -> FineQuant:
        return _finequant(*self.choices[name])

    def expected(self, weights: Weights) -> Expected:
        """What the choice takes."""
        return self._method(weights.name).expected(weights)

    def decision(self, name: str) -> Any:
        """Bits and group size."""
        return list(self.choices[name])

    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        """Round a tensor to nearest."""
        (weights,) = stage.tensors.values()
        return self._method(weights.name).solve(stage)

    def pack(self, weights: Weights, solution: Solution) -> PackedTensor:
        """Pack the codes."""
        return self._method(weights.name).pack(weights, solution)


@cache
def _finequant(bits: int, size: int | None) -> FineQuant:
    return FineQuant(bits, size or "row", dense_bits=",".join(f"{role}={bits}" for role in ROLES))

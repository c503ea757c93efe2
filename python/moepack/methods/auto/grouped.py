"""Fixed-width formats, chosen per tensor: fewer bits or larger groups if errors matter less.

Their matrix products are several times as fast as those of coded integers (docs/performance.md). With a text, tensors
are solved on its inputs (`finequant.solving`), otherwise rounded to nearest.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from moepack.allocation import Candidate
from moepack.calibration import Stage
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.dense import ROLES
from moepack.methods.auto.loss import expected_rise
from moepack.methods.auto.packer import Allocated
from moepack.methods.base import Expected, PackedBytes, Solution, Weights
from moepack.methods.finequant.method import FineQuant
from moepack.methods.finequant.planning import proposals
from moepack.methods.finequant.solving import solve_on_inputs
from moepack.methods.rate.importance import Importance, role_of
from moepack.solvers.integers import IntegerSettings
from moepack.solvers.widths import BITS

__all__ = ["Grouped"]

SIZES = (32, 64, 128)
"""Columns that share a scale. Smaller groups spend more bits on scales, larger groups lose more than they save."""

SEEN = 1 << 16
"""Approximate number of weights per tensor on which losses are measured."""

Choice = tuple[int, int | None]
"""Bits per code, and columns that share a scale; None is a whole row."""


@dataclass(frozen=True)
class Grouped(Allocated):
    """A width and a group size for each tensor.

    Attributes:
        choices: width and group size by the packed tensor's name.
        errors, loss: see `Allocated`.
    """

    choices: Mapping[str, Choice]
    errors: Mapping[str, float]
    loss: float

    @staticmethod
    def candidates(
        checkpoint: Checkpoint, model: MoeModel, importance: Importance
    ) -> Iterator[tuple[str, Candidate[Choice]]]:
        """Yield each width and group size for every tensor except the embedding, whose products this format lacks.

        Losses are squared errors of rounded weights, multiplied by the factors that make all errors count equally.

        Raises:
            InvalidTensorError: a sampled weight is NaN or infinite.
        """
        weighing = {name: (scales.rows, scales.columns) for name, scales in importance.scales.items()}
        for bits in BITS:
            widths = {"experts": bits, **dict.fromkeys(ROLES, bits)}
            for one in proposals(checkpoint, model, widths, weighing=weighing, sizes=SIZES, sample=SEEN):
                for each in one.candidates:
                    yield one.name, Candidate(each.format, (bits, each.specification), each.nbytes, each.loss)

    @classmethod
    def of(cls, model: MoeModel, taken: Mapping[str, Candidate[Choice]]) -> Grouped:
        """Build a packer from the chosen candidates, by the packed tensor's name."""
        roles, errors = role_of(model), defaultdict[str, float](float)
        for name, one in taken.items():
            errors[roles[name]] += 0.5 * one.loss
        return cls({name: one.specification for name, one in taken.items()}, errors, expected_rise(errors))

    @property
    def identity(self) -> str:
        """The first 16 hexadecimal digits of a SHA-256 digest of all choices, which determine the output."""
        return hashlib.sha256(json.dumps(sorted(self.choices.items())).encode()).hexdigest()[:16]

    def _method(self, name: str) -> FineQuant:
        return _finequant(*self.choices[name])

    def expected(self, weights: Weights) -> Expected:
        """Return the size of a tensor in its chosen format."""
        return self._method(weights.name).expected(weights)

    @property
    def decisions(self) -> Mapping[str, Any]:
        """The bits and the group size of each tensor."""
        return {name: list(choice) for name, choice in self.choices.items()}

    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        """Solve the tensors of a stage on their inputs, or round one to nearest."""
        if stage.inputs is not None:
            return solve_on_inputs(stage, self._grid)
        (weights,) = stage.tensors.values()
        return self._method(weights.name).solve(stage)

    def _grid(self, weights: Weights) -> IntegerSettings:
        return IntegerSettings(*self.choices[weights.name])

    def pack(self, weights: Weights, solution: Solution) -> PackedBytes:
        """Pack the codes of a tensor."""
        return self._method(weights.name).pack(weights, solution)


@cache
def _finequant(bits: int, size: int | None) -> FineQuant:
    return FineQuant(bits, size or "row", dense_bits=",".join(f"{role}={bits}" for role in ROLES))

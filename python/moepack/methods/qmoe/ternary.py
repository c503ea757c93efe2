"""Round-to-nearest ternary weights, entropy coded: QMoE's grid and code without calibration.

This is a building block and a baseline. It is not offered to users, because it loses 1 to 3 nats per token.

Each row of each expert has two levels, its minimum and maximum (QMoE, section 4.1). Every weight is rounded to the
nearest of {minimum, 0, maximum}, and the codes are entropy coded (`fsv8`, or `dict16` as in the paper).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from moepack import _core
from moepack.methods.base import Expected, PackedBytes, Shape, SimpleMethod, Solution, Stage, Weights
from moepack.methods.parallel import for_experts
from moepack.methods.settings import setting
from moepack.solvers.rtn import quantize_ternary

__all__ = ["Ternary"]

_ROW_BYTES = {"fsv8": (4, 1), "dict16": (2, 2)}
"""Worst-case row of a code, as (columns, bytes): fsv8 falls back to 2 bits per weight, a dict16 word covers two
weights."""


@dataclass
class Ternary(SimpleMethod):
    """Rounds to nearest."""

    code: str = setting("fsv8", help="Entropy code", choices=tuple(_ROW_BYTES))
    name: ClassVar[str] = "ternary"

    @property
    def packs_empty(self) -> bool:
        """True: empty experts are packed as a header."""
        return True

    @property
    def needs_balance(self) -> bool:
        """True: columns share scales."""
        return True

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the size if every row has the worst case of the code."""
        experts, rows, columns = shape
        step, cost = _ROW_BYTES[self.code]
        row = -(-columns // step) * cost + 8 + 4  # payload, two f32 levels, index entry
        return experts * (rows * row + 8 * (rows // 64 + 2)) + 1024  # group starts; header and padding of sections

    def expected(self, weights: Weights) -> Expected:
        """Return the size, assuming that all experts compress like the first."""
        return Expected(self.sample(weights.one_expert()).data.nbytes * weights.shape[0], exact=False)

    def quantize(self, weights: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes int8 [R, C] and levels [R, 2] of the weights [R, C] of one expert; errors call it `name`."""
        return quantize_ternary(weights, name=name)

    def solve(self, stage: Stage) -> dict[str, Solution]:
        """Quantize one tensor, several experts at a time; holds its codes (one byte per weight)."""
        ((name, weights),) = stage.tensors.items()
        experts, rows, columns = weights.shape
        codes, levels = torch.empty(weights.shape, dtype=torch.int8), torch.empty(experts, rows, 2)

        def quantize(expert: int) -> None:
            codes[expert], levels[expert] = self.quantize(weights.expert(expert), weights.sources[expert])

        for_experts(quantize, experts, lambda: stage.advance(rows * columns))
        return {name: Solution({"codes": codes, "levels": levels})}

    def pack(self, weights: Weights, solution: Solution) -> PackedBytes:
        """Encode the codes."""
        codes, levels = solution.parts["codes"].numpy(), solution.parts["levels"].numpy()
        blob = _core.encode_ternary(codes, levels, ndim=weights.ndim, code=self.code)
        nonzeros = _core.PackedTensor(blob).details()["nonzeros"]
        return PackedBytes("ternary", blob, {"code": self.code, "nonzeros": nonzeros})

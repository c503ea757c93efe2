"""Round-to-nearest ternary weights, entropy coded: QMoE's grid and code without calibration.

Each row of each expert gets two levels, its minimum and maximum (QMoE, section 3.3), every weight
goes to the nearest of {minimum, 0, maximum}, and the codes are entropy coded (`fsv8`, or `dict16` as in the paper).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from moepack import _core
from moepack.methods.base import Expected, PackedTensor, Shape, Weights
from moepack.methods.parallel import for_experts
from moepack.solvers.rtn import quantize_ternary

CODES = ("fsv8", "dict16")

_ROW_BYTES = {"fsv8": (4, 1), "dict16": (2, 2)}
"""Worst row of a code, as (columns, bytes): fsv8 falls back to 2 bits a weight, a dict16 word covers two weights."""


@dataclass(frozen=True)
class Ternary:
    """The method `ternary`.

    Attributes:
        code: the entropy code, `fsv8` or `dict16`.
    """

    code: str = "fsv8"
    name: ClassVar[str] = "ternary"

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"unknown code '{self.code}'; there is: {', '.join(CODES)}")

    @property
    def settings(self) -> Mapping[str, Any]:
        """The code."""
        return {"code": self.code}

    def bound(self, shape: Shape) -> int:
        """Return the size of a blob all of whose rows are as bad as the code allows."""
        experts, rows, columns = shape
        step, cost = _ROW_BYTES[self.code]
        row = -(-columns // step) * cost + 8 + 4  # payload, two f32 levels, index entry
        return experts * (rows * row + 8 * (rows // 64 + 2)) + 1024  # group starts; header and padding of sections

    def expected(self, weights: Weights) -> Expected:
        """Return the size if all experts are coded as well as the first."""
        sample = self._compress(weights.one_expert(), lambda _: None)
        return Expected(sample.data.nbytes * weights.shape[0], exact=False)

    def compress_layer(
        self, layer: Mapping[str, Weights], advance: Callable[[int], None]
    ) -> Iterator[tuple[str, PackedTensor]]:
        """Quantize and encode each projection; holds the codes (a byte a weight) of one projection at a time."""
        for name, weights in layer.items():
            yield name, self._compress(weights, advance)

    def quantize(self, weights: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes int8 [R, C] and levels [R, 2] of the weights [R, C] of one expert, called `name` in errors."""
        return quantize_ternary(weights, name=name)

    def _compress(self, weights: Weights, advance: Callable[[int], None]) -> PackedTensor:
        experts, rows, columns = weights.shape
        codes = np.empty(weights.shape, np.int8)
        levels = np.empty((experts, rows, 2), np.float32)

        def quantize(expert: int) -> None:
            found, pairs = self.quantize(weights.expert(expert), weights.sources[expert])
            torch.from_numpy(codes[expert]).copy_(found)
            torch.from_numpy(levels[expert]).copy_(pairs)

        for_experts(quantize, experts, lambda: advance(rows * columns))
        blob = _core.encode_ternary(codes, levels, ndim=3, code=self.code)
        nonzeros = _core.PackedTensor(blob).details()["nonzeros"]
        return PackedTensor("ternary", blob, {"code": self.code, "nonzeros": nonzeros})

"""The method `finequant`: symmetric integers, rounded to nearest, per row or per group of columns (FineQuant, section
3).

It needs no calibration. A tensor's group size is fixed, or chosen from its weights: by the paper's adaptive rule
(section 3.3), or by loss per byte over all tensors of the model. Experts, attention, shared experts and other linear
layers may use different bits (table 5).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from moepack import _core
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.errors import InvalidTensorError
from moepack.methods.base import Expected, Method, PackedTensor, Shape, Solution, Stage, Weights
from moepack.methods.finequant.planning import REFERENCE, plan_sizes, proposals
from moepack.methods.finequant.sizes import (
    GroupSize,
    free_size,
    halving_ratios,
    halvings,
    packed_bytes,
    sizes_for,
    stored_size,
)
from moepack.methods.parallel import for_experts
from moepack.methods.roles import as_number, dense_text, parse_dense_bits
from moepack.progress import Progress
from moepack.solvers.groupwise import BITS, GROUP_SIZES, group_values, quantize_groupwise

__all__ = ["FineQuant"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

ROW, ADAPTIVE, MEAN, BUDGET = "row", "adaptive", "adaptive-mean", "budget"

ALPHA = {ADAPTIVE: 0.35, MEAN: 0.87}
"""Default alpha of the adaptive rules."""


@dataclass
class FineQuant(Method):
    """Settings of the method.

    Attributes:
        bits: bits per code of the experts: 2, 3, 4 or 8.
        group_size: columns that share a scale (16, 32, 64, 128 or 256), "row", "adaptive" (the paper's rule),
            "adaptive-mean" (the same rule with the mean over groups instead of the extreme), or "budget" (the best
            sizes within `bits_per_weight`).
        bits_per_weight: budget over all packed tensors, including all metadata; None means the size with groups of 64.
        dense_bits: bits of linear layers outside the experts. None copies these layers. A number packs attention,
            shared experts and dense feed-forward layers. "attention=3,shared=8" (roles: attention, shared, mlp, head)
            sets bits per role.
        alpha: threshold of the adaptive rules: groups are halved while some range (adaptive) or the mean range
            (adaptive-mean) falls below this fraction of the parent's. The paper publishes no value. None means 0.35 for
            the first rule (ranges of Gaussian weights fall to 0.4 at 128 columns and to 0.3 at 64) and 0.87 for the
            second (0.93, 0.89).
        symmetric: store only a scale per group; False adds an offset.
        search: choose scales of least squared error; False uses the paper's scales, from the largest magnitude.
        scales: dtype of the stored scales, "float16" or "bfloat16".
    """

    bits: int = 4
    group_size: int | str = 64
    bits_per_weight: float | None = None
    dense_bits: str | int | None = None
    alpha: float | None = None
    symmetric: bool = True
    search: bool = True
    scales: str = "float16"
    name: ClassVar[str] = "finequant"
    packs_empty: ClassVar[bool] = True
    _sizes: Mapping[str, GroupSize] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.bits = as_number(self.bits, "bits")
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, not {self.bits}")
        if str(self.group_size) in map(str, GROUP_SIZES):
            self.group_size = int(self.group_size)
        elif self.group_size not in (ROW, *ALPHA, BUDGET):
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise ValueError(
                f"group_size must be {sizes}, row, adaptive, adaptive-mean or budget, not {self.group_size!r}"
            )
        if self.bits_per_weight is not None:
            if self.group_size != BUDGET:
                raise ValueError("bits_per_weight requires group_size budget")
            if not 0 < self.bits_per_weight <= 32:
                raise ValueError(f"bits_per_weight must be a rate, such as 4.25, not {self.bits_per_weight}")
        if self.group_size in ALPHA:
            self.alpha = ALPHA[str(self.group_size)] if self.alpha is None else self.alpha
        elif self.alpha is not None:
            raise ValueError("alpha requires group_size adaptive or adaptive-mean")
        if self.alpha is not None and not 0 < self.alpha < 1:
            raise ValueError(f"alpha must be between 0 and 1, not {self.alpha}")
        if self.scales not in _DTYPES:
            raise ValueError(f"scales must be float16 or bfloat16, not {self.scales}")
        self._dense = parse_dense_bits(self.dense_bits)

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings that change the output."""
        values: dict[str, Any] = {"bits": self.bits, "group_size": self.group_size}
        if self.group_size == BUDGET:
            values["bits_per_weight"] = self.bits_per_weight
        if self.group_size in ALPHA:
            values["alpha"] = self.alpha
        return {
            **values,
            "dense_bits": dense_text(self._dense),
            "symmetric": self.symmetric,
            "search": self.search,
            "scales": self.scales,
        }

    @property
    def dense_roles(self) -> frozenset[str]:
        """The roles with bits."""
        return frozenset(self._dense)

    @property
    def needs_balance(self) -> bool:
        """True: columns share scales."""
        return True

    @property
    def kernel(self) -> str:
        """Products of group-wise integers."""
        return "int"

    @property
    def looks_ahead(self) -> bool:
        """Whether there is a budget, which is allocated over the whole model."""
        return self.group_size == BUDGET

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the size with the fixed group size, or with the smallest one if it is not yet known."""
        bits = self._bits(role)
        if isinstance(self.group_size, int) or self.group_size == ROW:
            return packed_bytes(shape, bits, self._fixed(), self.symmetric)
        return max(packed_bytes(shape, bits, size, self.symmetric) for size in sizes_for(shape[2]))

    def _bits(self, role: str) -> int:
        return self.bits if role == "experts" else self._dense[role]

    def expected(self, weights: Weights) -> Expected:
        """Return the size: exact for a fixed group size, otherwise the budget or an estimate from the first expert."""
        bits = self._bits(weights.role)
        if isinstance(self.group_size, int) or self.group_size == ROW:
            return Expected(self.bound(weights.shape, weights.role), exact=True)
        if self.group_size != BUDGET:
            return Expected(self.sample(weights.one_expert()).data.nbytes * weights.shape[0], exact=False)
        if self.bits_per_weight is None:
            return Expected(packed_bytes(weights.shape, bits, REFERENCE, self.symmetric), exact=False)
        return Expected(math.prod(weights.shape) * self.bits_per_weight / 8, exact=False)

    def _fixed(self) -> GroupSize:
        return self.group_size if isinstance(self.group_size, int) else None

    def prepare(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None) -> None:
        """Allocate the budget, if there is one.

        Raises:
            ValueError: the budget is below the size with one scale per row.
        """
        if self.group_size == BUDGET:
            bits = {"experts": self.bits, **self._dense}
            found = list(proposals(checkpoint, model, bits, self.symmetric, self.search))
            self._sizes = plan_sizes(found, self.bits_per_weight, self.symmetric)

    def _size(self, weights: Weights) -> GroupSize:
        """Return the group size of a tensor."""
        if self._sizes is not None:
            return self._sizes[weights.name]
        if self.alpha is None:
            return self._fixed()
        experts, _, columns = weights.shape
        ratios = np.ones((experts, max(len(halvings(columns)) - 1, 0)))

        def measure(expert: int) -> None:
            ratios[expert] = halving_ratios(weights.expert(expert), mean)

        mean = self.group_size == MEAN
        for_experts(measure, experts, lambda: None)
        found = ratios.mean(0) if mean and experts else ratios.min(0, initial=1.0)
        return free_size(weights.shape, stored_size(columns, found, self.alpha), self.symmetric)

    def decided(self, name: str) -> GroupSize:
        """Return the group size that the budget allocation chose for a tensor."""
        return None if self._sizes is None else self._sizes[name]

    def solve(self, stage: Stage) -> dict[str, Solution]:
        """Quantize one tensor, several experts at a time; holds its codes (one byte per weight)."""
        ((name, weights),) = stage.tensors.items()
        experts, rows, columns = weights.shape
        size, bits = self._size(weights), self._bits(weights.role)
        groups = -(-columns // (size or columns)) if columns else 0
        codes = torch.empty(weights.shape, dtype=torch.uint8)
        scales = torch.empty(experts, rows, groups)
        offsets = torch.empty(experts, rows, 0 if self.symmetric else groups)
        sums = np.zeros((experts, 2))

        def quantize(expert: int) -> None:
            weight = weights.expert(expert)
            found = quantize_groupwise(
                weight, bits, size, symmetric=self.symmetric, search=self.search,
                dtype=_DTYPES[self.scales], name=weights.sources[expert],
            )  # fmt: skip
            codes[expert], scales[expert] = found.codes, found.scales
            if found.offsets is not None:
                offsets[expert] = found.offsets
            values = weight.float()
            error = (group_values(found, bits, size) - values).square_().sum(-1)
            # NumPy sums the rows, because torch's order depends on the number of threads.
            sums[expert] = [error.numpy().sum(dtype=np.float64), values.square().sum(-1).numpy().sum(dtype=np.float64)]

        for_experts(quantize, experts, lambda: stage.advance(rows * columns))
        error, energy = sums.sum(0)
        relative = _digits(error / energy if energy else 0.0)
        details = {"group_size": size or max(columns, 1), "relative_error": relative}
        return {name: Solution({"codes": codes, "scales": scales, "offsets": offsets}, details=details)}

    def pack(self, weights: Weights, solution: Solution) -> PackedTensor:
        """Pack the codes."""
        bits, parts = self._bits(weights.role), {name: part.numpy() for name, part in solution.parts.items()}
        try:
            blob = _core.encode_groupwise(
                parts["codes"], parts["scales"], None if self.symmetric else parts["offsets"], bits=bits,
                group_size=solution.details["group_size"], ndim=weights.ndim, dtype=self.scales,
            )  # fmt: skip
        except ValueError as cause:
            raise InvalidTensorError(str(cause), tensor=weights.name) from cause
        width = _core.PackedTensor(blob).details()["group_size"]
        details = {"bits": bits, "group_size": width, "symmetric": self.symmetric, "dtype": self.scales}
        return PackedTensor("groupwise", blob, details)


def _digits(value: float) -> float:
    """Round to six significant digits for reports."""
    return float(f"{value:.5e}")

"""The method `finequant`: integers per row or per group of columns (FineQuant, section 3).

Weights are solved on the inputs of a text (`solving`), and experts may have a codebook per row instead. Without a text,
as in the paper, weights are rounded to nearest. A tensor's group size is fixed, or chosen from its weights: by the
paper's adaptive rule (section 3.3), or by loss per byte over all tensors of the model. Experts, attention, shared
experts and other linear layers may use different bits (table 5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from moepack import _core
from moepack.calibration import CalibrationRequest
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.dense import ROLES
from moepack.errors import InvalidTensorError
from moepack.methods import books
from moepack.methods.base import (
    Expected,
    Method,
    MethodPlan,
    PackedBytes,
    Shape,
    SimpleMethod,
    Solution,
    Stage,
    Weights,
)
from moepack.methods.books import pack
from moepack.methods.coverage import coverage_notes
from moepack.methods.finequant.planning import REFERENCE, Proposal, plan_sizes, proposals
from moepack.methods.finequant.settings import (
    ADAPTIVE,
    ALPHA,
    BOOK_BITS,
    BUDGET,
    CODEBOOK,
    GROUP,
    INTEGERS,
    ROW,
    FineQuantSettings,
)
from moepack.methods.finequant.sizes import (
    GroupSize,
    free_size,
    halving_ratios,
    halvings,
    packed_bytes,
    sizes_for,
    stored_size,
)
from moepack.methods.finequant.solving import Grid, book_settings, solve_on_inputs, solve_without_inputs
from moepack.methods.fitting import DENSE, Fitted, Wanted
from moepack.methods.mixins import PacksLinears
from moepack.methods.parallel import for_experts
from moepack.methods.pinned import Pin, PinsBits, check_bits
from moepack.methods.rate.pinned import pinned_bytes
from moepack.methods.request import TEXT_SETTINGS, DefaultText, request_of
from moepack.methods.roles import dense_text, parse_dense_bits
from moepack.methods.settings import in_words
from moepack.progress import Progress
from moepack.solvers.activations import Rounding
from moepack.solvers.codebooks import ClusterSettings
from moepack.solvers.groupwise import group_values, quantize_groupwise
from moepack.solvers.integers import IntegerSettings
from moepack.solvers.widths import BITS

__all__ = ["FineQuant"]


@dataclass
class FineQuant(FineQuantSettings, Fitted, PinsBits, DefaultText, PacksLinears, SimpleMethod):
    """The method with its settings."""

    pinned_bits: ClassVar[str] = in_words(BITS)
    pinned_roles: ClassVar[frozenset[str]] = frozenset(ROLES)
    without_text: ClassVar[str] = "weights are rounded to nearest"

    _sizes: Mapping[str, GroupSize] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits_per_weight is not None and self.group_size != BUDGET:
            raise ValueError("bits_per_weight requires group_size budget")
        if self.group_size == ADAPTIVE:
            self.alpha = ALPHA if self.alpha is None else self.alpha
        elif self.alpha is not None:
            raise ValueError("alpha requires group_size adaptive")
        self._dense = parse_dense_bits(self.dense_bits)
        if self.grid == CODEBOOK:
            self._check_book()
        _ = self.request  # runs its checks

    def _check_book(self) -> None:
        """Raise ValueError if other settings do not fit a codebook per row."""
        if self.calibration is None:
            raise ValueError("grid codebook requires calibration")
        if self.bits not in BOOK_BITS:
            raise ValueError(f"grid codebook requires bits {in_words(BOOK_BITS)}, not {self.bits}")
        if self.group_size not in (GROUP, ROW) or not self.symmetric:
            raise ValueError("grid codebook has neither group_size nor offsets: a codebook belongs to a row")

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings that change the output, except the calibration set."""
        values: dict[str, Any] = {"bits": self.bits, "group_size": self.group_size}
        if self.grid == CODEBOOK:
            values["grid"] = self.grid
        if self.calibration is not None:
            values |= {key: getattr(self, key) for key in TEXT_SETTINGS}
        if self.group_size == BUDGET:
            values["bits_per_weight"] = self.bits_per_weight
        if self.group_size == ADAPTIVE:
            values["alpha"] = self.alpha
        return {**values, "dense_bits": dense_text(self._dense), "symmetric": self.symmetric}

    @property
    def request(self) -> CalibrationRequest | None:
        """The calibration set, and how the model runs; None without calibration."""
        return request_of(self)

    @property
    def needs_text(self) -> bool:
        """True for codebooks, which are fitted on a text."""
        return self.grid == CODEBOOK

    def hindrance(self, checkpoint: Checkpoint, model: MoeModel) -> str | None:
        """See `DefaultText`; also, nothing runs through experts without values."""
        if any(0 in part.shape for layer in model.layers for part in layer.projections):
            return "the model has experts without values"
        return super().hindrance(checkpoint, model)

    @property
    def packs_empty(self) -> bool:
        """True without a text; nothing runs through experts without values."""
        return self.calibration is None

    @property
    def dense_roles(self) -> frozenset[str]:
        """The roles with bits."""
        return frozenset(self._dense)

    @property
    def needs_balance(self) -> bool:
        """True: columns share scales."""
        return True

    @property
    def kernel(self) -> str | None:
        """Products of group-wise integers; those of codebooks are not measured."""
        return "int" if self.grid == INTEGERS else None

    @property
    def looks_ahead(self) -> bool:
        """Whether there is a budget, which is allocated over the whole model."""
        return self.group_size == BUDGET

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the size with the fixed group size, or with the smallest one if it is not yet known."""
        if self._is_book(role):
            return books.packed_bytes(shape, self.bits, None, 0)
        bits = self._bits(role)
        if isinstance(self.group_size, int) or self.group_size == ROW:
            return packed_bytes(shape, bits, self._fixed(), self.symmetric)
        return max(packed_bytes(shape, bits, size, self.symmetric) for size in sizes_for(shape[2]))

    def _bits(self, role: str) -> int:
        return self.bits if role == "experts" else self._dense[role]

    def expected(self, weights: Weights) -> Expected:
        """Return the size: exact for a fixed group size, otherwise the budget or an estimate from the first expert."""
        bits = self._bits(weights.role)
        if isinstance(self.group_size, int) or self.group_size == ROW or self._is_book(weights.role):
            return Expected(self.bound(weights.shape, weights.role), exact=True)
        if self.group_size != BUDGET:
            return Expected(self.sample(weights.one_expert()).data.nbytes * weights.shape[0], exact=False)
        if self.bits_per_weight is None:
            return Expected(packed_bytes(weights.shape, bits, REFERENCE, self.symmetric), exact=False)
        return Expected(math.prod(weights.shape) * self.bits_per_weight / 8, exact=False)

    def _fixed(self) -> GroupSize:
        return self.group_size if isinstance(self.group_size, int) else None

    def plan(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None) -> MethodPlan:
        """Allocate the budget, if there is one.

        Raises:
            ValueError: the budget is below the size with one scale per row.
        """
        if self.group_size != BUDGET:
            return super().plan(checkpoint, model, progress)
        bits = {"experts": self.bits, **self._dense}
        found = list(proposals(checkpoint, model, bits, self.symmetric))
        pins = {} if self.pinned is None else self.pinned.methods
        coded = pinned_bytes(self)
        taken = {
            one.name: (math.prod(one.shape), math.ceil(coded.get(one.name) or pins[one.name].bound(one.shape)))
            for one in found
            if one.name in pins
        }
        rest = [one for one in found if one.name not in pins]
        sizes = plan_sizes(rest, _rate_of_rest(self.bits_per_weight, rest, taken), self.symmetric) if rest else {}
        packer = self._with_sizes(sizes)
        return MethodPlan(self, packer, checkpoint.fingerprint(), self.settings, self.request, decisions=sizes)

    def pin(self, pins: Sequence[Pin], checkpoint: Checkpoint, model: MoeModel) -> dict[str, Method]:
        """Return the method with other bits; a budget is shared by the others, around groups of 64."""
        widths = {pin.name: (pin.role == "experts", pin.one or 0) for pin in pins}
        check_bits([bits for _, bits in widths.values()], BITS, self.name, self.pinned_bits)
        sized: dict[str, Any] = {"group_size": GROUP, "bits_per_weight": None} if self.group_size == BUDGET else {}
        made: dict[tuple[bool, float], Method] = {}
        for experts, bits in set(widths.values()):
            dense = ",".join(f"{role}={int(bits)}" for role in ROLES)
            own: dict[str, Any] = {"bits": int(bits) if experts else self.bits, "dense_bits": dense}
            made[experts, bits] = replace(self, **own, **sized)
        return {name: made[width] for name, width in widths.items()}

    def _with_sizes(self, sizes: Mapping[str, GroupSize]) -> FineQuant:
        """Return a packer with a group size for each tensor."""
        packer = copy(self)
        packer._sizes = sizes
        return packer

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Name experts that saw few tokens, and experts that were quantized without error compensation."""
        return coverage_notes(layers, self.minimum_tokens)

    @classmethod
    def fitted(cls, wanted: Wanted) -> FineQuant:
        """Meet a size by the bits and the budget of the groups; see `Fitted`."""
        shapes, rate = wanted.shapes.values(), wanted.bits(DENSE)
        weights = sum(map(math.prod, shapes))
        for bits in reversed(BITS):
            if rate * weights >= 8 * sum(packed_bytes(shape, bits, 128) for shape in shapes):
                return cls(bits, BUDGET, rate, dense_bits=bits, **wanted.text)
        raise ValueError("two bits in groups take more")

    def _size(self, weights: Weights) -> GroupSize:
        """Return the group size of a tensor."""
        if self._sizes is not None:
            return self._sizes[weights.name]
        if self.alpha is None:
            return self._fixed()
        experts, _, columns = weights.shape
        ratios = np.ones((experts, max(len(halvings(columns)) - 1, 0)))

        def measure(expert: int) -> None:
            ratios[expert] = halving_ratios(weights.expert(expert))

        for_experts(measure, experts, lambda: None)
        return free_size(weights.shape, stored_size(columns, ratios.min(0, initial=1.0), self.alpha), self.symmetric)

    def solve(self, stage: Stage) -> dict[str, Solution]:
        """Solve a stage on its inputs, or quantize one tensor if there are none."""
        if stage.inputs is not None:
            return solve_on_inputs(stage, self._grid_of)
        (weights,) = stage.tensors.values()
        grid = self._grid_of(weights)
        return solve_without_inputs(stage, grid) if isinstance(grid, ClusterSettings) else self._rounded(stage)

    def _grid_of(self, weights: Weights) -> Grid:
        """Return how a tensor is stored."""
        if self._is_book(weights.role):
            return book_settings(self.bits)
        return IntegerSettings(self._bits(weights.role), self._size(weights), self.symmetric)

    def _is_book(self, role: str) -> bool:
        return role == "experts" and self.grid == CODEBOOK

    def _rounded(self, stage: Stage) -> dict[str, Solution]:
        """Round one tensor, several experts at a time; holds its codes (one byte per weight)."""
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
            found = quantize_groupwise(weight, bits, size, symmetric=self.symmetric, name=weights.sources[expert])
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

    def pack(self, weights: Weights, solution: Solution) -> PackedBytes:
        """Pack the codes."""
        if self._is_book(weights.role):
            return pack(weights, solution.parts, book_settings(self.bits), Rounding())
        bits, parts = self._bits(weights.role), {name: part.numpy() for name, part in solution.parts.items()}
        width = self._size(weights) or max(weights.shape[2], 1)
        try:
            blob = _core.encode_groupwise(
                parts["codes"], parts["scales"], None if self.symmetric else parts["offsets"], bits=bits,
                group_size=width, ndim=weights.ndim,
            )  # fmt: skip
        except ValueError as cause:
            raise InvalidTensorError(str(cause), tensor=weights.name) from cause
        width = _core.PackedTensor(blob).details()["group_size"]
        details = {"bits": bits, "group_size": width, "symmetric": self.symmetric, "dtype": "float16"}
        return PackedBytes("groupwise", blob, details)


def _rate_of_rest(rate: float | None, rest: Sequence[Proposal], taken: Mapping[str, tuple[int, int]]) -> float | None:
    """Return the bits per weight of `rest` at which the average with tensors that are `taken` is `rate`.

    Raises:
        ValueError: they alone take more.
    """
    if rate is None or not taken:
        return rate
    weights, others = sum(math.prod(one.shape) for one in rest), sum(count for count, _ in taken.values())
    left = (rate * (weights + others) - 8 * sum(nbytes for _, nbytes in taken.values())) / max(weights, 1)
    if left <= 0:
        raise ValueError(f"the tensors with bits by name alone take more than {rate:g} bits per weight on average")
    return left


def _digits(value: float) -> float:
    """Round to six significant digits for reports."""
    return float(f"{value:.5e}")

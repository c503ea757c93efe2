"""The decisions of `rate` for one model: the step, and everything that tensors are coded with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moepack import _core
from moepack.errors import InvalidTensorError
from moepack.methods.base import Expected, PackedBytes, Packer, Shape, Solution, Stage, Weights
from moepack.methods.coverage import coverage_notes
from moepack.methods.rate.importance import Importance
from moepack.methods.rate.layer import LayerSolver, parts_of, solved_apart
from moepack.methods.rate.sample import Sample
from moepack.methods.rate.scales import Scales
from moepack.methods.rate.settings import RateSettings
from moepack.methods.rate.step_size import Step, find_step, free_bits
from moepack.methods.rate.vocabulary import DAMPING, solved_rows
from moepack.solvers.priced import coder_symbols, largest_at, low_bits_of, round_priced, scale_of
from moepack.solvers.uniform import UniformSettings

__all__ = ["Coder", "bound", "expected"]

MOST_CORRECTED = 0.25
"""Maximum fraction of a layer's bits by which it compensates for the sizes of earlier layers."""


MARGIN = 1.25
"""Bytes of a model that are reserved for coded tensors, relative to the requested bits."""


def bound(shape: Shape, bits_per_weight: float | None = None) -> int:
    """Return the bytes to reserve for a coded tensor: with requested bits, `MARGIN` of them and all metadata.

    A tensor may take more, but a model then has others that take less. Otherwise, every weight may be an exception.
    """
    experts, rows, columns = shape
    if bits_per_weight is None:
        return experts * rows * (10 * columns + 256) + 8192
    return (
        math.ceil(MARGIN * math.prod(shape) * bits_per_weight / 8) + experts * (16 * (rows + 16) + 4 * columns) + 8192
    )


def expected(weights: Weights, bits_per_weight: float) -> Expected:
    """Return the size at the requested bits. Tensors of narrow weights take fewer, others more."""
    return Expected(math.prod(weights.shape) * bits_per_weight / 8, exact=False)


@dataclass(frozen=True)
class Coder(Packer):
    """Codes the tensors of a model with one step.

    Attributes:
        given: the settings of the method.
        step: the step, and the bits that it gives each tensor.
        widths: factor of each tensor's step, by name.
        importance: factors of rows and columns, and whether a text measured them.
        solved: shapes of the tensors that share bits with a text, by name.
    """

    given: RateSettings
    step: Step
    widths: Mapping[str, float]
    importance: Importance
    solved: Mapping[str, Shape]

    @classmethod
    def of(cls, given: RateSettings, sample: Sample, importance: Importance | None = None) -> Coder:
        """Find the step for a sample whose weights are multiplied by the scales of `importance`.

        Raises:
            ValueError: metadata alone exceeds the requested bits.
        """
        step = find_step(sample, given.bits_per_weight, given.codes == "dependent")
        found = importance or Importance({}, {}, measured=False)
        return cls(given, step, dict(sample.widths), found, dict(sample.shapes))

    def widened(self, name: str, factor: float) -> Coder:
        """Return a coder whose step of one tensor is multiplied by `factor`."""
        return replace(self, widths={**self.widths, name: self.widths[name] * factor})

    def reordered(self, name: str, order: Tensor, axis: int) -> Coder:
        """Return a coder for a tensor whose rows (axis 0) or columns (axis 1) have another order [E, n] by expert."""
        scales = {**self.importance.scales, name: self.importance.scales[name].reordered(order, axis)}
        return replace(self, importance=replace(self.importance, scales=scales))

    @property
    def has_text(self) -> bool:
        """Whether tensors are solved on the inputs that a text gives them."""
        return self.given.calibration is not None

    @property
    def decisions(self) -> dict[str, float]:
        """The step of each tensor, or its bits if there is a text."""
        return dict(self.step.bits) if self.has_text else {name: self.step_of(name) for name in self.widths}

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the bytes to reserve; see `bound`."""
        return bound(shape, self.given.bits_per_weight)

    def expected(self, weights: Weights) -> Expected:
        """Return the requested bits; see `expected`."""
        return expected(weights, self.given.bits_per_weight)

    def layer_plan(self, experts: int, spent: Mapping[str, int]) -> LayerSolver | None:
        """Return the solver of a layer with a text, whose stages share its bits."""
        return self.corrected_solver(spent) if self.has_text else None

    def corrected_solver(self, spent: Mapping[str, int]) -> LayerSolver:
        """Return a solver whose budgets are adjusted for the actual sizes of earlier tensors."""
        given, excess = self.step.bits, 0.0
        for name, nbytes in spent.items():
            excess += 8 * nbytes - given[name] if name in given else 0.0
        left = {name: shape for name, shape in self.solved.items() if name not in spent}
        free = {name: free_bits(shape) + self._scale_bits(name) for name, shape in left.items()}
        symbols = {name: max(given[name] - own, 0.0) for name, own in free.items()}
        share = min(max(excess / max(sum(symbols.values()), 1.0), -MOST_CORRECTED), MOST_CORRECTED)
        bits = {name: given[name] - share * own for name, own in symbols.items()}
        return self.layer_solver(bits, largest_at(self.given.bits_per_weight))

    def layer_solver(self, bits: Mapping[str, float], largest: int) -> LayerSolver:
        """Return a solver for the given bits by tensor name.

        `largest` is the largest magnitude with its own code length.
        """
        dependent = self.given.codes == "dependent" and not low_bits_of(largest)
        settings = UniformSettings(largest=largest, dependent=dependent, even=self.importance.measured)
        return LayerSolver(bits, settings, self.importance.scales)

    def step_of(self, name: str) -> float:
        """Return the step of a tensor, rounded to bfloat16 as the format stores it in two bytes."""
        return float(torch.tensor(self.step.size * self.widths[name]).bfloat16())

    def solve(self, stage: Stage) -> dict[str, Solution]:
        """Solve a stage on its inputs, or round one tensor if there are none."""
        if stage.inputs is None:
            return self._rounded(stage)
        if not stage.dense:
            return stage.plan.solve(stage)  # type: ignore[no-any-return]
        return solved_apart(stage, lambda: self.corrected_solver(stage.spent))

    def rounded(self, name: str, matrix: Tensor, out: Tensor | None = None) -> tuple[Tensor, float]:
        """Round a matrix of the tensor `name` without a text.

        Returns:
            Codes [R, C], in `out` if they fit, and their scale.

        Raises:
            ValueError: a weight is NaN or infinite.
        """
        step, lengths = self.step_of(name), self.step.lengths_of(name)
        codes = round_priced(matrix, step, lengths, lengths.worth, width=self.widths[name], out=out)
        return codes, scale_of(step, lengths.dependent)

    def values(self, name: str, expert: int, matrix: Tensor) -> Tensor:
        """The values [R, C], float32, that the tensor `name` stores for a matrix that is rounded without a text.

        Rounding runs on the CPU. The values are on the matrix's device.

        Raises:
            ValueError: a weight is NaN or infinite.
        """
        scales = self.importance.scales[name]
        codes, worth = self.rounded(name, scales.scaled(expert, matrix.cpu()))
        rows, columns = scales.stored(worth, range(expert, expert + 1))
        return (codes * rows[0, :, None] * columns[0]).to(matrix.device)

    def _rounded(self, stage: Stage) -> dict[str, Solution]:
        """Round one tensor, expert by expert; holds its codes, one byte per weight if none exceeds 127."""
        ((name, weights),) = stage.tensors.items()
        experts, rows, columns = weights.shape
        whole, dependent = torch.empty(weights.shape, dtype=torch.int8), weights.name in self.step.dependent
        scales = self.importance.scales.get(weights.name)
        if (metric := self.importance.metrics.get(weights.name)) is not None and scales is not None:
            return {name: Solution(self._compensated(stage, weights, scales, metric))}
        for expert in range(experts):
            matrix = weights.expert(expert)
            try:
                matrix = matrix if scales is None else scales.scaled(expert, matrix)
                codes, _ = self.rounded(weights.name, matrix, whole[expert])
            except ValueError as cause:
                raise InvalidTensorError(str(cause), tensor=weights.sources[expert]) from cause
            if codes.dtype != whole.dtype:
                whole = whole.to(codes.dtype)
                whole[expert] = codes
            stage.advance(rows * columns)
        scale = scale_of(self.step_of(weights.name), dependent)
        return {name: Solution(parts_of(whole, torch.tensor([[scale]]), dependent))}

    def _compensated(self, stage: Stage, weights: Weights, scales: Scales, metric: Tensor) -> dict[str, Tensor]:
        """Return the parts of the embedding or the head, whose rows have the metric `metric`."""
        step, lengths = self.step_of(weights.name), self.step.lengths_of(weights.name)
        settings = UniformSettings(largest=lengths.largest, even=True, damping=DAMPING)
        try:
            codes = solved_rows(weights.expert(0), scales, metric, step, lengths, settings, stage.advance)
        except ValueError as cause:
            raise InvalidTensorError(str(cause), tensor=weights.sources[0]) from cause
        return parts_of(codes[None], torch.tensor([[scale_of(step, lengths.dependent)]]), lengths.dependent)

    def pack(self, weights: Weights, solution: Solution) -> PackedBytes:
        """Encode the codes."""
        # All experts share one scale; with a text, each group of experts repeats it.
        parts = solution.parts
        codes, scale, dependent = parts["codes"].numpy(), parts["scale"][:1], bool(parts["dependent"].any())
        symbols, columns = coder_symbols(self.step.largest, dependent), None
        if (scales := self.importance.scales.get(weights.name)) is not None:
            scale, own = scales.stored(scale)
            columns = own.numpy()
        try:
            blob = _core.encode_coded(codes, scale.numpy(), ndim=weights.ndim, columns=columns, symbols=symbols)
        except ValueError as cause:
            raise InvalidTensorError(str(cause), tensor=weights.name) from cause
        return PackedBytes("coded", blob, _core.PackedTensor(blob).details())

    def _scale_bits(self, name: str) -> int:
        return self.importance.scales[name].bits if name in self.importance.scales else 0

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Name experts that saw few tokens, and experts that were quantized without error compensation."""
        return coverage_notes(layers, self.given.minimum_tokens, priced=True, emptied=not self.importance.measured)

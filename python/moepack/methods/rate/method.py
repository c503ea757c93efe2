"""The method `rate`: integers with one step for the whole model, rounded with regard to code length, at any bit rate.

Rows and columns of each tensor are multiplied by factors so that all errors have equal weight (`importance`, `scales`).
The step is derived from the requested bits and a sample of the model (`step`). Weights are rounded to it
(`moepack.solvers.priced`), and an entropy coder stores the integers in about as many bytes as they carry information.
With a text, each layer gets the bits that result from this, and GPTQ with the code length as price decides where they
go (`layer`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from moepack import _core
from moepack.calibration import CalibrationRequest, CalibrationSettings
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.dense import EMBEDDING, ROLES
from moepack.errors import InvalidTensorError
from moepack.methods.base import Expected, Method, PackedTensor, Shape, Solution, Stage, Weights
from moepack.methods.coverage import coverage_notes
from moepack.methods.rate.importance import Importance, find_importance
from moepack.methods.rate.layer import LayerSolver, parts_of, solved_apart
from moepack.methods.rate.sample import Sample, take_sample
from moepack.methods.rate.step import Step, find_step, free_bits
from moepack.progress import Progress
from moepack.solvers.priced import coder_symbols, largest_at, low_bits_of, round_priced, scale_of
from moepack.solvers.uniform import UniformSettings

__all__ = ["Rate"]

MOST_CORRECTED = 0.25
"""Maximum fraction of a layer's bits by which it compensates for the sizes of earlier layers."""

_ROLES = (EMBEDDING, *ROLES)

CODES = ("dependent", "plain")

LEAST_BITS, MOST_BITS = 0.4, 8.0
"""Range of the rate. Above it, more integers are exceptions than the tables hold with three low bits."""


@dataclass
class Rate(Method):
    """Settings of the method.

    Attributes:
        bits_per_weight: bits per packed weight, including all metadata; 0.4 to 8.
        roles: what is packed outside the experts at the same price: "all", "none", or comma-separated roles (embedding,
            attention, shared, mlp, head). A head tied to the embedding is packed with it.
        codes: "dependent" or "plain". Dependent codes reduce the error by a fifth at equal bytes and are at most a
            sixth slower; they are used for tensors with enough bits. "plain" uses plain codes for all tensors.
        calibration: text file, JSON lines, directory or hub data set; None disables calibration.
        samples: maximum number of calibration windows.
        sequence_length: tokens per window.
        group: experts solved together.
        minimum_tokens: experts with fewer tokens are named in the notes.
        device: where the model and the solver run with a text.
        seed: seed of the span corruption of encoder-decoder models.
    """

    bits_per_weight: float
    roles: str = "all"
    codes: str = "dependent"
    calibration: str | None = None
    samples: int = 128
    sequence_length: int = 512
    group: int = 16
    minimum_tokens: int = 64
    device: str = "cpu"
    seed: int = 0
    name: ClassVar[str] = "rate"
    _step: Step | None = field(default=None, init=False, repr=False)
    _widths: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _importance: Importance = field(default=Importance({}, {}, measured=False), init=False, repr=False)
    _solved: dict[str, Shape] = field(default_factory=dict, init=False, repr=False)
    _excess: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not LEAST_BITS <= self.bits_per_weight <= MOST_BITS:
            message = f"bits_per_weight must be {LEAST_BITS} to {MOST_BITS}, not {self.bits_per_weight}"
            raise ValueError(message)
        given = {"all": _ROLES, "none": ()}.get(self.roles, tuple(self.roles.split(",")))
        if unknown := sorted(set(given) - set(_ROLES)):
            raise ValueError(f"roles must be all, none, or some of {', '.join(_ROLES)}, not {', '.join(unknown)}")
        if self.codes not in CODES:
            raise ValueError(f"codes must be {' or '.join(CODES)}, not {self.codes}")
        self._roles = frozenset(given)
        _ = self.request  # runs its checks

    @property
    def request(self) -> CalibrationRequest | None:
        """The calibration set, and how the model runs; None without calibration."""
        if self.calibration is None:
            return None
        settings = CalibrationSettings(
            routing="compressed", drift=True, group=self.group, device=torch.device(self.device)
        )
        return CalibrationRequest(self.calibration, self.samples, self.sequence_length, settings, seed=self.seed)

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings that change the output, except the calibration set."""
        found: dict[str, Any] = {
            "bits_per_weight": self.bits_per_weight,
            "roles": ",".join(role for role in _ROLES if role in self._roles),
            "codes": self.codes,
        }
        if self.calibration is not None:
            found |= {key: getattr(self, key) for key in ("samples", "sequence_length", "group", "seed")}
        return found

    @property
    def dense_roles(self) -> frozenset[str]:
        """The roles that are packed."""
        return self._roles

    @property
    def kernel(self) -> str:
        """Products of coded integers."""
        return "coded"

    @property
    def in_turn(self) -> bool:
        """Whether there is a text, so that the experts of a layer share one bit budget."""
        return self.calibration is not None

    @property
    def looks_ahead(self) -> bool:
        """Always true: one step serves the whole model."""
        return True

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the size if every weight were an exception."""
        experts, rows, columns = shape
        return experts * rows * (10 * columns + 256) + 8192

    def expected(self, weights: Weights) -> Expected:
        """Return the requested bits. Tensors of narrow weights take fewer, others more."""
        return Expected(math.prod(weights.shape) * self.bits_per_weight / 8, exact=False)

    def prepare(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None) -> None:
        """Find the step.

        Raises:
            InvalidTensorError: a sampled weight is NaN or infinite.
            ValueError: metadata alone exceeds the requested bits.
        """
        self.measure(checkpoint, model, self.request, progress)
        ends = (linear for dense in model.dense for linear in dense.linears if linear.role in (EMBEDDING, "head"))
        for linear in ends:
            self._solved.pop(linear.source, None)

    def measure(
        self, checkpoint: Checkpoint, model: MoeModel, request: CalibrationRequest | None, progress: Progress | None
    ) -> None:
        """Find the factors of rows and columns, by a text where there is one, and the step; errors as of `prepare`."""
        found, largest = find_importance(checkpoint, model, request, progress), largest_at(self.bits_per_weight)
        even = dict.fromkeys(found.scales, 1.0)
        self.decide(take_sample(checkpoint, model, self._roles, even, found.scales, largest), found)

    @property
    def is_measured(self) -> bool:
        """Whether importance was measured on a text."""
        return self._importance.measured

    def decide(self, sample: Sample, importance: Importance | None = None) -> Step:
        """Find the step for a sample whose weights are multiplied by the scales of `importance`.

        Raises:
            ValueError: as for `prepare`.
        """
        self._importance = importance or Importance({}, {}, measured=False)
        self._step = find_step(sample, self.bits_per_weight, self.codes == "dependent")
        self._widths = dict(sample.widths)
        self._solved, self._excess = dict(sample.shapes), 0.0
        return self._step

    def widen(self, name: str, factor: float) -> None:
        """Multiply the step of a tensor by `factor`."""
        self._widths[name] *= factor

    def reorder(self, name: str, order: Tensor, axis: int) -> None:
        """Put rows (axis 0) or columns (axis 1) of a tensor in another order [E, n], expert by expert."""
        scales = self._importance.scales[name]
        self._importance.scales[name] = scales.reordered(order, axis)

    def decided(self, name: str) -> float:
        """Return the step of a tensor, or its bits if there is a text."""
        assert self._step is not None, "prepare comes first"
        return self._step_of(name) if self.calibration is None else self._step.bits[name]

    def layer_plan(self, experts: int) -> LayerSolver | None:
        """Return the solver of a layer with a text, whose stages share its bits."""
        assert self._step is not None, "prepare comes first"
        return None if self.calibration is None else self._layer_solver()

    def book(self, name: str, nbytes: int) -> None:
        """Record the size of a tensor; tensors solved later compensate for the difference to its budget."""
        assert self._step is not None, "prepare comes first"
        if name in self._step.bits:
            self._excess += 8 * nbytes - self._step.bits[name]
            self._solved.pop(name, None)

    def _layer_solver(self) -> LayerSolver:
        """Return a solver whose budgets are adjusted for the actual sizes of earlier tensors."""
        assert self._step is not None, "prepare comes first"
        given = self._step.bits
        free = {name: free_bits(shape) + self._scale_bits(name) for name, shape in self._solved.items()}
        symbols = {name: max(given[name] - own, 0.0) for name, own in free.items()}
        share = min(max(self._excess / max(sum(symbols.values()), 1.0), -MOST_CORRECTED), MOST_CORRECTED)
        bits = {name: given[name] - share * own for name, own in symbols.items()}
        return self.layer_solver(bits, largest_at(self.bits_per_weight))

    def layer_solver(self, bits: Mapping[str, float], largest: int) -> LayerSolver:
        """Return a solver for the given bits by tensor name.

        `largest` is the largest magnitude with its own code length.
        """
        dependent = self.codes == "dependent" and not low_bits_of(largest)
        settings = UniformSettings(largest=largest, dependent=dependent, even=self._importance.measured)
        return LayerSolver(bits, settings, self._importance.scales)

    def _step_of(self, name: str) -> float:
        assert self._step is not None, "prepare comes first"
        # Rounded to bfloat16, as the format stores it in two bytes.
        return float(torch.tensor(self._step.size * self._widths[name]).bfloat16())

    def solve(self, stage: Stage) -> dict[str, Solution]:
        """Solve a stage on its inputs, or round one tensor if there are none."""
        assert self._step is not None, "prepare comes first"
        if stage.inputs is None:
            return self._rounded(stage)
        if not stage.dense:
            return stage.plan.solve(stage)  # type: ignore[no-any-return]
        return solved_apart(stage, self._layer_solver)

    def rounded(self, name: str, matrix: Tensor, out: Tensor | None = None) -> tuple[Tensor, float]:
        """Round a matrix of the tensor `name` without a text.

        Returns:
            Codes [R, C], in `out` if they fit, and their scale.

        Raises:
            ValueError: a weight is NaN or infinite.
        """
        assert self._step is not None, "prepare comes first"
        step, lengths = self._step_of(name), self._step.lengths_of(name)
        codes = round_priced(matrix, step, lengths, lengths.worth, width=self._widths[name], out=out)
        return codes, scale_of(step, lengths.dependent)

    def values(self, name: str, expert: int, matrix: Tensor) -> Tensor:
        """The values [R, C], float32, that the tensor `name` stores for a matrix that is rounded without a text.

        Raises:
            ValueError: a weight is NaN or infinite.
        """
        scales = self._importance.scales[name]
        codes, worth = self.rounded(name, scales.scaled(expert, matrix))
        rows, columns = scales.stored(worth, range(expert, expert + 1))
        return codes * rows[0, :, None] * columns[0]

    def _rounded(self, stage: Stage) -> dict[str, Solution]:
        """Round one tensor, expert by expert; holds its codes, one byte per weight if none exceeds 127."""
        ((name, weights),) = stage.tensors.items()
        experts, rows, columns = weights.shape
        assert self._step is not None, "prepare comes first"
        whole, dependent = torch.empty(weights.shape, dtype=torch.int8), weights.name in self._step.dependent
        scales = self._importance.scales.get(weights.name)
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
        scale = scale_of(self._step_of(weights.name), dependent)
        return {name: Solution(parts_of(whole, torch.tensor([[scale]]), dependent))}

    def pack(self, weights: Weights, solution: Solution) -> PackedTensor:
        """Encode the codes."""
        assert self._step is not None, "prepare comes first"
        # All experts share one scale; with a text, each group of experts repeats it.
        parts = solution.parts
        codes, scale, dependent = parts["codes"].numpy(), parts["scale"][:1], bool(parts["dependent"].any())
        symbols, columns = coder_symbols(self._step.largest, dependent), None
        if (scales := self._importance.scales.get(weights.name)) is not None:
            scale, own = scales.stored(scale)
            columns = own.numpy()
        try:
            blob = _core.encode_coded(codes, scale.numpy(), ndim=weights.ndim, columns=columns, symbols=symbols)
        except ValueError as cause:
            raise InvalidTensorError(str(cause), tensor=weights.name) from cause
        return PackedTensor("coded", blob, _core.PackedTensor(blob).details())

    def _scale_bits(self, name: str) -> int:
        return self._importance.scales[name].bits if name in self._importance.scales else 0

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Say why importance was not measured; name experts that few tokens reached, and experts that were quantized
        without error compensation."""
        found = coverage_notes(layers, self.minimum_tokens, priced=True, emptied=not self._importance.measured)
        return (*self._importance.notes, *found)

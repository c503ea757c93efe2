"""The method `qmoe`: batched GPTQ on the paper's grids over streaming calibration (QMoE, sections 3.2 and 3.3).

The calibrator runs the model block by block and hands each group of experts to `solve`; the method quantizes the group,
remembers codes and parameters of the layer, and packs them when the layer is complete. A resumed run feeds the layers
that were packed before through the same calibration, with the values in their packed bytes instead of solving again, so
later layers see bit for bit what they would have seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from moepack.calibration import CalibrationSettings, Calibrator, DenseWork, LinearStage, Stage
from moepack.calibration.load import load_samples
from moepack.checkpoint import Checkpoint, DenseLayer, MoeLayer, MoeModel
from moepack.errors import InvalidTensorError
from moepack.methods.base import Expected, PackedTensor, Shape, Weights
from moepack.methods.finequant.sizes import packed_bytes
from moepack.methods.qmoe.dense import DenseSettings, PackedLinears, SolvingLinears
from moepack.methods.qmoe.forms import Form, GroupwiseForm, TernaryForm
from moepack.methods.qmoe.grid import GridSolver, Rounding
from moepack.methods.qmoe.notes import coverage_notes
from moepack.methods.qmoe.rate import RateSolver
from moepack.methods.roles import dense_text, parse_dense_bits
from moepack.methods.ternary import Ternary
from moepack.solvers.gptq import GptqSettings
from moepack.solvers.groupwise import quantize_groupwise
from moepack.solvers.rate import RateSettings

__all__ = ["PUBLISHED", "Qmoe"]

#: The paper's own setting (QMoE, section 4.1 and its code), to be given to `Qmoe` as keywords.
PUBLISHED: Mapping[str, Any] = MappingProxyType(
    {"damping": 0.1, "drift": 0.0, "weigh_tokens": False, "refit": False, "match_energy": False}
)
#: What the rate may be set to: below, narrow rows hold little but metadata; above, no row has more to code.
LEAST_BITS, MOST_BITS = 0.4, 2.0


@dataclass
class Qmoe:
    """Settings of the method.

    Attributes:
        calibration: text file, JSON lines, directory or data set of the hub.
        samples: calibration windows, at most.
        sequence_length: tokens a window.
        bits: "ternary", or "2" for two bits a weight with groups.
        group_size: columns that share a scale and an offset with two bits, and a scale in packed linear layers: 16, 32,
            64, 128 or 256.
        dense_bits: bits of linear layers outside the experts: None leaves them as they are, a number packs attention,
            shared experts and dense feed-forward layers, and "attention=4,shared=8" (roles: attention, shared, mlp)
            says it role by role.
        bits_per_weight: bits a weight of the coded experts, all metadata counted, or `None` for what the paper's grid
            takes. Ternary experts only; settings of GPTQ do not apply then.
        code: entropy code of ternary experts, `fsv8` or `dict16`.
        damping: relative to the mean diagonal of the Hessian.
        drift: the share of the error accumulated in earlier layers that the weights are moved to undo before they are
            quantized, 0 to 1 (see `moepack.solvers.drift`); anything but 0 runs the original model beside the
            compressed one, which takes twice the time outside of the solver.
        weigh_tokens: let a token count in the Hessians what the block's output makes of it (see
            `moepack.calibration.moments`), not 1. `bits_per_weight` always does.
        refit: with two bits, refit scales and offsets to the codes that GPTQ chose (see `moepack.solvers.refit`).
        act_order: take columns by falling diagonal.
        solver: "gptq", or "rtn" to round to nearest on the grid of minimum and maximum (what calibration is compared
            with).
        match_energy: restore the output energy of each row by a factor on its levels. `None`: for ternary rows only;
            two bits lose so little energy that the factors would fit the calibration set more than the model.
        activations: "compressed" or "original": what enters the next block.
        routing: "original" or "compressed": whose router assigns tokens for the Hessians. The original one costs a
            second stream and was no better on the models measured (docs/methods/qmoe.md).
        premask: leave positions of special tokens out (span corruption).
        group: experts solved together.
        buffer: "memory", or "device": what holds the hidden states of the calibration set.
        token_cap: most tokens of an expert held at a time, as a multiple of the mean.
        minimum_tokens: experts with fewer are named in the notes.
        device: where the model and the solver run.
        seed: of the span corruption.
    """

    calibration: str
    samples: int = 128
    sequence_length: int = 512
    bits: Literal["ternary", "2"] = "ternary"
    group_size: int = 64
    dense_bits: str | int | None = None
    bits_per_weight: float | None = None
    code: str = "fsv8"
    damping: float = 0.1
    drift: float = 0.75
    weigh_tokens: bool = True
    refit: bool = True
    act_order: bool = False
    solver: Literal["gptq", "rtn"] = "gptq"
    match_energy: bool | None = None
    activations: Literal["compressed", "original"] = "compressed"
    routing: Literal["original", "compressed"] = "compressed"
    premask: bool = True
    group: int = 16
    buffer: Literal["memory", "device"] = "memory"
    token_cap: float = 4.0
    minimum_tokens: int = 64
    device: str = "cpu"
    seed: int = 0
    name: ClassVar[str] = "qmoe"
    _fingerprint: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        if self.bits not in ("ternary", "2"):
            raise ValueError(f"bits must be ternary or 2, not {self.bits}")
        if self.solver not in ("gptq", "rtn"):
            raise ValueError(f"solver must be gptq or rtn, not {self.solver}")
        if self.group_size not in (16, 32, 64, 128, 256):
            raise ValueError(f"group_size must be 16, 32, 64, 128 or 256, not {self.group_size}")
        if not 0 <= self.drift <= 1:
            raise ValueError(f"drift must be 0 to 1, not {self.drift}")
        if self.match_energy is None:
            self.match_energy = self.bits == "ternary"
        groups = GroupwiseForm(self.group_size, static=self.act_order, search=self.solver == "gptq")
        self._form: Form = TernaryForm(self.code) if self.bits == "ternary" else groups
        if self.bits_per_weight is not None:
            self._check_rate(self.bits_per_weight)
        self._gptq = GptqSettings(damping=self.damping, act_order=self.act_order)
        dense = parse_dense_bits(self.dense_bits)
        if "head" in dense:
            raise ValueError("dense_bits: qmoe packs no head; roles are attention, shared and mlp")
        self.dense_bits = dense_text(dense)
        self._dense = DenseSettings(dense, self.group_size, self._gptq if self.solver == "gptq" else None)
        self._settings()  # its checks

    def _check_rate(self, rate: float) -> None:
        if not LEAST_BITS <= rate <= MOST_BITS:
            raise ValueError(f"bits_per_weight must be {LEAST_BITS} to {MOST_BITS}, not {rate}")
        if self.bits != "ternary" or self.solver != "gptq":
            raise ValueError("bits_per_weight needs ternary experts and the solver gptq")

    def _settings(self) -> CalibrationSettings:
        return CalibrationSettings(
            activations=self.activations,
            routing=self.routing,
            drift=self.drift > 0 and self.solver == "gptq",
            group=self.group,
            token_cap=self.token_cap,
            device=torch.device(self.device),
            buffer_device=torch.device(self.device if self.buffer == "device" else "cpu"),
        )

    @property
    def settings(self) -> Mapping[str, Any]:
        """Every setting that changes the bytes; of the calibration set its fingerprint, once `begin` has read it."""
        ignored = {"minimum_tokens", "device", "buffer", "calibration"}
        values = {
            name: value for name, value in asdict(self).items() if not name.startswith("_") and name not in ignored
        }
        return {**values, "calibration_sha256": self._fingerprint}

    def bound(self, shape: Shape) -> int:
        """Return the most bytes that a projection can take packed, with the list of its coverage."""
        return self._form.bound(shape) + 128 * shape[0]

    @property
    def dense_roles(self) -> frozenset[str]:
        """The roles that have bits."""
        return frozenset(self._dense.bits)

    def dense_bound(self, shape: Shape, role: str) -> int:
        """Return the size: it depends on shape and bits alone."""
        return packed_bytes(shape, self._dense.bits[role], self.group_size)

    def expected(self, weights: Weights) -> Expected:
        """Return the size: the rate where one was asked for, otherwise that of the first expert without calibration."""
        if weights.role != "experts":
            return Expected(self.dense_bound(weights.shape, weights.role), exact=True)
        if self.bits_per_weight is not None:
            return Expected(math.prod(weights.shape) * self.bits_per_weight / 8, exact=False)
        if self.bits == "ternary":
            return Ternary(self.code).expected(weights)
        found = quantize_groupwise(weights.expert(0), 2, self.group_size, symmetric=False)
        assert found.offsets is not None
        parameters = torch.stack([found.scales, found.offsets], dim=-1).flatten(-2)
        sample = self._form.pack(found.codes[None], parameters[None])
        return Expected(sample.data.nbytes * weights.shape[0], exact=False)

    def begin(self, checkpoint: Checkpoint, model: MoeModel) -> None:
        """Read the calibration set and build the model's skeleton.

        Raises:
            CalibrationError: the calibration set is unusable.
        """
        samples = load_samples(
            checkpoint, self.calibration, self.samples, self.sequence_length, premask=self.premask, seed=self.seed
        )
        self._fingerprint = samples.fingerprint()
        self._current: _Packed | _Solving | None = None
        self._linears: PackedLinears | SolvingLinears | None = None
        plan = None if self.bits_per_weight is None else self._plan
        layers = {layer.name: chosen for layer in model.dense if (chosen := layer.only(self.dense_roles)).linears}
        dense = DenseWork(layers, self._solve_linears)
        self._steps = Calibrator(checkpoint, model, samples, self._settings()).layers(self._solve, plan, dense)

    def compress_dense(
        self, layer: Mapping[str, Weights], advance: Callable[[int], None]
    ) -> Iterator[tuple[str, PackedTensor]]:
        """Run the model up to the block with these linear layers, and quantize them."""
        work = self._linears = SolvingLinears(self._dense, layer, advance)
        next(self._steps)
        yield from work.pack()

    def compress_layer(
        self, layer: Mapping[str, Weights], advance: Callable[[int], None]
    ) -> Iterator[tuple[str, PackedTensor]]:
        """Run the model up to the next layer with experts, which must be `layer`, and quantize it."""
        work = _Solving(self._form, layer, advance)
        if self.bits_per_weight is not None:
            rate = RateSettings(shift=self.drift)
            work.solver = RateSolver(self.bits_per_weight, next(iter(layer.values())).shape[0], rate)
        elif self.solver == "gptq":
            work.solver = GridSolver(self._gptq, self.drift, self.weigh_tokens, self.refit, bool(self.match_energy))
        self._current = work
        _, coverage = next(self._steps)
        routing = "compressed" if self.activations == "original" else self.routing
        yield from work.pack({"tokens": coverage.used(routing).tolist(), "rounded": work.rounded})

    def restore(self, layer: MoeLayer, packed: Mapping[str, PackedTensor]) -> None:
        """Run the model through a layer that an earlier run packed."""
        self._current = _Packed({name: self._form.unpack(tensor) for name, tensor in packed.items()})
        next(self._steps)

    def restore_dense(self, layer: DenseLayer, packed: Mapping[str, PackedTensor]) -> None:
        """Run the model through linear layers that an earlier run packed."""
        self._linears = PackedLinears(packed)
        next(self._steps)

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Name experts that saw few tokens, and experts that were quantized without error compensation."""
        return coverage_notes(layers, self.minimum_tokens, priced=self.bits_per_weight is not None)

    def _plan(self, stage: Stage) -> None:
        if isinstance(self._current, _Solving):
            self._current.plan(stage)

    def _solve(self, stage: Stage) -> dict[str, Tensor]:
        assert self._current is not None
        return self._current.solve(stage)

    def _solve_linears(self, stage: LinearStage) -> dict[str, Tensor]:
        assert self._linears is not None
        return self._linears.solve(stage)


class _Packed:
    """A layer whose values are known."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.values = values

    def solve(self, stage: Stage) -> dict[str, Tensor]:
        """Return the values of the stage's experts."""
        group = slice(stage.experts.start, stage.experts.stop)
        return {name: self.values[name][group].to(weights.device) for name, weights in stage.weights.items()}


class _Solving:
    """A layer being quantized: codes and parameters of all projections, filled group by group."""

    def __init__(self, form: Form, layer: Mapping[str, Weights], advance: Callable[[int], None]) -> None:
        self.form, self.advance = form, advance
        self.layer = layer
        self.codes = {name: torch.empty(w.shape, dtype=form.code_dtype) for name, w in layer.items()}
        self.parameters = {
            name: torch.empty((*w.shape[:2], form.width(w.shape[2])), dtype=torch.float32) for name, w in layer.items()
        }
        self.rounded: dict[str, str] = {}
        self.solver: RateSolver | GridSolver | Rounding = Rounding()

    def plan(self, stage: Stage) -> None:
        """Let the rate solver see a stage in advance."""
        self._check(stage)
        assert isinstance(self.solver, RateSolver)
        self.solver.plan(stage)

    def solve(self, stage: Stage) -> dict[str, Tensor]:
        """Quantize a stage: its projections share the Hessians, so their rows are one problem."""
        self._check(stage)
        codes, parameters, values, reports = self.solver.solve(stage, self.form)
        for expert, report in zip(stage.experts, reports, strict=bool(reports)):
            if report.reason is not None:
                self.rounded.setdefault(str(expert), report.reason)
        rows = [w.shape[1] for w in stage.weights.values()]
        pieces = [torch.split(tensor, rows, dim=1) for tensor in (codes, parameters, values)]
        return {name: self._keep(stage, name, *tensors) for name, *tensors in zip(stage.weights, *pieces, strict=True)}

    def _keep(self, stage: Stage, name: str, codes: Tensor, parameters: Tensor, values: Tensor) -> Tensor:
        group = slice(stage.experts.start, stage.experts.stop)
        self.codes[name][group].copy_(codes)
        self.parameters[name][group].copy_(parameters)
        self.advance(codes.numel())
        return values

    def _check(self, stage: Stage) -> None:
        for name, weights in stage.weights.items():
            finite = torch.isfinite(weights).flatten(1).all(1)
            if not bool(finite.all()):
                expert = stage.experts[int((~finite).nonzero()[0])]
                raise InvalidTensorError(
                    f"expert {expert} holds NaN or infinite weights", tensor=self.layer[name].sources[expert]
                )

    def pack(self, details: Mapping[str, Any]) -> Iterator[tuple[str, PackedTensor]]:
        """Pack all projections; the first one carries the layer's `details`."""
        for position, name in enumerate(self.layer):
            packed = self.form.pack(self.codes.pop(name), self.parameters.pop(name))
            extra = details if position == 0 else {}
            yield name, PackedTensor(packed.kind, packed.data, {**packed.details, **extra})

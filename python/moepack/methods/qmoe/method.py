"""The method `qmoe`: batched GPTQ on the paper's grids over streaming calibration (QMoE, sections 3.2 and 3.3).

The model runs block by block while its experts are quantized group by group, so that what enters a layer has passed
through everything quantized before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch

from moepack.calibration import CalibrationRequest, CalibrationSettings
from moepack.methods.base import Expected, Method, PackedTensor, Shape, Solution, Stage, Weights
from moepack.methods.coverage import coverage_notes
from moepack.methods.finequant.sizes import packed_bytes
from moepack.methods.qmoe.dense import DenseSettings, pack_linear, solve_linears
from moepack.methods.qmoe.forms import Form, GroupwiseForm, TernaryForm
from moepack.methods.qmoe.grid import GridSolver, Rounding
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
class Qmoe(Method):
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
        self._solver: GridSolver | Rounding = Rounding()
        if self.solver == "gptq":
            self._solver = GridSolver(self._gptq, self.drift, self.weigh_tokens, self.refit, bool(self.match_energy))
        _ = self.request  # its checks

    def _check_rate(self, rate: float) -> None:
        if not LEAST_BITS <= rate <= MOST_BITS:
            raise ValueError(f"bits_per_weight must be {LEAST_BITS} to {MOST_BITS}, not {rate}")
        if self.bits != "ternary" or self.solver != "gptq":
            raise ValueError("bits_per_weight needs ternary experts and the solver gptq")

    @property
    def request(self) -> CalibrationRequest:
        """The calibration set, and how the model runs."""
        settings = CalibrationSettings(
            activations=self.activations,
            routing=self.routing,
            drift=self.drift > 0 and self.solver == "gptq",
            group=self.group,
            token_cap=self.token_cap,
            device=torch.device(self.device),
            buffer_device=torch.device(self.device if self.buffer == "device" else "cpu"),
        )
        return CalibrationRequest(
            self.calibration, self.samples, self.sequence_length, settings, self.premask, self.seed
        )

    @property
    def settings(self) -> Mapping[str, Any]:
        """Every setting that changes the bytes, but for the calibration set."""
        ignored = {"minimum_tokens", "device", "buffer", "calibration"}
        return {name: value for name, value in asdict(self).items() if name not in ignored}

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the most bytes that a tensor can take packed: of experts with the list of its coverage, of a linear
        layer its size."""
        if role != "experts":
            return packed_bytes(shape, self._dense.bits[role], self.group_size)
        return self._form.bound(shape) + 128 * shape[0]

    @property
    def dense_roles(self) -> frozenset[str]:
        """The roles that have bits."""
        return frozenset(self._dense.bits)

    def expected(self, weights: Weights) -> Expected:
        """Return the size: the rate where one was asked for, otherwise that of the first expert without calibration."""
        if weights.role != "experts":
            return Expected(self.bound(weights.shape, weights.role), exact=True)
        if self.bits_per_weight is not None:
            return Expected(math.prod(weights.shape) * self.bits_per_weight / 8, exact=False)
        if self.bits == "ternary":
            return Ternary(self.code).expected(weights)
        found = quantize_groupwise(weights.expert(0), 2, self.group_size, symmetric=False)
        assert found.offsets is not None
        parameters = torch.stack([found.scales, found.offsets], dim=-1).flatten(-2)
        sample = self._form.pack(found.codes[None], parameters[None])
        return Expected(sample.data.nbytes * weights.shape[0], exact=False)

    @property
    def in_turn(self) -> bool:
        """With a rate, a layer's bits are shared by its experts."""
        return self.bits_per_weight is not None

    def layer_plan(self, experts: int) -> RateSolver | None:
        """With a rate, the stages of a layer share its bits."""
        if self.bits_per_weight is None:
            return None
        return RateSolver(self.bits_per_weight, experts, RateSettings(shift=self.drift))

    def solve(self, stage: Stage) -> dict[str, Solution]:
        """Quantize a stage: its projections share the Hessians, so their rows are one problem."""
        if stage.dense:
            return solve_linears(stage, self._dense)
        solver = stage.plan or self._solver
        codes, parameters, values, reports = solver.solve(stage, self._form)
        experts = zip(stage.experts, reports, strict=bool(reports))
        rounded = {expert: report.reason for expert, report in experts if report.reason is not None}
        rows = [weights.shape[1] for weights in stage.weights.values()]
        pieces = zip(*(torch.split(tensor, rows, dim=1) for tensor in (codes, parameters, values)), strict=True)
        stage.advance(codes.numel())
        return {
            name: Solution({"codes": codes, "parameters": parameters}, values, rounded=rounded)
            for name, (codes, parameters, values) in zip(stage.tensors, pieces, strict=True)
        }

    def pack(self, weights: Weights, solution: Solution) -> PackedTensor:
        """Pack a projection in its form, or a linear layer."""
        if weights.role != "experts":
            return pack_linear(weights, solution.parts, self._dense)
        return self._form.pack(solution.parts["codes"], solution.parts["parameters"])

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Name experts that saw few tokens, and experts that were quantized without error compensation."""
        return coverage_notes(
            layers, self.minimum_tokens, priced=(own := self.bits_per_weight is not None), emptied=own
        )

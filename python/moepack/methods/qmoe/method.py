"""The method `qmoe`: batched GPTQ on the paper's grids with streaming calibration (QMoE, sections 3.2 and 3.3).

The model runs block by block while its experts are quantized group by group, so the input of a layer has passed through
all previously quantized layers.
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

#: The paper's settings (QMoE, section 4.1 and its code), as keyword arguments of `Qmoe`.
PUBLISHED: Mapping[str, Any] = MappingProxyType(
    {"damping": 0.1, "drift": 0.0, "weigh_tokens": False, "refit": False, "match_energy": False}
)
#: Range of the rate. Below, narrow rows hold little but metadata; above, no row has more to code.
LEAST_BITS, MOST_BITS = 0.4, 2.0


@dataclass
class Qmoe(Method):
    """Settings of the method.

    Attributes:
        calibration: text file, JSON lines, directory or hub data set.
        samples: maximum number of calibration windows.
        sequence_length: tokens per window.
        bits: "ternary", or "2" for two bits per weight in groups.
        group_size: columns that share a scale and an offset with two bits, or a scale in packed linear layers: 16, 32,
            64, 128 or 256.
        dense_bits: bits of linear layers outside the experts. None copies these layers. A number packs attention,
            shared experts and dense feed-forward layers. "attention=4,shared=8" (roles: attention, shared, mlp) sets
            bits per role.
        bits_per_weight: bits per weight of the coded experts, including all metadata, or `None` for the size that the
            paper's grid yields. Ternary experts only; GPTQ settings do not apply.
        code: entropy code of ternary experts, `fsv8` or `dict16`.
        damping: relative to the mean diagonal of the Hessian.
        drift: the share of the error accumulated in earlier layers that is corrected by moving the weights before
            quantization, 0 to 1 (see `moepack.solvers.drift`). Values other than 0 run the original model beside the
            compressed one, which doubles the time outside the solver.
        weigh_tokens: weight each token in the Hessians by its effect on the block's output (see
            `moepack.calibration.moments`) instead of 1. `bits_per_weight` always does this.
        refit: with two bits, refit scales and offsets to GPTQ's codes (see `moepack.solvers.refit`).
        act_order: process columns by decreasing diagonal.
        solver: "gptq", or "rtn" to round to nearest on the grid of minimum and maximum (a baseline without
            calibration).
        match_energy: restore the output energy of each row by a factor on its levels. `None` enables it for ternary
            rows only: two bits lose so little energy that the factors would overfit the calibration set.
        activations: "compressed" or "original": which activations enter the next block.
        routing: "original" or "compressed": whose router assigns tokens for the Hessians. The original router costs a
            second stream and was no better on the models measured (docs/methods/qmoe.md).
        premask: exclude positions of special tokens (span corruption).
        group: experts solved together.
        buffer: "memory" or "device": where the hidden states of the calibration set are kept.
        token_cap: maximum number of tokens held per expert, as a multiple of the mean.
        minimum_tokens: experts with fewer tokens are named in the notes.
        device: where the model and the solver run.
        seed: seed of the span corruption.
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
            raise ValueError("dense_bits: qmoe does not pack the head; roles are attention, shared and mlp")
        self.dense_bits = dense_text(dense)
        self._dense = DenseSettings(dense, self.group_size, self._gptq if self.solver == "gptq" else None)
        self._solver: GridSolver | Rounding = Rounding()
        if self.solver == "gptq":
            self._solver = GridSolver(self._gptq, self.drift, self.weigh_tokens, self.refit, bool(self.match_energy))
        _ = self.request  # runs its checks

    def _check_rate(self, rate: float) -> None:
        if not LEAST_BITS <= rate <= MOST_BITS:
            raise ValueError(f"bits_per_weight must be {LEAST_BITS} to {MOST_BITS}, not {rate}")
        if self.bits != "ternary" or self.solver != "gptq":
            raise ValueError("bits_per_weight requires ternary experts and the solver gptq")

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
        """All settings that change the output, except the calibration set."""
        ignored = {"minimum_tokens", "device", "buffer", "calibration"}
        return {name: value for name, value in asdict(self).items() if name not in ignored}

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the maximum packed size in bytes: exact for a linear layer, with coverage details for experts."""
        if role != "experts":
            return packed_bytes(shape, self._dense.bits[role], self.group_size)
        return self._form.bound(shape) + 128 * shape[0]

    @property
    def needs_balance(self) -> bool:
        """True: columns share scales."""
        return True

    @property
    def dense_roles(self) -> frozenset[str]:
        """The roles with bits."""
        return frozenset(self._dense.bits)

    def expected(self, weights: Weights) -> Expected:
        """Return the size: from the requested rate, or from the first expert without calibration."""
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
        """Whether there is a rate, so that the experts of a layer share one bit budget."""
        return self.bits_per_weight is not None

    def layer_plan(self, experts: int) -> RateSolver | None:
        """Return the solver of a layer with a rate, whose stages share its bits."""
        if self.bits_per_weight is None:
            return None
        return RateSolver(self.bits_per_weight, experts, RateSettings(shift=self.drift))

    def solve(self, stage: Stage) -> dict[str, Solution]:
        """Quantize a stage. Its projections share the Hessians, so their rows form one problem."""
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

"""The method `qmoe`: batched GPTQ on the paper's grids with streaming calibration (QMoE, sections 3.2 and 3.3).

The model runs block by block while its experts are quantized group by group, so the input of a layer has passed through
all previously quantized layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from moepack.calibration import CalibrationRequest, CalibrationSettings
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.methods.base import Expected, Method, PackedBytes, Shape, SimpleMethod, Solution, Stage, Weights
from moepack.methods.coverage import coverage_notes
from moepack.methods.finequant.sizes import packed_bytes
from moepack.methods.fitting import DENSE, Fitted, Wanted
from moepack.methods.mixins import Calibrates, PacksLinears
from moepack.methods.pinned import Pin, PinsBits, check_bits
from moepack.methods.qmoe.dense import DenseSettings, pack_linear, solve_linears
from moepack.methods.qmoe.forms import Form, GroupwiseForm, TernaryForm
from moepack.methods.qmoe.grid import GridSolver, Rounding
from moepack.methods.qmoe.rate import RateSolver
from moepack.methods.qmoe.settings import LEAST_BITS, MOST_BITS, QmoeSettings
from moepack.methods.qmoe.ternary import Ternary
from moepack.methods.roles import dense_text, parse_dense_bits
from moepack.methods.settings import in_words
from moepack.solvers.gptq import GptqSettings
from moepack.solvers.groupwise import quantize_groupwise
from moepack.solvers.rate import RateSettings
from moepack.solvers.widths import BITS

__all__ = ["PUBLISHED", "Qmoe"]

#: The paper's settings (QMoE, section 4.1 and its code), as keyword arguments of `Qmoe`.
PUBLISHED: Mapping[str, Any] = MappingProxyType(
    {"damping": 0.1, "drift": 0.0, "weigh_tokens": False, "refit": False, "match_energy": False}
)


@dataclass
class Qmoe(QmoeSettings, Fitted, PinsBits, Calibrates, PacksLinears, SimpleMethod):
    """The method with its settings."""

    pinned_bits: ClassVar[str] = f"{LEAST_BITS:g} to {MOST_BITS:g} for experts and {in_words(BITS)} for linear layers"
    pinned_roles: ClassVar[frozenset[str]] = frozenset({"attention", "shared", "mlp"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.match_energy is None:
            self.match_energy = self.bits == "ternary"
        groups = GroupwiseForm(self.group_size, static=self.act_order, search=self.solver == "gptq")
        self._form: Form = TernaryForm() if self.bits == "ternary" else groups
        if self.bits_per_weight is not None and (self.bits != "ternary" or self.solver != "gptq"):
            raise ValueError("bits_per_weight requires ternary experts and the solver gptq")
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
            return Ternary().expected(weights)
        found = quantize_groupwise(weights.expert(0), 2, self.group_size, symmetric=False)
        assert found.offsets is not None
        parameters = torch.stack([found.scales, found.offsets], dim=-1).flatten(-2)
        sample = self._form.pack(found.codes[None], parameters[None])
        return Expected(sample.data.nbytes * weights.shape[0], exact=False)

    def is_coded(self, pin: Pin) -> bool:
        """Also experts of more bits than ternary codes and the two-bit grid have."""
        return super().is_coded(pin) or (pin.role == "experts" and pin.one is not None and pin.one > MOST_BITS)

    def pin(self, pins: Sequence[Pin], checkpoint: Checkpoint, model: MoeModel) -> dict[str, Method]:
        """Return the method with other bits: two bits in groups, a rate of ternary experts, or linear layers."""
        made: dict[tuple[bool, float], Method] = {}
        for pin in pins:
            experts, bits = pin.role == "experts", pin.one or 0
            if experts and not LEAST_BITS <= bits <= MOST_BITS:
                check_bits([bits], (), self.name, self.pinned_bits)
            if not experts:
                check_bits([bits], BITS, self.name, self.pinned_bits)
            if (experts, bits) not in made:
                made[experts, bits] = self._pinned(experts, bits)
        return {pin.name: made[pin.role == "experts", pin.one or 0] for pin in pins}

    def _pinned(self, experts: bool, bits: float) -> Qmoe:
        if not experts:
            return replace(self, dense_bits=",".join(f"{role}={int(bits)}" for role in sorted(self.pinned_roles)))
        usual = self.match_energy == (self.bits == "ternary")
        match = None if usual else self.match_energy
        if bits == MOST_BITS:
            return replace(self, bits="2", bits_per_weight=None, match_energy=match)
        return replace(self, bits="ternary", bits_per_weight=bits, match_energy=match)

    @classmethod
    def fitted(cls, wanted: Wanted) -> Qmoe:
        """Meet a size by two bits or by the rate of ternary experts, and 8 bits elsewhere; see `Fitted`."""
        if not wanted.text:
            raise ValueError("requires a calibration text")
        rate = wanted.bits(DENSE, 8.25)
        if rate >= 2.4:
            return cls(bits="2", dense_bits=8, **wanted.text)
        return cls(bits_per_weight=min(0.99 * rate, MOST_BITS), dense_bits=8, **wanted.text)

    def layer_plan(self, experts: int, spent: Mapping[str, int]) -> RateSolver | None:
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

    def pack(self, weights: Weights, solution: Solution) -> PackedBytes:
        """Pack a projection in its form, or a linear layer."""
        if weights.role != "experts":
            return pack_linear(weights, solution.parts, self._dense)
        return self._form.pack(solution.parts["codes"], solution.parts["parameters"])

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Name experts that saw few tokens, and experts that were quantized without error compensation."""
        return coverage_notes(
            layers, self.minimum_tokens, priced=(own := self.bits_per_weight is not None), emptied=own
        )

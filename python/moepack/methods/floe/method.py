"""The method `floe`: a token reads only the channels of each expert that a low-bit copy finds important (FloE).

Coarse copies of all projections, as coded integers (`moepack.methods.rate`), stay in memory. They compute all channels
and decide which ones to refine. A record holds the residuals of a channel's gate row and down column: the difference
between fine and coarse values.

In the paper's form, only the up projection has a low-bit copy. A channel is skipped if the output of the up projection
is smaller than the expert's threshold (equations 5, 6 and 11). Records hold the gate rows and down columns themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moepack import _core
from moepack.calibration.load import CalibrationRequest
from moepack.calibration.settings import CalibrationSettings
from moepack.checkpoint import Checkpoint, MoeLayer, MoeModel
from moepack.errors import InvalidTensorError, MoepackError
from moepack.format.hub import PREDICTORS
from moepack.methods.base import Expected, MethodPlan, PackedBytes, Shape, SimpleMethod, Solution, Stage, Weights
from moepack.methods.coverage import listed
from moepack.methods.finequant.sizes import packed_bytes
from moepack.methods.floe.channels import DOWN, GATE, RESIDUALS, UP, by_channels, refuse_other_experts
from moepack.methods.floe.settings import COARSE_BITS, PAPER, FloeSettings
from moepack.methods.floe.thresholds import Decision, decide
from moepack.methods.mixins import Rearranges
from moepack.methods.parallel import for_experts
from moepack.methods.rate.coder import Coder
from moepack.methods.rate.method import Rate
from moepack.progress import Progress
from moepack.solvers.affine import AffineCodes, GroupSpec, Solver, quantize_affine
from moepack.solvers.groupwise import quantize_groupwise
from moepack.solvers.hqq import HalfQuadratic
from moepack.solvers.least_squares import LeastSquares
from moepack.stores.streaming.prediction import serialized

__all__ = ["Floe"]

SOLVERS: dict[str, Solver] = {"lsq": LeastSquares(), "hqq": HalfQuadratic()}
RECORD_GROUP = 64
"""Columns of a record that share a scale, defined by the format."""
UP_STEP, UP_MORE = 0.25, 2.0
"""Step of coarse up projections relative to the others, and their additional bits per weight: records do not refine up
projections."""
DENSE_BITS = 8
"""Bits of up projections in layers that skip nothing and therefore read all their records."""


@dataclass
class Floe(FloeSettings, Rearranges, SimpleMethod):
    """The method with its settings."""

    _bits: int = field(default=4, init=False, repr=False)
    _spec: GroupSpec = field(default=GroupSpec(2, 64), init=False, repr=False)
    _decisions: dict[str, Decision] = field(default_factory=dict, init=False, repr=False)
    _dense: set[str] = field(default_factory=set, init=False, repr=False)
    _unread: tuple[str, ...] = field(default=(), init=False, repr=False)
    _layers: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _names: dict[str, dict[str, str]] = field(default_factory=dict, init=False, repr=False)
    _coarse: Rate | None = field(default=None, init=False, repr=False)
    _coder: Coder | None = field(default=None, init=False, repr=False)
    _calibration_sha256: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._choose_form()
        self.bits = self._bits = (8 if self.paper_form else 4) if self.bits is None else self.bits
        self.dense_layers = int(self.paper_form) if self.dense_layers is None else self.dense_layers

    def _choose_form(self) -> None:
        """Check the settings of the chosen form and fill in their defaults."""
        if not self.paper_form:
            if foreign := [name for name in PAPER if getattr(self, name) is not None]:
                names = ", ".join(foreign)
                raise ValueError(f"{names} only apply to the paper's form; set paper_form (--paper-form)")
            self.coarse_bits = COARSE_BITS if self.coarse_bits is None else self.coarse_bits
            try:
                self._coarse = Rate(self.coarse_bits, roles="none", codes="plain")
            except ValueError as error:
                raise ValueError(str(error).replace("bits_per_weight", "coarse_bits")) from error
            return
        if self.coarse_bits is not None:
            raise ValueError("coarse_bits: the paper's form (paper_form, --paper-form) has no coarse copies")
        for name, default in PAPER.items():
            setattr(self, name, default if getattr(self, name) is None else getattr(self, name))
        assert self.up_bits is not None and self.group_size is not None
        self._spec = GroupSpec(self.up_bits, self.group_size)

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings that change the output, and the fingerprint of the calibration set once `plan` has read it."""
        own = ("paper_form", *PAPER) if self.paper_form else ("coarse_bits",)
        names = ("sparsity", "bits", *own, "dense_layers", "samples", "sequence_length")
        found = {name: getattr(self, name) for name in names}
        return found | ({"calibration_sha256": self._calibration_sha256} if self._calibration_sha256 else {})

    @property
    def looks_ahead(self) -> bool:
        """True: thresholds come from a run of the model."""
        return True

    def check(self, checkpoint: Checkpoint, model: MoeModel) -> None:
        """Reject experts that cannot be stored by channels; see `Method.check`."""
        refuse_other_experts(checkpoint, model)

    def arrange(self, layer: MoeLayer) -> MoeLayer:
        """Join gate and down projection by channels; see `Rearranges.arrange`."""
        return by_channels(layer, coarse=self._coarse is not None)

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the larger of the sizes of records and of another projection, in bytes."""
        if self._coarse is not None:
            other = self._coarse.bound(shape, role)
        else:
            other = packed_bytes(shape, DENSE_BITS, self._spec.group_size, symmetric=False)
        return max(other, 0 if shape[2] % 2 else _core.packed_bytes("channels", shape, bits=self._bits))

    @property
    def needs_balance(self) -> bool:
        """True: columns share scales."""
        return True

    def expected(self, weights: Weights) -> Expected:
        """Return the size; it is approximate for coarse copies and up projections, and exact for records."""
        if self._coarse is not None and self._is_coarse(weights.name):
            assert self.coarse_bits is not None
            bits = self.coarse_bits + UP_MORE * weights.name.endswith(f".{UP}")
            return Expected(math.prod(weights.shape) * bits / 8, exact=False)
        if weights.name.endswith(f".{UP}"):
            nbytes = packed_bytes(weights.shape, self._spec.bits, self._spec.group_size, symmetric=False)
            return Expected(nbytes, exact=False)
        return Expected(_core.packed_bytes("channels", weights.shape, bits=self._bits), exact=True)

    def plan(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None) -> MethodPlan:
        """Determine the thresholds; runs the model on the calibration set, again if a job is resumed."""
        packer = copy(self)
        packer._decide(checkpoint, model, progress)
        predictors = {layer: each.predictor for layer, each in packer._decisions.items() if each.predictor}
        notes = tuple(
            f"{layer}: no text reaches its experts; all of their channels are read." for layer in packer._unread
        )
        if packer._coder is not None and not packer._coder.importance.measured:
            notes += ("The model does not fit into memory in float32, so the importance of weights is estimated.",)
        return MethodPlan(
            self,
            packer,
            checkpoint.fingerprint(),
            packer.settings,
            decisions={name: packer._decided(name) for name in packer._layers},
            notes=notes,
            files={PREDICTORS: serialized(predictors)} if predictors else {},
        )

    def _decide(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None) -> None:
        """Make all decisions of a packer."""
        running = CalibrationSettings(routing="compressed", device=torch.device(self.device))
        request = CalibrationRequest(self.calibration, self.samples, self.sequence_length, running)
        samples = request.load(checkpoint)
        self._calibration_sha256 = samples.fingerprint()
        self._name_tensors(model)
        self._measure(checkpoint, model, request, progress)
        assert self.dense_layers is not None
        names = [layer.name for layer in model.layers]
        shares = {name: 0.0 if at < self.dense_layers else self.sparsity for at, name in enumerate(names)}
        self._dense = {name for name, share in shares.items() if share <= 0}
        routed = self._coarse is not None
        found = decide(checkpoint, model, samples, running, self._quantized, shares, routed)
        # No text reaches the experts of a vision tower, so they compute all channels.
        unread = {layer.name: Decision.dense(layer.experts) for layer in model.layers if layer.name not in found}
        self._decisions, self._dense, self._unread = found | unread, self._dense | unread.keys(), tuple(unread)
        self._reorder()

    def _name_tensors(self, model: MoeModel) -> None:
        """Collect the names of all packed tensors."""
        layers = [self.arrange(layer) for layer in model.layers]
        self._layers = {part.packed_name: layer.name for layer in layers for part in layer.projections}
        self._names = {layer.name: {part.name: part.packed_name for part in layer.projections} for layer in layers}

    def _measure(
        self,
        checkpoint: Checkpoint,
        model: MoeModel,
        request: CalibrationRequest | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Find the steps and factors of coarse copies, if there are any."""
        if self._coarse is None:
            return
        try:
            coder = self._coarse.coder(checkpoint, model, request, progress)
        except MoepackError:
            raise
        except ValueError as error:
            hint = "use more coarse_bits (--coarse-bits), or paper_form (--paper-form)"
            raise ValueError(f"coarse copies: {error}; {hint}") from error
        for own in self._names.values():
            coder = coder.widened(own[UP], UP_STEP)
        self._coder = coder

    def _reorder(self) -> None:
        """Reorder the factors of coarse copies to the storage order of channels."""
        for layer, names in self._names.items():
            if self._coder is not None and (order := self._order(layer)) is not None:
                for name in (GATE, UP, DOWN):
                    self._coder = self._coder.reordered(names[name], order, _channel_axis(name))

    def _quantized(self, name: str, expert: int, matrix: Tensor) -> Tensor:
        """Return the packed values of a matrix of the tensor `name` that decides about channels."""
        if self._coder is not None:
            return self._coder.values(name, expert, matrix)
        return self._up(matrix, self._layers[name]).values()

    def _decided(self, name: str) -> Any:
        """Return the thresholds of a layer, or the step of a coarse copy."""
        if self._coder is not None and self._is_coarse(name):
            return self._coder.step_of(name)
        layer = self._layers[name]
        if layer not in self._decisions:
            return None
        decision = self._decisions[layer]
        arrays = {"order": decision.order, "factors": decision.factors}
        return decision.details() | {
            name: sha256(array.numpy().tobytes()).hexdigest() for name, array in arrays.items() if array is not None
        }

    def _order(self, layer: str) -> Tensor | None:
        """Return the storage order of a layer's channels, [E, I]; None is the original order."""
        return self._decisions[layer].order if layer in self._decisions else None

    def _ordered(self, layer: str, weights: Weights, name: str) -> Weights:
        """Return a projection with its channels in storage order."""
        if (order := self._order(layer)) is None:
            return weights

        def expert(number: int, device: torch.device | None = None) -> Tensor:
            found = weights.expert(number, device)
            return found.index_select(_channel_axis(name), order[number].to(found.device))

        return replace(weights, expert=expert)

    def _factors(self, layer: str, expert: int) -> Tensor:
        """Return the factors of an expert's channels in storage order, [I, 1] or [1, 1]."""
        decision = self._decisions.get(layer)
        if decision is None or decision.factors is None:
            return torch.ones(1, 1)
        factors = decision.factors[expert]
        return (factors if decision.order is None else factors[decision.order[expert]])[:, None]

    def _is_coarse(self, name: str) -> bool:
        """Return whether the packed tensor `name` is a coarse copy."""
        return self._coarse is not None and not name.endswith(f".{RESIDUALS}")

    def solve(self, stage: Stage) -> dict[str, Solution]:
        """Quantize a coarse copy, an up projection, or the records of gate and down projection."""
        ((name, weights),) = stage.tensors.items()
        if weights.name not in self._layers:
            raise InvalidTensorError("floe packs all experts of a model, or none", tensor=weights.name)
        weights = self._ordered(stage.layer, weights, name)
        if self._coder is not None and name != RESIDUALS:
            return self._coder.solve(replace(stage, tensors={name: weights}))
        experts, rows, columns = weights.shape
        solved: list[dict[str, Tensor]] = [{} for _ in range(experts)]

        def solve(expert: int) -> None:
            given = weights.expert(expert), weights.sources[expert]
            if name == UP:
                factors = self._factors(stage.layer, expert)
                solved[expert] = self._solve_up(stage.layer, given[0].float() * factors, given[1])
            else:
                solved[expert] = self._solve_records(stage.layer, expert, *given)

        for_experts(solve, experts, lambda: stage.advance(rows * columns))
        return {name: Solution({part: torch.stack([one[part] for one in solved]) for part in solved[0]})}

    def _solve_up(self, layer: str, matrix: Tensor, source: str) -> dict[str, Tensor]:
        found = self._up(matrix, layer, source)
        assert found.offsets is not None
        return {"codes": found.codes, "scales": found.scales, "offsets": found.offsets}

    def _up(self, matrix: Tensor, layer: str, source: str | None = None) -> AffineCodes:
        """Quantize an up projection [R, C] of a layer."""
        assert self.solver is not None
        spec = replace(self._spec, bits=self._width(layer))
        return quantize_affine(matrix.float(), spec, SOLVERS[self.solver], name=source)

    def _width(self, layer: str) -> int:
        """Return the bits of a layer's up projections."""
        return DENSE_BITS if layer in self._dense else self._spec.bits

    def _solve_records(self, layer: str, expert: int, records: Tensor, source: str) -> dict[str, Tensor]:
        if not bool(torch.isfinite(records).all()):
            raise InvalidTensorError("holds NaN or infinite weights", tensor=source)
        halves = self._halves(layer, expert, records)
        if self._bits == 16:
            return {"values": torch.cat(halves, dim=1).to(torch.bfloat16).view(torch.uint16)}
        found = [
            quantize_groupwise(half, self._bits, RECORD_GROUP, dtype=torch.bfloat16, name=source) for half in halves
        ]
        return {part: torch.cat([getattr(half, part) for half in found], dim=1) for part in ("codes", "scales")}

    def _halves(self, layer: str, expert: int, records: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate rows and down columns, [I, H] each, minus the values of the coarse copies if there are any."""
        gate, down = (half.float() for half in records.chunk(2, dim=1))
        if self._coder is None:
            return gate, down / self._factors(layer, expert)
        names = self._names[layer]
        coarse_gate = self._coder.values(names[GATE], expert, gate.contiguous())
        coarse_down = self._coder.values(names[DOWN], expert, down.T.contiguous())
        return gate - coarse_gate, down - coarse_down.T

    def pack(self, weights: Weights, solution: Solution) -> PackedBytes:
        """Pack a solution; records include their thresholds."""
        if self._coder is not None and self._is_coarse(weights.name):
            return self._coder.pack(weights, solution)
        parts = {name: np.ascontiguousarray(part.numpy()) for name, part in solution.parts.items()}
        layer = self._layers[weights.name]
        try:
            if weights.name.endswith(f".{UP}"):
                return self._packed_up(weights, parts, self._width(layer))
            decision = self._decisions[layer]
            records: Any = parts["values"] if self._bits == 16 else (parts["codes"], parts["scales"])
            blob = _core.encode_channels(records, np.array(decision.thresholds, np.float32), bits=self._bits)
        except ValueError as cause:
            raise InvalidTensorError(str(cause), tensor=weights.name) from cause
        return PackedBytes("channels", blob, {"bits": self._bits, **decision.details()})

    def _packed_up(self, weights: Weights, parts: Mapping[str, Any], bits: int) -> PackedBytes:
        codes, scales, offsets = (parts[name] for name in ("codes", "scales", "offsets"))
        size = self._spec.group_size
        blob = _core.encode_groupwise(codes, scales, offsets, bits=bits, group_size=size, ndim=weights.ndim)
        return PackedBytes("groupwise", blob, _core.PackedTensor(blob).details())

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Name experts that the text did not reach, and the faster form."""
        found = tuple(
            f"{layer}: no calibration token reached {listed(details['pooled'])}; threshold of the whole layer."
            for layer, details in layers.items()
            if details.get("pooled")
        )
        if self._coarse is None:
            return found
        return (
            *found,
            "Coarse copies are decoded for every token: --paper-form is faster on a CPU but loses far more.",
        )


def _channel_axis(projection: str) -> int:
    """Return the axis of a projection's matrices that runs over an expert's channels."""
    return int(projection == DOWN)

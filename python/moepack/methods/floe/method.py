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
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from moepack import _core
from moepack.calibration.load import CalibrationRequest
from moepack.calibration.settings import CalibrationSettings
from moepack.checkpoint import Checkpoint, MoeLayer, MoeModel
from moepack.errors import InvalidTensorError, MoepackError
from moepack.format.hub import PREDICTORS
from moepack.methods.base import Expected, Method, PackedTensor, Shape, Solution, Stage, Weights
from moepack.methods.coverage import listed
from moepack.methods.finequant.sizes import packed_bytes
from moepack.methods.floe.channels import DOWN, GATE, RESIDUALS, UP, by_channels, refuse_other_experts
from moepack.methods.floe.thresholds import Decision, decide
from moepack.methods.parallel import for_experts
from moepack.methods.rate import Rate
from moepack.methods.roles import as_number
from moepack.progress import Progress
from moepack.solvers.affine import AffineCodes, GroupSpec, Solver, quantize_affine
from moepack.solvers.groupwise import BITS, quantize_groupwise
from moepack.solvers.hqq import HalfQuadratic
from moepack.solvers.least_squares import LeastSquares
from moepack.stores.streaming.prediction import serialized

__all__ = ["Floe"]

SOLVERS: dict[str, Solver] = {"lsq": LeastSquares(), "hqq": HalfQuadratic()}
RECORD_GROUP = 64
"""Columns of a record that share a scale, defined by the format."""
COARSE_BITS = 2.0
"""Default bits per weight of coarse gate and down projections."""
UP_STEP, UP_MORE = 0.25, 2.0
"""Step of coarse up projections relative to the others, and their additional bits per weight: records do not refine up
projections."""
PAPER = {"up_bits": 2, "group_size": 64, "solver": "lsq"}
"""Settings that only the paper's form has, and their defaults."""
DENSE_BITS = 8
"""Bits of up projections in layers that skip nothing and therefore read all their records."""


@dataclass
class Floe(Method):
    """Settings of the method.

    Attributes:
        calibration: text file, JSON lines, directory or data set of the hub.
        sparsity: share of channels that are not refined, or skipped in the paper's form; 0 to 1.
        bits: bits of record values: 16 (bfloat16), 8 or 4. The default is 4, because residuals are small, and 8 in the
            paper's form.
        coarse_bits: bits per weight of coarse gate and down projections, 2 by default; up projections take two more.
            Not available in the paper's form.
        paper_form: use the form of the paper, in which a low-bit up projection decides and channels are skipped. Its
            loss increase is several times as large, and it is faster on CPUs.
        up_bits: bits of up projections, 2, 3, 4 or 8; paper's form only, 2 by default.
        group_size: columns of an up projection that share a scale and an offset; paper's form only, 64 by default.
        solver: solver of up projections, "lsq" (least squares) or "hqq" (as in the paper); paper's form only, lsq by
            default.
        dense_layers: number of leading sparse layers that refine or compute all channels; 0 by default, and 1 in the
            paper's form.
        samples: maximum number of calibration windows.
        sequence_length: tokens per window.
        device: device of the calibration run.
    """

    calibration: str
    sparsity: float = 0.8
    bits: int | None = None
    coarse_bits: float | None = None
    paper_form: bool = False
    up_bits: int | None = None
    group_size: int | None = None
    solver: str | None = None
    dense_layers: int | None = None
    samples: int = 64
    sequence_length: int = 512
    device: str = "cpu"
    name: ClassVar[str] = "floe"
    _bits: int = field(default=4, init=False, repr=False)
    _spec: GroupSpec = field(default=GroupSpec(2, 64), init=False, repr=False)
    _decisions: dict[str, Decision] = field(default_factory=dict, init=False, repr=False)
    _dense: set[str] = field(default_factory=set, init=False, repr=False)
    _unread: tuple[str, ...] = field(default=(), init=False, repr=False)
    _layers: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _names: dict[str, dict[str, str]] = field(default_factory=dict, init=False, repr=False)
    _coarse: Rate | None = field(default=None, init=False, repr=False)
    _calibration_sha256: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        self._choose_form()
        default = 8 if self.paper_form else 4
        self.bits = self._bits = default if self.bits is None else as_number(self.bits, "bits")
        self.dense_layers = int(self.paper_form) if self.dense_layers is None else self.dense_layers
        if not 0 <= self.sparsity <= 1:
            raise ValueError(f"sparsity must be 0 to 1, not {self.sparsity}")
        if self._bits not in (4, 8, 16):
            raise ValueError(f"bits must be 4, 8 or 16, not {self._bits}")
        if self.dense_layers < 0 or self.samples < 1 or self.sequence_length < 1:
            raise ValueError("dense_layers must not be negative, samples and sequence_length must be positive")

    def _choose_form(self) -> None:
        """Check the settings of the chosen form and fill in their defaults."""
        if not self.paper_form:
            if foreign := [name for name in PAPER if getattr(self, name) is not None]:
                names = ", ".join(foreign)
                raise ValueError(f"{names}: settings of the paper's form, which is chosen by paper_form (--paper-form)")
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
        if self.up_bits not in BITS:
            raise ValueError(f"up_bits must be one of {', '.join(map(str, BITS))}, not {self.up_bits}")
        if self.group_size not in (16, 32, 64, 128, 256):
            raise ValueError(f"group_size must be 16, 32, 64, 128 or 256, not {self.group_size}")
        if self.solver not in SOLVERS:
            raise ValueError(f"solver must be lsq or hqq, not {self.solver}")
        self._spec = GroupSpec(self.up_bits, self.group_size)

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings that change the output, and the fingerprint of the calibration set after `prepare`."""
        own = ("paper_form", *PAPER) if self.paper_form else ("coarse_bits",)
        names = ("sparsity", "bits", *own, "dense_layers", "samples", "sequence_length")
        found = {name: getattr(self, name) for name in names}
        return found | ({"calibration_sha256": self._calibration_sha256} if self._calibration_sha256 else {})

    @property
    def looks_ahead(self) -> bool:
        """True: thresholds come from a run of the model."""
        return True

    def aim(self, checkpoint: Checkpoint, model: MoeModel) -> None:
        """Reject experts that cannot be stored by channels; see `Method.aim`."""
        refuse_other_experts(checkpoint, model)

    def arranged(self, layer: MoeLayer) -> MoeLayer:
        """Join gate and down projection by channels; see `Method.arranged`."""
        found = by_channels(layer, coarse=self._coarse is not None)
        self._layers |= {projection.packed_name: layer.name for projection in found.projections}
        self._names[layer.name] = {projection.name: projection.packed_name for projection in found.projections}
        return found

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

    def prepare(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None) -> None:
        """Determine the thresholds; runs the model on the calibration set, again if a job is resumed."""
        running = CalibrationSettings(routing="compressed", device=torch.device(self.device))
        request = CalibrationRequest(self.calibration, self.samples, self.sequence_length, running)
        samples = request.load(checkpoint)
        self._calibration_sha256 = samples.fingerprint()
        self._arrange(checkpoint, model, request, progress)
        assert self.dense_layers is not None
        names = [layer.name for layer in model.layers]
        shares = {name: 0.0 if at < self.dense_layers else self.sparsity for at, name in enumerate(names)}
        self._dense = {name for name, share in shares.items() if share <= 0}
        routed = self._coarse is not None
        found = decide(checkpoint, model, samples, running, self._quantized, shares, routed)
        # No text reaches the experts of a vision tower, so they compute all channels.
        unread = {layer.name: Decision.dense(layer.experts) for layer in model.layers if layer.name not in found}
        self._decisions, self._dense, self._unread = found | unread, self._dense | unread.keys(), tuple(unread)
        if self._coarse is not None:
            self._reorder(self._coarse)

    def _arrange(
        self,
        checkpoint: Checkpoint,
        model: MoeModel,
        request: CalibrationRequest | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Collect the names of all tensors and, if there are coarse copies, find their steps and factors."""
        for layer in model.layers:
            self.arranged(layer)
        if self._coarse is not None:
            try:
                self._coarse.measure(checkpoint, model, request, progress)
            except MoepackError:
                raise
            except ValueError as error:
                hint = "use more coarse_bits (--coarse-bits), or paper_form (--paper-form)"
                raise ValueError(f"coarse copies: {error}; {hint}") from error
            for own in self._names.values():
                self._coarse.widen(own[UP], UP_STEP)

    def _reorder(self, coarse: Rate) -> None:
        """Reorder the factors of coarse copies to the storage order of channels."""
        for layer, names in self._names.items():
            if (order := self._order(layer)) is not None:
                for name in (GATE, UP, DOWN):
                    coarse.reorder(names[name], order, _channel_axis(name))

    def files(self) -> Mapping[str, bytes]:
        """Return the file of the predictors that are better than routers; see `Method.files`."""
        found = {layer: decision.predictor for layer, decision in self._decisions.items() if decision.predictor}
        return {PREDICTORS: serialized(found)} if found else {}

    def _quantized(self, name: str, expert: int, matrix: Tensor) -> Tensor:
        """Return the packed values of a matrix of the tensor `name` that decides about channels."""
        if self._coarse is not None:
            return self._coarse.values(name, expert, matrix)
        return self._up(matrix, self._layers[name]).values()

    def decided(self, name: str) -> Any:
        """Return the thresholds of a layer, or the step of a coarse copy."""
        if self._is_coarse(name):
            assert self._coarse is not None
            return self._coarse.decided(name)
        layer = self._layers.get(name, "")
        if layer not in self._decisions:
            return None
        order = self._order(layer)
        return self._decisions[layer].details() | (
            {} if order is None else {"order": sha256(order.numpy().tobytes()).hexdigest()}
        )

    def _order(self, layer: str) -> Tensor | None:
        """Return the storage order of a layer's channels, [E, I]; None is the original order."""
        return self._decisions[layer].order if layer in self._decisions else None

    def _ordered(self, layer: str, weights: Weights, name: str) -> Weights:
        """Return a projection with its channels in storage order."""
        if (order := self._order(layer)) is None:
            return weights

        def expert(number: int) -> Tensor:
            return weights.expert(number).index_select(_channel_axis(name), order[number])

        return replace(weights, expert=expert)

    def _is_coarse(self, name: str) -> bool:
        """Return whether the packed tensor `name` is a coarse copy."""
        return self._coarse is not None and not name.endswith(f".{RESIDUALS}")

    def solve(self, stage: Stage) -> dict[str, Solution]:
        """Quantize a coarse copy, an up projection, or the records of gate and down projection."""
        ((name, weights),) = stage.tensors.items()
        if weights.name not in self._layers:
            raise InvalidTensorError("floe packs all experts of a model, or none", tensor=weights.name)
        weights = self._ordered(stage.layer, weights, name)
        if self._coarse is not None and name != RESIDUALS:
            return self._coarse.solve(replace(stage, tensors={name: weights}))
        experts, rows, columns = weights.shape
        solved: list[dict[str, Tensor]] = [{} for _ in range(experts)]

        def solve(expert: int) -> None:
            given = weights.expert(expert), weights.sources[expert]
            if name == UP:
                solved[expert] = self._solve_up(stage.layer, *given)
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
        if self._coarse is None:
            return gate, down
        names = self._names[layer]
        coarse_gate = self._coarse.values(names[GATE], expert, gate.contiguous())
        coarse_down = self._coarse.values(names[DOWN], expert, down.T.contiguous())
        return gate - coarse_gate, down - coarse_down.T

    def pack(self, weights: Weights, solution: Solution) -> PackedTensor:
        """Pack a solution; records include their thresholds."""
        if self._coarse is not None and self._is_coarse(weights.name):
            return self._coarse.pack(weights, solution)
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
        return PackedTensor("channels", blob, {"bits": self._bits, **decision.details()})

    def _packed_up(self, weights: Weights, parts: Mapping[str, Any], bits: int) -> PackedTensor:
        codes, scales, offsets = (parts[name] for name in ("codes", "scales", "offsets"))
        size = self._spec.group_size
        blob = _core.encode_groupwise(codes, scales, offsets, bits=bits, group_size=size, ndim=weights.ndim)
        return PackedTensor("groupwise", blob, _core.PackedTensor(blob).details())

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Name experts that the text did not reach, a measurement that was impossible, and the faster form."""
        found = tuple(
            f"{layer}: no calibration token reached {listed(details['pooled'])}; threshold of the whole layer."
            for layer, details in layers.items()
            if details.get("pooled")
        )
        found += tuple(
            f"{layer}: no text reaches its experts; all of their channels are read." for layer in self._unread
        )
        if self._coarse is None:
            return found
        found += ("Coarse copies are decoded for every token: --paper-form is faster on a CPU but loses far more.",)
        if self._coarse.is_measured:
            return found
        return (*found, "The model does not fit into memory in float32, so the importance of weights is estimated.")


def _channel_axis(projection: str) -> int:
    """Return the axis of a projection's matrices that runs over an expert's channels."""
    return int(projection == DOWN)

"""The method `floe`: the up projection in few bits, and of gate and down projection only the channels that it asks for.

A channel is skipped where the up projection's output is smaller than the expert's threshold (FloE, equations 5, 6 and
11). Records of gate row and down column keep bf16, or 8 or 4 bits; up projections are group-wise integers.

With coarse copies of all projections, as coded integers (`moepack.methods.rate`), nothing is skipped: the copies decide
and compute, and records hold what finer values of the channels that matter most add to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from moepack import _core
from moepack.calibration.load import load_samples
from moepack.calibration.settings import CalibrationSettings
from moepack.checkpoint import Checkpoint, MoeLayer, MoeModel
from moepack.errors import InvalidTensorError
from moepack.format.hub import PREDICTORS
from moepack.methods.base import Expected, Method, PackedTensor, Shape, Solution, Stage, Weights
from moepack.methods.coverage import listed
from moepack.methods.finequant.sizes import packed_bytes
from moepack.methods.floe.channels import DOWN, GATE, RESIDUALS, UP, by_channels
from moepack.methods.floe.thresholds import Decision, decide
from moepack.methods.parallel import for_experts
from moepack.methods.rate import Rate
from moepack.methods.rate.sample import take_sample
from moepack.methods.roles import as_number
from moepack.progress import Progress
from moepack.runtime.prediction import serialized
from moepack.solvers.affine import AffineCodes, GroupSpec, Solver, quantize_affine
from moepack.solvers.groupwise import BITS, quantize_groupwise
from moepack.solvers.hqq import HalfQuadratic
from moepack.solvers.least_squares import LeastSquares
from moepack.solvers.priced import largest_at

__all__ = ["Floe"]

SOLVERS: dict[str, Solver] = {"lsq": LeastSquares(), "hqq": HalfQuadratic()}
RECORD_GROUP = 64
"""Columns of a record that share a scale, by the format."""
UP_STEP = 0.25
"""The step of coarse up projections over that of the others, two bits more: records have no finer ones."""
DENSE_BITS = 8
"""Bits of up projections that skip nothing: they are read whole, as the records of their layer are."""


@dataclass
class Floe(Method):
    """Settings of the method.

    Attributes:
        calibration: text file, JSON lines, directory or data set of the hub.
        sparsity: the share of channels that each expert skips, 0 to 1.
        bits: of the values of records: 16 (bfloat16), 8 or 4; by default 8, and 4 beside coarse copies, whose residuals
            are small.
        up_bits: of up projections, 2, 3, 4 or 8.
        group_size: columns of an up projection that share a scale and an offset.
        solver: of up projections, "lsq" (least squares) or "hqq" (the paper's).
        dense_layers: so many sparse layers, the first ones, skip nothing; by default 1, and 0 with coarse copies.
        coarse_bits: bits a weight of coarse copies; None is the paper's form, without them. `up_bits`, `group_size` and
            `solver` are not used with them.
        samples: calibration windows, at most.
        sequence_length: tokens a window.
        device: where the model runs.
    """

    calibration: str
    sparsity: float = 0.8
    bits: int | None = None
    up_bits: int = 2
    group_size: int = 64
    solver: str = "lsq"
    dense_layers: int | None = None
    coarse_bits: float | None = None
    samples: int = 64
    sequence_length: int = 512
    device: str = "cpu"
    name: ClassVar[str] = "floe"
    _bits: int = field(default=8, init=False, repr=False)
    _decisions: dict[str, Decision] = field(default_factory=dict, init=False, repr=False)
    _dense: set[str] = field(default_factory=set, init=False, repr=False)
    _layers: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _names: dict[str, dict[str, str]] = field(default_factory=dict, init=False, repr=False)
    _coarse: Rate | None = field(default=None, init=False, repr=False)
    _calibration_sha256: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        default = 8 if self.coarse_bits is None else 4
        self.bits = self._bits = default if self.bits is None else as_number(self.bits, "bits")
        if not 0 <= self.sparsity <= 1:
            raise ValueError(f"sparsity must be 0 to 1, not {self.sparsity}")
        if self._bits not in (4, 8, 16):
            raise ValueError(f"bits must be 4, 8 or 16, not {self._bits}")
        if self.up_bits not in BITS:
            raise ValueError(f"up_bits must be one of {', '.join(map(str, BITS))}, not {self.up_bits}")
        if self.group_size not in (16, 32, 64, 128, 256):
            raise ValueError(f"group_size must be 16, 32, 64, 128 or 256, not {self.group_size}")
        if self.solver not in SOLVERS:
            raise ValueError(f"solver must be lsq or hqq, not {self.solver}")
        if self.coarse_bits is not None:
            self._coarse = Rate(self.coarse_bits, roles="none", codes="plain")
        if self.dense_layers is None:
            self.dense_layers = int(self._coarse is None)
        if self.dense_layers < 0 or self.samples < 1 or self.sequence_length < 1:
            raise ValueError("dense_layers must not be negative, samples and sequence_length must be positive")

    @property
    def settings(self) -> Mapping[str, Any]:
        """Every setting that changes the bytes, and the calibration set, once it is read."""
        names = ("sparsity", "bits", "up_bits", "group_size", "solver", "dense_layers", "samples", "sequence_length")
        found = {name: getattr(self, name) for name in names}
        found |= {} if self.coarse_bits is None else {"coarse_bits": self.coarse_bits}
        return found | ({"calibration_sha256": self._calibration_sha256} if self._calibration_sha256 else {})

    @property
    def looks_ahead(self) -> bool:
        """Thresholds come from a run of the model."""
        return True

    def arranged(self, layer: MoeLayer) -> MoeLayer:
        """Put gate and down projection together, channel by channel; see `Method.arranged`."""
        found = by_channels(layer, coarse=self._coarse is not None)
        self._layers |= {projection.packed_name: layer.name for projection in found.projections}
        self._names[layer.name] = {projection.name: projection.packed_name for projection in found.projections}
        return found

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the size of records or of another projection, whichever is larger."""
        other = packed_bytes(shape, DENSE_BITS, self.group_size, symmetric=False)
        if self._coarse is not None:
            other = self._coarse.bound(shape, role)
        return max(other, 0 if shape[2] % 2 else _core.packed_bytes("channels", shape, bits=self._bits))

    def expected(self, weights: Weights) -> Expected:
        """Return the size, which shape and settings fix, but for coarse copies and the first layers' up projections."""
        if self._coarse is not None and self._is_coarse(weights.name):
            return self._coarse.expected(weights)
        if weights.name.endswith(f".{UP}"):
            return Expected(packed_bytes(weights.shape, self.up_bits, self.group_size, symmetric=False), exact=False)
        return Expected(_core.packed_bytes("channels", weights.shape, bits=self._bits), exact=True)

    def prepare(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None) -> None:
        """Find the thresholds; runs the model over the calibration set, again when a job is resumed."""
        samples = load_samples(checkpoint, self.calibration, self.samples, self.sequence_length)
        self._calibration_sha256 = samples.fingerprint()
        for layer in model.layers:
            self.arranged(layer)
        if self._coarse is not None:
            # Thresholds compare channels of a layer as they are: copies have no factors of rows and columns.
            coder = self._coarse
            sample = take_sample(checkpoint, model, coder.dense_roles, largest=largest_at(coder.bits_per_weight))
            coder.decide(sample)
            ups = (found.packed_name for layer in model.layers for found in layer.projections if found.name == UP)
            for name in ups:
                self._coarse.widen(name, UP_STEP)
        assert self.dense_layers is not None
        names = [layer.name for layer in model.layers]
        shares = {name: 0.0 if at < self.dense_layers else self.sparsity for at, name in enumerate(names)}
        self._dense = {name for name, share in shares.items() if share <= 0}
        running = CalibrationSettings(routing="compressed", device=torch.device(self.device))

        routed = self._coarse is not None
        self._decisions = decide(checkpoint, model, samples, running, self._quantized, shares, routed)

    def files(self) -> Mapping[str, bytes]:
        """The predictors that are better than routers."""
        found = {layer: decision.predictor for layer, decision in self._decisions.items() if decision.predictor}
        return {PREDICTORS: serialized(found)} if found else {}

    def _quantized(self, name: str, matrix: Tensor) -> Tensor:
        """What a deciding matrix of the packed tensor `name` becomes."""
        if self._coarse is None:
            return self._up(matrix, self._layers[name]).values()
        return self._coarse_values(name, matrix)

    def _coarse_values(self, name: str, matrix: Tensor) -> Tensor:
        """What a coarse copy of the packed tensor `name` holds of a matrix [R, C]."""
        assert self._coarse is not None
        codes, step = self._coarse.rounded(name, matrix)
        return codes.float() * step

    def decided(self, name: str) -> Any:
        """The thresholds of a layer, or the step of a coarse copy."""
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
        """The channels [E, I] of a layer as they are stored; None as they come."""
        return self._decisions[layer].order if layer in self._decisions else None

    def _ordered(self, layer: str, weights: Weights, name: str) -> Weights:
        """A projection with its channels as they are stored."""
        if (order := self._order(layer)) is None:
            return weights
        axis = int(name == "down_proj")

        def expert(number: int) -> Tensor:
            return weights.expert(number).index_select(axis, order[number])

        return replace(weights, expert=expert)

    def _is_coarse(self, name: str) -> bool:
        """Whether the packed tensor `name` is a coarse copy."""
        return self._coarse is not None and not name.endswith(f".{RESIDUALS}")

    def solve(self, stage: Stage) -> dict[str, Solution]:
        """Quantize an up projection, or the records of gate and down."""
        ((name, weights),) = stage.tensors.items()
        if weights.name not in self._layers:
            raise InvalidTensorError("floe packs all experts of a model, or none", tensor=weights.name)
        weights = self._ordered(stage.layer, weights, name)
        if self._coarse is not None and name != RESIDUALS:
            return self._coarse.solve(replace(stage, tensors={name: weights}))
        experts, rows, columns = weights.shape
        solved: list[dict[str, Tensor]] = [{} for _ in range(experts)]
        work = self._solve_up if name == UP else self._solve_records

        def solve(expert: int) -> None:
            solved[expert] = work(stage.layer, weights.expert(expert), weights.sources[expert])

        for_experts(solve, experts, lambda: stage.advance(rows * columns))
        return {name: Solution({part: torch.stack([one[part] for one in solved]) for part in solved[0]})}

    def _solve_up(self, layer: str, matrix: Tensor, source: str) -> dict[str, Tensor]:
        found = self._up(matrix, layer, source)
        assert found.offsets is not None
        return {"codes": found.codes, "scales": found.scales, "offsets": found.offsets}

    def _up(self, matrix: Tensor, layer: str, source: str | None = None) -> AffineCodes:
        """An up projection [R, C] as it is packed."""
        spec = GroupSpec(self._width(layer), self.group_size)
        return quantize_affine(matrix.float(), spec, SOLVERS[self.solver], name=source)

    def _width(self, layer: str) -> int:
        """Bits of a layer's up projections."""
        return DENSE_BITS if layer in self._dense else self.up_bits

    def _solve_records(self, layer: str, records: Tensor, source: str) -> dict[str, Tensor]:
        if not bool(torch.isfinite(records).all()):
            raise InvalidTensorError("holds NaN or infinite weights", tensor=source)
        halves = self._halves(layer, records)
        if self._bits == 16:
            return {"values": torch.cat(halves, dim=1).to(torch.bfloat16).view(torch.uint16)}
        found = [
            quantize_groupwise(half, self._bits, RECORD_GROUP, dtype=torch.bfloat16, name=source) for half in halves
        ]
        return {part: torch.cat([getattr(half, part) for half in found], dim=1) for part in ("codes", "scales")}

    def _halves(self, layer: str, records: Tensor) -> tuple[Tensor, Tensor]:
        """Gate rows and down columns [I, H], or what they add to coarse copies."""
        gate, down = records.chunk(2, dim=1)
        if self._coarse is None:
            return gate.float(), down.float()
        names = self._names[layer]
        coarse_gate = self._coarse_values(names[GATE], gate.contiguous())
        coarse_down = self._coarse_values(names[DOWN], down.T.contiguous())
        return gate.float() - coarse_gate, down.float() - coarse_down.T

    def pack(self, weights: Weights, solution: Solution) -> PackedTensor:
        """Pack what was found, records with their thresholds."""
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
        blob = _core.encode_groupwise(
            parts["codes"], parts["scales"], parts["offsets"], bits=bits, group_size=self.group_size, ndim=weights.ndim
        )
        return PackedTensor("groupwise", blob, _core.PackedTensor(blob).details())

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Name experts that the text did not reach."""
        return tuple(
            f"{layer}: no calibration token reached {listed(details['pooled'])}; threshold of the whole layer."
            for layer, details in layers.items()
            if details.get("pooled")
        )

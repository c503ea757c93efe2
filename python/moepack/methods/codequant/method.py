"""The method `codequant`: clustered weights, fitted to the inputs of the compressed model (CodeQuant, section 3).

The model runs block by block. The linear layers of a block (query, key and value projections; then the output
projection; then shared experts) are clustered before its experts. So the input of a layer has passed through all
previously compressed layers, with activations rounded as the packed layers round them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from moepack.calibration import CalibrationRequest, CalibrationSettings, Samples
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.architectures import described
from moepack.checkpoint.dense import ROLES
from moepack.checkpoint.rewritten import Rewriting, RewrittenCheckpoint
from moepack.codebook import BLOCK_UNIT
from moepack.errors import ResumeError
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
from moepack.methods.books import pack, packed_bytes, solve
from moepack.methods.codequant.rotation import Grouping, fold, is_orthogonal, learn, normalized_states, start
from moepack.methods.codequant.rotation.fold import check
from moepack.methods.codequant.settings import ROW, CodeQuantSettings
from moepack.methods.coverage import coverage_notes
from moepack.methods.mixins import Calibrates, PacksLinears, Rewrites
from moepack.methods.pinned import Pin, PinsBits, check_bits
from moepack.methods.settings import in_words
from moepack.progress import Progress
from moepack.solvers.activations import Rounding
from moepack.solvers.codebooks import ClusterSettings
from moepack.solvers.fixed_point import centroid_bits

__all__ = ["CodeQuant"]

WIDTHS = (2, 3, 4)
"""Bits per code."""

STATES = 1 << 16
"""Number of states from which a rotation is learned."""

ERRORS = "errors"
"""The entry of the kept state with a learned rotation's errors (`rotation.cayley`), which are reported only."""


@dataclass
class CodeQuant(CodeQuantSettings, PinsBits, Calibrates, PacksLinears, Rewrites, SimpleMethod):
    """The method with its settings."""

    pinned_bits: ClassVar[str] = in_words(WIDTHS)
    pinned_roles: ClassVar[frozenset[str]] = frozenset({"attention", "shared", "mlp"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hadamard is None:
            self.hadamard = self.activation_bits == 4
        if self.drift is None:
            self.drift = 0.5 if self.activation_bits == 8 else 0.0
        if self.hadamard and self.activation_bits == 16:
            raise ValueError("hadamard rotates activations before they are rounded: it requires activation_bits 8 or 4")
        width = None if self.block == ROW else self._width(self.block)
        self._solver = ClusterSettings(
            bits=self.weight_bits,
            block=width,
            start=self.start,
            steps=self.steps,
            assignment=self.assignment,
            weighted=self.weighted,
            damping=self.damping,
            drift=self.drift,
            centroid_bits=centroid_bits(self._rounding.bits),
        )
        roles = [role.strip() for role in self.dense.split(",") if role.strip()]
        if unknown := set(roles) - {"attention", "shared", "mlp"}:
            raise ValueError(f"dense: roles are attention, shared and mlp, not '{min(unknown)}'")
        self.dense = ",".join(role for role in ROLES if role in roles)

    @staticmethod
    def _width(block: int | str) -> int:
        try:
            width = int(block)
        except ValueError:
            width = 0
        if width < BLOCK_UNIT or width % BLOCK_UNIT:
            raise ValueError(f"block must be row or a multiple of {BLOCK_UNIT}, not {block}")
        return width

    @property
    def _rounding(self) -> Rounding:
        """How packed layers round their inputs."""
        return Rounding(0 if self.activation_bits == 16 else self.activation_bits, bool(self.hadamard))

    @property
    def dense_roles(self) -> frozenset[str]:
        """The roles that are packed."""
        return frozenset(role for role in self.dense.split(",") if role)

    @property
    def needs_balance(self) -> bool:
        """True: columns share scales."""
        return True

    @property
    def rewrites(self) -> bool:
        """Whether the model is rotated or its inner dimensions are reordered."""
        return self.rotation != "none" or self.permute

    @property
    def looks_ahead(self) -> bool:
        """Whether a rotation is learned on the states of the whole model."""
        return self.rotation == "learned"

    @property
    def request(self) -> CalibrationRequest:
        """The calibration set, with the compressed model's routing and its rounded activations."""
        settings = CalibrationSettings(
            routing="compressed",
            drift=self._solver.drift > 0,
            rounding=self._rounding,
            group=self.group,
            device=torch.device(self.device),
        )
        return CalibrationRequest(self.calibration, self.samples, self.sequence_length, settings)

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the size, which depends on the shape alone."""
        return packed_bytes(shape, self.weight_bits, self._solver.block, self._rounding.bits)

    def expected(self, weights: Weights) -> Expected:
        """Return the size."""
        return Expected(self.bound(weights.shape), exact=True)

    def pin(self, pins: Sequence[Pin], checkpoint: Checkpoint, model: MoeModel) -> dict[str, Method]:
        """Return the method with other bits; the main method rotates the whole checkpoint."""
        check_bits([pin.one or 0 for pin in pins], WIDTHS, self.name, self.pinned_bits)
        made = {
            bits: replace(
                self, weight_bits=int(bits), rotation="none", permute=False, dense=",".join(sorted(self.pinned_roles))
            )
            for bits in {pin.one or 0 for pin in pins}
        }
        return {pin.name: made[pin.one or 0] for pin in pins}

    def rewrite(self, checkpoint: Checkpoint, model: MoeModel, kept: Mapping[str, Tensor] | None) -> Rewriting | None:
        """Find the rotation and the order of inner dimensions, and fold them into the checkpoint.

        Raises:
            CalibrationError: the calibration set is unusable.
            ResumeError: an earlier run's rotation is not orthogonal.
            UnsupportedModelError: the architecture cannot be rotated.
        """
        width = self._solver.block
        grouped = self.permute and width is not None and described(model.architecture).rotatable
        if self.rotation == "none" and not grouped:
            return None
        check(checkpoint)
        state = self._state(checkpoint, model, kept)
        folding = fold(checkpoint, state.get("rotation"))
        tensor = Grouping(folding.tensor, width).tensor if grouped and width is not None else folding.tensor
        packed = {linear.source for layer in model.dense for linear in layer.only(self.dense_roles).linears}
        packed |= {source for layer in model.layers for p in layer.projections for source in p.sources}
        routers = {name for layer in model.layers for name in layer.router}

        def dtype(name: str) -> torch.dtype | None:
            """Return the dtype of a tensor; routers are small and stay exact in float32."""
            if name in packed:
                return None
            return torch.float32 if name in routers else checkpoint.info(folding.source(name)).dtype

        digest = hashlib.sha256(f"{grouped} {width}".encode())
        for name in sorted(state.keys() - {ERRORS}):
            digest.update(state[name].contiguous().numpy().tobytes())
        identity = digest.hexdigest()
        return Rewriting(folding.names, folding.source, tensor, dtype, folding.config, state, identity)

    def _state(
        self, checkpoint: Checkpoint, model: MoeModel, kept: Mapping[str, Tensor] | None
    ) -> Mapping[str, Tensor]:
        """Return the rotation, and a mark that identifies everything it depends on."""
        if self.rotation == "none":
            return {"mark": torch.zeros(0, dtype=torch.uint8)}
        samples = self.request.load(checkpoint)
        identity = f"{samples.fingerprint()} {self.rotation} {self.rotation_steps} {self.seed} {self.activation_bits}"
        mark = torch.frombuffer(bytearray(hashlib.sha256(identity.encode()).digest()), dtype=torch.uint8)
        if kept is None or not torch.equal(kept.get("mark", mark[:0]), mark):
            return {**self._rotation(checkpoint, model, samples), "mark": mark}
        if "rotation" not in kept or not is_orthogonal(kept["rotation"]):
            raise ResumeError("the rotation of the interrupted run is not orthogonal; start over with --no-resume")
        return kept

    def _rotation(self, checkpoint: Checkpoint, model: MoeModel, samples: Samples) -> dict[str, Tensor]:
        """Return the rotation, and the errors of `rotation.learn` if it is learned."""
        width = checkpoint.info(described(model.architecture).embeddings).shape[-1]
        first = start(width, "hadamard" if self.rotation == "hadamard" else "random", self.seed)
        if self.rotation != "learned":
            return {"rotation": first}
        states = normalized_states(checkpoint, model, samples, STATES, torch.device(self.device), self.seed)
        found = learn(states, self.activation_bits, first, self.rotation_steps, seed=self.seed, device=self.device)
        return {"rotation": found.rotation, ERRORS: torch.tensor(found.errors, dtype=torch.float64)}

    def plan(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None) -> MethodPlan:
        """Return a plan without decisions; its notes report the effect of a learned rotation."""
        plan = super().plan(checkpoint, model, progress)
        state = checkpoint.rewriting.state if isinstance(checkpoint, RewrittenCheckpoint) else {}
        return replace(plan, notes=self._rotation_notes(state[ERRORS])) if ERRORS in state else plan

    def _rotation_notes(self, errors: Tensor) -> tuple[str, ...]:
        plain, first, last = (f"{error:.2e}" for error in errors.tolist())
        bits = 4 if self.activation_bits == 16 else self.activation_bits
        rotation = f"Rounding held-out states to {bits} bits loses {plain} of their energy, {first} rotated at random"
        return (f"{rotation}, {last} with the learned rotation.",)

    def solve(self, stage: Stage) -> dict[str, Solution]:
        """Cluster a stage; every token has equal weight in linear layers."""
        return solve(stage, self._solver, self._rounding, self.weigh_tokens or stage.dense)

    def pack(self, weights: Weights, solution: Solution) -> PackedBytes:
        """Pack a tensor."""
        return pack(weights, solution.parts, self._solver, self._rounding)

    def notes(self, layers: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
        """Name experts with few tokens or clustered without their inputs."""
        return coverage_notes(layers, self.minimum_tokens)

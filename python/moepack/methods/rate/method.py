"""The method `rate`: integers with one step for the whole model, rounded with regard to code length, at any bit rate.

Rows and columns of each tensor are multiplied by factors so that all errors have equal weight (`importance`, `scales`).
The step is derived from the requested bits and a sample of the model (`step_size`). Weights are rounded to it
(`moepack.solvers.priced`), and an entropy coder stores the integers in about as many bytes as they carry information.
With a text, each layer gets the bits that result from this, and GPTQ with the code length as price decides where they
go (`layer`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from moepack.calibration import CalibrationRequest
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.dense import EMBEDDING, ROLES
from moepack.errors import OverrideError
from moepack.methods.base import Expected, Method, MethodPlan, Shape, Weights
from moepack.methods.fitting import Fitted, Wanted
from moepack.methods.mixins import PacksLinears
from moepack.methods.pinned import Pin, PinsBits
from moepack.methods.rate.beside import beside
from moepack.methods.rate.coder import Coder, bound, expected
from moepack.methods.rate.importance import Importance, find_importance
from moepack.methods.rate.pinned import PinnedTensor, completed, pinned_tensors, rest_of, whole
from moepack.methods.rate.sample import take_sample
from moepack.methods.rate.settings import LEAST_BITS, MOST_BITS, RateSettings
from moepack.methods.request import TEXT_SETTINGS, DefaultText, request_of
from moepack.progress import Progress
from moepack.solvers.priced import largest_at

__all__ = ["Rate"]

_ROLES = (EMBEDDING, *ROLES)


@dataclass
class Rate(RateSettings, Fitted, PinsBits, DefaultText, PacksLinears, Method):
    """The method with its settings."""

    pinned_bits: ClassVar[str] = f"{LEAST_BITS:g} to {MOST_BITS:g}"
    pinned_roles: ClassVar[frozenset[str]] = frozenset(_ROLES)
    splits_experts: ClassVar[bool] = True
    without_text: ClassVar[str] = "the importance of weights is estimated"

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"all": _ROLES, "none": ()}.get(self.roles, tuple(self.roles.split(",")))
        if unknown := sorted(set(given) - set(_ROLES)):
            raise ValueError(f"roles must be all, none, or some of {', '.join(_ROLES)}, not {', '.join(unknown)}")
        self._roles = frozenset(given)
        _ = self.request  # runs its checks

    @property
    def request(self) -> CalibrationRequest | None:
        """The calibration set, and how the model runs; None without calibration."""
        return request_of(self)

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings that change the output, except the calibration set."""
        found: dict[str, Any] = {
            "bits_per_weight": self.bits_per_weight,
            "roles": ",".join(role for role in _ROLES if role in self._roles),
            "codes": self.codes,
        }
        if self.calibration is not None:
            found |= {key: getattr(self, key) for key in TEXT_SETTINGS}
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
    def looks_ahead(self) -> bool:
        """Always true: one step serves the whole model."""
        return True

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the bytes to reserve; see `bound` of a coder."""
        return bound(shape, self.bits_per_weight)

    def expected(self, weights: Weights) -> Expected:
        """Return the requested bits; see `Coder.expected`."""
        return expected(weights, self.bits_per_weight)

    def plan(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None) -> MethodPlan:
        """Find the step.

        Raises:
            InvalidTensorError: a sampled weight is NaN or infinite.
            ValueError: metadata alone exceeds the requested bits.
        """
        coder = self.coder(checkpoint, model, self.request, progress)
        notes = coder.importance.notes
        return MethodPlan(
            self, coder, checkpoint.fingerprint(), self.settings, self.request, decisions=coder.decisions, notes=notes
        )

    def coder(
        self, checkpoint: Checkpoint, model: MoeModel, request: CalibrationRequest | None, progress: Progress | None
    ) -> Coder:
        """Find the factors of rows and columns, by a text where there is one, and the step; errors as of `plan`."""
        found = find_importance(checkpoint, whole(self, checkpoint, model), request, progress)
        pins = pinned_tensors(self)
        shapes = {name: shape for name, shape in self._shapes(model).items() if name not in pins}
        given = self._for_rest(sum(map(math.prod, shapes.values())))
        even, largest = dict.fromkeys(found.scales, 1.0), largest_at(given.bits_per_weight)
        sample = take_sample(checkpoint, model, self._roles, even, found.scales, largest, shapes)
        coder = Coder.of(given, sample, found)
        ends = {
            linear.source for dense in model.dense for linear in dense.linears if linear.role in (EMBEDDING, "head")
        }
        return replace(coder, solved={name: shape for name, shape in coder.solved.items() if name not in ends})

    def coding(
        self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None
    ) -> tuple[Rate, CalibrationRequest | None, Importance]:
        """See `moepack.methods.rate.pinned.Coding`."""
        return self, self.request, find_importance(checkpoint, whole(self, checkpoint, model), self.request, progress)

    def pin(self, pins: Sequence[Pin], checkpoint: Checkpoint, model: MoeModel) -> dict[str, Method]:
        """Return a method for each tensor; the others share the rest of the requested bits."""
        weights = sum(map(math.prod, (self._shapes(model) | {pin.name: pin.shape for pin in pins}).values()))
        rest = rest_of([*pins], self.bits_per_weight * weights, weights)
        found = completed([*pins], rest, self.name, self.pinned_bits)
        return {pin.name: PinnedTensor(pin, self) for pin in found}

    @staticmethod
    def beside(method: Method, pins: Sequence[Pin]) -> dict[str, Method]:
        """Return methods for tensors of a job whose main method cannot give them their bits; raises as `beside`."""
        return beside(method, pins)

    def _for_rest(self, weights: int) -> Rate:
        """Return the method for the `weights` weights whose bits are not given, which share the rest of the bits.

        Raises:
            OverrideError: too few or too many bits are left for them.
        """
        pins = pinned_tensors(self).values()
        if not pins or not weights:
            return self
        every = weights + sum(own.pin.weights for own in pins)
        left = self.bits_per_weight * every - sum(own.mean * own.pin.weights for own in pins)
        if not LEAST_BITS <= left / weights <= MOST_BITS:
            raise OverrideError(
                f"the bits by name leave {max(left, 0) / weights:.2f} bits per weight for the other tensors, which may "
                f"have {self.pinned_bits}"
            )
        return replace(self, bits_per_weight=left / weights)

    def _shapes(self, model: MoeModel) -> dict[str, Shape]:
        """Return the shapes of the tensors that the settings pack, by name."""
        found = {part.packed_name: part.shape for layer in model.layers for part in layer.projections}
        linears = (linear for dense in model.dense for linear in dense.only(self._roles).linears)
        return found | {linear.source: (1, *linear.shape) for linear in linears}

    @classmethod
    def fitted(cls, wanted: Wanted) -> Rate:
        """Meet a size by the rate; see `Fitted`."""
        return cls(min(0.997 * wanted.bits((EMBEDDING, *ROLES)), MOST_BITS), **wanted.text)

"""The method `rate`: integers with one step for the whole model, rounded with regard to code length, at any bit rate.

Rows and columns of each tensor are multiplied by factors so that all errors have equal weight (`importance`, `scales`).
The step is derived from the requested bits and a sample of the model (`step_size`). Weights are rounded to it
(`moepack.solvers.priced`), and an entropy coder stores the integers in about as many bytes as they carry information.
With a text, each layer gets the bits that result from this, and GPTQ with the code length as price decides where they
go (`layer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moepack.calibration import CalibrationRequest
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.dense import EMBEDDING, ROLES
from moepack.methods.base import Expected, Method, MethodPlan, Shape, Weights
from moepack.methods.fitting import Fitted, Wanted
from moepack.methods.mixins import Calibrates, PacksLinears
from moepack.methods.rate.coder import Coder, bound, expected
from moepack.methods.rate.importance import find_importance
from moepack.methods.rate.sample import take_sample
from moepack.methods.rate.settings import MOST_BITS, RateSettings
from moepack.methods.request import TEXT_SETTINGS, request_of
from moepack.progress import Progress
from moepack.solvers.priced import largest_at

__all__ = ["Rate"]

_ROLES = (EMBEDDING, *ROLES)


@dataclass
class Rate(RateSettings, Fitted, Calibrates, PacksLinears, Method):
    """The method with its settings."""

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
    def sequential(self) -> bool:
        """Whether there is a text, so that the experts of a layer share one bit budget."""
        return self.calibration is not None

    @property
    def looks_ahead(self) -> bool:
        """Always true: one step serves the whole model."""
        return True

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the size if every weight were an exception."""
        return bound(shape)

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
        found, largest = find_importance(checkpoint, model, request, progress), largest_at(self.bits_per_weight)
        even = dict.fromkeys(found.scales, 1.0)
        coder = Coder.of(self, take_sample(checkpoint, model, self._roles, even, found.scales, largest), found)
        ends = {
            linear.source for dense in model.dense for linear in dense.linears if linear.role in (EMBEDDING, "head")
        }
        return replace(coder, solved={name: shape for name, shape in coder.solved.items() if name not in ends})

    @classmethod
    def fitted(cls, wanted: Wanted) -> Rate:
        """Meet a size by the rate; see `Fitted`."""
        return cls(min(0.997 * wanted.bits((EMBEDDING, *ROLES)), MOST_BITS), **wanted.text)

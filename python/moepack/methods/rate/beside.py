"""Coded integers beside another method: tensors whose experts have bits of their own.

A packed tensor holds all experts of a projection in one format, whose width is that of all experts in every format but
the coded one. Experts of one tensor that differ in bits are therefore packed as coded integers, at one rate each, in
the same layer as the other method's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moepack.calibration import CalibrationRequest
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.errors import OverrideError
from moepack.methods.base import Method
from moepack.methods.mixins import requested
from moepack.methods.pinned import Pin
from moepack.methods.rate.importance import Importance, find_importance
from moepack.methods.rate.pinned import PinnedTensor, completed, whole
from moepack.methods.rate.settings import LEAST_BITS, MOST_BITS, RateSettings
from moepack.progress import Progress

__all__ = ["beside"]


@dataclass(frozen=True)
class _Beside:
    """Settings of the coded tensors of a job whose main method is another one (`moepack.methods.rate.pinned.Coding`).

    Attributes:
        method: the main method.
    """

    method: Method

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings, without the bits."""
        return {"codes": self._own.codes}

    @property
    def request(self) -> CalibrationRequest | None:
        """The calibration of the main method, because the model runs only once."""
        return requested(self.method)

    @property
    def _own(self) -> RateSettings:
        return RateSettings(MOST_BITS, calibration=None if self.request is None else self.request.source)

    def coding(
        self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None
    ) -> tuple[RateSettings, CalibrationRequest | None, Importance]:
        """Return settings, calibration and importance, which is not measured: no other tensor competes for bits."""
        importance = find_importance(checkpoint, whole(self.method, checkpoint, model), None, progress)
        return self._own, self.request, importance


def beside(method: Method, pins: Sequence[Pin]) -> dict[str, Method]:
    """Return a method for each tensor that is coded beside the main method `method`.

    Raises:
        OverrideError: some experts of a tensor have no bits, or bits are out of range.
    """
    for pin in pins:
        if None in pin.bits:
            raise OverrideError(
                "patterns give bits to only some of its experts; give them to the others, too, for example with `*=3` "
                "as the last pattern",
                tensor=pin.name,
            )
    main = _Beside(method)
    return {
        pin.name: PinnedTensor(pin, main) for pin in completed([*pins], 0.0, "rate", f"{LEAST_BITS:g} to {MOST_BITS:g}")
    }

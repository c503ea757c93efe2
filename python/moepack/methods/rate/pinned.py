"""Coded integers of one tensor at a given rate, or of its experts at one rate each.

Every such tensor has a plan of its own: its step is found on a sample of the tensor alone. If its experts have
different rates, the step of each rate is found on a sample of its experts. The factors of their rows (`scales`) are
then multiplied so that one step of the whole tensor gives each expert its rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from moepack.calibration import CalibrationRequest
from moepack.checkpoint import Checkpoint, MoeModel, describe
from moepack.checkpoint.dense import EMBEDDING, ROLES
from moepack.checkpoint.model import MoeLayer, Projection
from moepack.errors import OverrideError
from moepack.methods.base import Expected, Method, MethodPlan, Shape, Weights
from moepack.methods.mixins import Calibrates, PacksLinears
from moepack.methods.pinned import Pin, check_bits
from moepack.methods.rate.coder import Coder, bound, expected
from moepack.methods.rate.importance import Importance
from moepack.methods.rate.sample import take_sample
from moepack.methods.rate.scales import Scales
from moepack.methods.rate.settings import LEAST_BITS, MOST_BITS, RateSettings
from moepack.methods.rate.step_size import find_step
from moepack.progress import Progress
from moepack.solvers.priced import largest_at

__all__ = ["Coding", "PinnedTensor", "completed", "pinned_bytes", "pinned_tensors", "rest_of", "whole"]

_ROLES = frozenset((EMBEDDING, *ROLES))

RESERVED = 1.003
"""Expected size of a pinned tensor, relative to its bits: rates are met to within about this."""


class Coding(Protocol):
    """A method that codes tensors at rates."""

    def coding(
        self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None
    ) -> tuple[RateSettings, CalibrationRequest | None, Importance]:
        """Return the settings, the calibration and the importance that all its tensors share."""


class PinnedTensor(Calibrates, PacksLinears, Method):
    """Codes one tensor.

    Attributes:
        pin: the tensor and its bits, one number per expert.
        main: the method that codes the other tensors.
    """

    name: ClassVar[str] = "rate"

    def __init__(self, pin: Pin, main: Any) -> None:
        self.pin, self.main = pin, main

    @property
    def rates(self) -> tuple[float, ...]:
        """The bits per weight of each matrix."""
        return tuple(bits or 0.0 for bits in self.pin.bits)

    @property
    def mean(self) -> float:
        """The bits per weight of the tensor."""
        return sum(self.rates) / max(len(self.rates), 1)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the other tensors' method, and the bits."""
        return {**self.main.settings, "bits": list(self.rates)}

    @property
    def request(self) -> CalibrationRequest | None:
        """The calibration of the other tensors' method."""
        request: CalibrationRequest | None = self.main.request
        return request

    @property
    def dense_roles(self) -> frozenset[str]:
        """All roles."""
        return _ROLES

    @property
    def looks_ahead(self) -> bool:
        """True: the step is found on a sample."""
        return True

    @property
    def kernel(self) -> str:
        """Products of coded integers."""
        return "coded"

    def bound(self, shape: Shape, role: str = "experts") -> int:
        """Return the bytes to reserve; see `bound` of a coder."""
        return bound(shape, self.mean)

    def expected(self, weights: Weights) -> Expected:
        """Return the size at the given bits."""
        return expected(weights, self.mean)

    def plan(self, checkpoint: Checkpoint, model: MoeModel, progress: Progress | None = None) -> MethodPlan:
        """Find the step; raises as `Rate.plan`."""
        settings, request, importance = self.main.coding(checkpoint, model, progress)
        coder = self._coder(settings, importance, checkpoint, model)
        return MethodPlan(
            self, coder, checkpoint.fingerprint(), self.settings, request, decisions=coder.decisions,
            notes=importance.notes,
        )  # fmt: skip

    def _coder(self, settings: RateSettings, importance: Importance, checkpoint: Checkpoint, model: MoeModel) -> Coder:
        name, largest = self.pin.name, largest_at(max(self.rates))
        scales, measured = dict(importance.scales), importance.measured
        if self.pin.one is None:
            scales[name], measured = self._split(settings, scales[name], checkpoint, model), True
        sample = take_sample(checkpoint, model, _ROLES, {name: 1.0}, scales, largest, {name})
        metrics = {own: metric for own, metric in importance.metrics.items() if own == name}
        found = Importance(importance.values, {name: scales[name]}, measured, metrics)
        return Coder.of(replace(settings, bits_per_weight=self.mean), sample, found)

    def _split(self, settings: RateSettings, scales: Scales, checkpoint: Checkpoint, model: MoeModel) -> Scales:
        """Return the factors at which one step gives each expert its rate."""
        name, rows, steps = self.pin.name, scales.rows.clone(), dict[float, float]()
        for rate in sorted(set(self.rates)):
            experts = [number for number, own in enumerate(self.rates) if own == rate]
            part = model_of(model, name, experts)
            columns = scales.columns if len(scales.columns) == 1 else scales.columns[experts]
            own = {name: Scales(scales.rows[experts], columns)}
            sample = take_sample(checkpoint, part, frozenset(), {name: 1.0}, own, largest_at(rate))
            steps[rate] = find_step(sample, rate, settings.codes == "dependent").size
            rows[experts] *= next(iter(steps.values())) / steps[rate]
        return replace(scales, rows=rows)


def model_of(model: MoeModel, name: str, experts: list[int]) -> MoeModel:
    """Return a model with some experts of one projection."""

    def part(projection: Projection) -> Projection:
        parts = tuple(projection.parts[number] for number in experts)
        return replace(projection, shape=(len(experts), *projection.shape[1:]), parts=parts)

    def layers() -> Iterator[MoeLayer]:
        for layer in model.layers:
            for projection in layer.projections:
                if projection.packed_name == name:
                    yield replace(layer, projections=(part(projection),))

    return replace(model, layers=tuple(layers()), dense=())


def completed(pins: list[Pin], rest: float, method: str, in_words: str) -> list[Pin]:
    """Return pins with bits for all experts: `rest` for those that no pattern names.

    Raises:
        OverrideError: bits are out of range.
    """
    for pin in pins:
        if lost := [bits for bits in pin.bits if bits is not None and not LEAST_BITS <= bits <= MOST_BITS]:
            check_bits(lost[:1], (), method, in_words)
    if any(None in pin.bits for pin in pins) and not LEAST_BITS <= rest <= MOST_BITS:
        raise OverrideError(f"the bits by name leave {max(rest, 0):.2f} bits per weight for the other experts")
    return [replace(pin, bits=tuple(rest if bits is None else bits for bits in pin.bits)) for pin in pins]


def rest_of(pins: list[Pin], bits: float, weights: int) -> float:
    """Return the bits per weight that pinned matrices leave to the others out of `bits` for `weights` weights."""
    taken, count = 0.0, 0
    for pin in pins:
        own = [each for each in pin.bits if each is not None]
        one = pin.weights // max(len(pin.bits), 1)
        taken, count = taken + sum(own) * one, count + len(own) * one
    return (bits - taken) / (weights - count) if weights > count else 0.0


def pinned_bytes(method: Method) -> dict[str, float]:
    """Return the bytes that each pinned tensor may take, by name."""
    pins = pinned_tensors(method).items()
    return {name: RESERVED * own.pin.weights * own.mean / 8 for name, own in pins}


def pinned_tensors(method: Method) -> dict[str, PinnedTensor]:
    """Return the tensors of a method whose bits are given, by name."""
    found = {} if method.pinned is None else method.pinned.methods
    return {name: own for name, own in found.items() if isinstance(own, PinnedTensor)}


def whole(method: Method, checkpoint: Checkpoint, model: MoeModel) -> MoeModel:
    """Return the description with the tensors that stay unpacked, so that importance does not depend on them."""
    return model if method.pinned is None or not method.pinned.unpacked else describe(checkpoint)

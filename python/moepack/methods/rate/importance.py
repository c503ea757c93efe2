"""The importance of tensors: twice the loss increase in nats per token from a unit squared error.

The factors of rows and columns that equalize importance (`scales`) follow from the same measurement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moepack.arrays import is_finite
from moepack.calibration import CalibrationRequest
from moepack.calibration.fisher import Sensitivity, fisher, hindrance
from moepack.calibration.kept import KeptSensitivity
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.dense import EMBEDDING
from moepack.errors import InvalidTensorError, UnsupportedModelError
from moepack.methods.rate.sample import only
from moepack.methods.rate.scales import Scales, scales_of
from moepack.progress import Progress
from moepack.solvers.balance import Balance, Matrices, balance

__all__ = ["Importance", "find_importance", "role_of"]

LOST = {"experts": 1.5, "attention": 2.0, "shared": 0.4, "mlp": 1.0, "head": 3.0, "embedding": 4.5}
"""Twice the loss increase in nats per token from noise as strong as all tensors of a role, if the loss were quadratic.
The values were measured on texts (docs/methods/auto.md) and are similar for models of different shapes. They give the
importance if there is no text."""

SQUARE = math.pi / 2
"""Mean square of balanced weights, whose mean magnitude is 1, if they were Gaussian."""

ROWS = 256
"""Approximate number of rows from which the mean square of a matrix is estimated."""


_known: WeakKeyDictionary[Checkpoint, tuple[CalibrationRequest | None, MoeModel, Importance]] = WeakKeyDictionary()
"""The last result for each open checkpoint, because every plan of a job needs it."""


@dataclass(frozen=True)
class Importance:
    """The importance of each tensor's errors.

    Attributes:
        values: importance of a squared error of a weight, by the packed tensor's name.
        scales: factors that give scaled weights an importance of 1, by the packed tensor's name.
        measured: whether importance was measured on a text. Otherwise it is a guess from models that were trained for
            this project. On SmolLM2-135M, the guessed loss was 15 to 22 times too small
            (docs/methods/sensitivity.md).
        metrics: the metric of the rows of the embedding and the head, [C, C], by name, if it was measured.
        reason: why importance was not measured although there is a text, as a clause; otherwise empty.
    """

    values: dict[str, float]
    scales: dict[str, Scales]
    measured: bool
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    reason: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user if there is a text, but importance was not measured."""
        if not self.reason:
            return ()
        return (f"The importance of weights is estimated, not measured on the text: {self.reason}.",)


def find_importance(
    checkpoint: Checkpoint, model: MoeModel, request: CalibrationRequest | None, progress: Progress | None = None
) -> Importance:
    """Return the importance of all tensors, measured if there is a calibration set and the model can be measured.

    Raises:
        CalibrationError, NonFiniteError: the calibration set is unusable, or the model computes NaN or infinity.
    """
    known = _known.get(checkpoint)
    if known is None or known[:2] != (request, model):
        known = _known[checkpoint] = request, model, _found(checkpoint, model, request, progress)
    return known[2]


def _found(
    checkpoint: Checkpoint, model: MoeModel, request: CalibrationRequest | None, progress: Progress | None
) -> Importance:
    balances, found, reason = find_balances(model), dict[str, Sensitivity](), ""
    if request is not None:
        found, reason = _measured(checkpoint, model, balances, request, progress)
    prior = _prior(model)
    roles = role_of(model)
    alike, weights = Counter(roles[name] for name in balances), _weights(model)
    inputs: dict[str, Tensor] = {}
    for layer in model.layers:
        first = [part.packed_name for part in layer.projections[:-1] if part.packed_name in found]
        if len(first) > 1:
            inputs |= dict.fromkeys(first, torch.stack([found[name].columns.mean(0) for name in first]).sum(0))
    scales: dict[str, Scales] = {}
    for name, own in balances.items():
        if name in found:
            tokens = roles[name] in (EMBEDDING, "head")
            scales[name] = scales_of(own, found[name], inputs.get(name), tokens=tokens)
        else:
            scales[name] = scales_of(own, LOST[roles[name]] / alike[roles[name]] / SQUARE / max(weights[name], 1))
    values = prior | {name: _rounded(own.mean) for name, own in found.items() if own.mean > 0}
    metrics = {name: own.metric for name, own in found.items() if own.metric is not None}
    return Importance(values, scales, bool(found), metrics, reason)


def _measured(
    checkpoint: Checkpoint,
    model: MoeModel,
    balances: Mapping[str, Balance],
    request: CalibrationRequest,
    progress: Progress | None,
) -> tuple[dict[str, Sensitivity], str]:
    """Return the cached or newly measured sensitivity; if it cannot be measured, an empty dictionary and the reason.

    Tensors that the text does not reach, such as those of a vision tower, are missing from the result.
    """
    samples, device = request.load(checkpoint), request.settings.device
    kept = KeptSensitivity(checkpoint, samples)
    found = kept.read()
    if found and found.keys() <= balances.keys():
        return found, ""
    reason = hindrance(checkpoint, model, samples, device)
    if reason is not None:
        return {}, reason
    try:
        found = fisher(checkpoint, model, balances, samples, device, progress)
    except UnsupportedModelError as error:
        return {}, error.detail
    if not found:
        return {}, "other programs took the memory in the meantime"
    kept.write(found)
    return found, ""


def find_balances(model: MoeModel) -> dict[str, Balance]:
    """Balance all tensors that can be packed; the input projections of a layer's experts share column factors.

    Raises:
        InvalidTensorError: a weight is NaN or infinite.
    """
    found: dict[str, Balance] = {}
    for layer in model.layers:
        *first, last = layer.projections
        for parts in (first, [last]) if first else ([last],):
            balances = balance([Matrices(part.shape, part.expert) for part in parts])
            if not all(bool(own.rows.isfinite().all()) for own in balances):
                _refuse(
                    (piece.tensor, part.expert(expert)) for part in parts for expert, piece in enumerate(part.parts)
                )
            found |= {part.packed_name: own for part, own in zip(parts, balances, strict=True)}
    for linear in (linear for dense in model.dense for linear in dense.linears):
        (own,) = balance([Matrices((1, *linear.shape), only(linear))])
        if not bool(own.rows.isfinite().all()):
            _refuse([(linear.source, linear.matrix())])
        found[linear.source] = own
    return found


def _refuse(matrices: Iterable[tuple[str, Tensor]]) -> None:
    """Raise InvalidTensorError for the first matrix with a weight that is not finite."""
    for name, matrix in matrices:
        if not is_finite(matrix):
            raise InvalidTensorError("has NaN or infinite weights", tensor=name)


def role_of(model: MoeModel) -> dict[str, str]:
    """Return the role of every tensor that can be packed, by its name."""
    found = {part.packed_name: "experts" for layer in model.layers for part in layer.projections}
    return found | {linear.source: linear.role for dense in model.dense for linear in dense.linears}


def _prior(model: MoeModel) -> dict[str, float]:
    """Return the importance without a text: the tensors of a role contribute equally to its loss increase."""
    tensors = [
        (part.packed_name, "experts", math.prod(part.shape), part.expert(layer.experts // 2))
        for layer in model.layers
        for part in layer.projections
    ]
    for dense in model.dense:
        tensors += [(each.source, each.role, math.prod(each.shape), each.matrix()) for each in dense.linears]
    alike = Counter(role for _, role, _, _ in tensors)
    squares = {name: weights * _mean_square(matrix, name) for name, _, weights, matrix in tensors}
    return {name: LOST[role] / alike[role] / squares[name] if squares[name] else 1.0 for name, role, _, _ in tensors}


def _weights(model: MoeModel) -> dict[str, int]:
    """Return the number of weights of every tensor that can be packed, by its name."""
    found = {part.packed_name: math.prod(part.shape) for layer in model.layers for part in layer.projections}
    return found | {linear.source: math.prod(linear.shape) for dense in model.dense for linear in dense.linears}


def _mean_square(matrix: Tensor, name: str) -> float:
    """Return the mean square of evenly spaced rows.

    Raises:
        InvalidTensorError: a weight in these rows is not finite.
    """
    rows = matrix[:: max(1, len(matrix) // ROWS)].float()
    found = float(rows.square().mean(dtype=torch.float64)) if rows.numel() else 0.0
    if not math.isfinite(found):
        raise InvalidTensorError("has NaN or infinite weights", tensor=name)
    return found


def _rounded(value: float) -> float:
    """Round to a quarter of an octave, because the last bits of sums depend on the number of threads.

    The measurement is less precise than that.
    """
    return float(2.0 ** (round(4 * math.log2(value)) / 4))

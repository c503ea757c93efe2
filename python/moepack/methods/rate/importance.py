"""What errors of weights count: twice the nats a token that a squared error costs, and the scales that follow."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.arrays import is_finite
from moepack.calibration import CalibrationRequest
from moepack.calibration.fisher import Sensitivity, fisher
from moepack.calibration.kept import KeptSensitivity
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.dense import EMBEDDING
from moepack.errors import InvalidTensorError
from moepack.methods.rate.sample import only
from moepack.methods.rate.scales import Scales, scales_of
from moepack.progress import Progress
from moepack.solvers.balance import Balance, Matrices, balance

__all__ = ["Importance", "find_importance", "role_of"]

LOST = {"experts": 1.5, "attention": 2.0, "shared": 0.4, "mlp": 1.0, "head": 3.0, "embedding": 4.5}
"""Nats, times two, that a model would lose by noise as strong as all tensors of a role, were the loss a parabola: what
texts gave (docs/methods/auto.md), alike for models of unlike shapes. It tells importance where there is no text."""

SQUARE = math.pi / 2
"""The mean square of balanced weights, whose mean magnitude is 1, were they Gaussian."""

ROWS = 256
"""Rows of a matrix, about, that tell its mean square."""


@dataclass(frozen=True)
class Importance:
    """What an error of each tensor counts.

    Attributes:
        values: by the packed tensor's name, of its weights.
        scales: by the packed tensor's name, factors with which its weights count 1.
        measured: whether a text told it. Without one it is a guess from models that were trained for this project,
            which promised 15 to 22 times too little on SmolLM2-135M (docs/methods/sensitivity.md).
    """

    values: dict[str, float]
    scales: dict[str, Scales]
    measured: bool


def find_importance(
    checkpoint: Checkpoint, model: MoeModel, request: CalibrationRequest | None, progress: Progress | None = None
) -> Importance:
    """Measure what errors count, on the calibration set where there is one and the model fits into memory.

    Raises:
        CalibrationError: the calibration set is unusable.
    """
    balances, found = find_balances(model), None
    if request is not None:
        found = _measured(checkpoint, model, balances, request, progress)
    prior, roles, known = _prior(model), role_of(model), found or {}
    alike = Counter(roles[name] for name in balances)
    counts = {name: LOST[roles[name]] / alike[roles[name]] / SQUARE / max(weights, 1)
              for name, weights in _weights(model).items()}  # fmt: skip
    inputs: dict[str, Tensor] = {}
    for layer in model.layers:
        first = [part.packed_name for part in layer.projections[:-1]]
        if len(first) > 1 and known.keys() >= set(first):
            inputs |= dict.fromkeys(first, torch.stack([known[name].columns.mean(0) for name in first]).sum(0))
    # Where no token of the text came by, as in experts of a vision tower, the guess serves.
    scales = {
        name: scales_of(own, known.get(name, counts[name]), inputs.get(name), tokens=roles[name] in (EMBEDDING, "head"))
        for name, own in balances.items()
    }
    values = prior | {name: _rounded(own.mean) for name, own in known.items() if own.mean > 0}
    return Importance(values, scales, measured=found is not None)


def _measured(
    checkpoint: Checkpoint,
    model: MoeModel,
    balances: Mapping[str, Balance],
    request: CalibrationRequest,
    progress: Progress | None,
) -> dict[str, Sensitivity] | None:
    """What was kept of the same model and text, or what is measured now."""
    samples = request.load(checkpoint)
    kept = KeptSensitivity(checkpoint, samples)
    found = kept.read()
    if found is None or not found.keys() <= balances.keys():
        found = fisher(checkpoint, model, balances, samples, request.settings.device, progress)
        if found is not None:
            kept.write(found)
    return found


def find_balances(model: MoeModel) -> dict[str, Balance]:
    """Balance all tensors that can be packed; first projections of the experts share the factors of columns.

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
    """The role of every tensor that can be packed, by its name."""
    found = {part.packed_name: "experts" for layer in model.layers for part in layer.projections}
    return found | {linear.source: linear.role for dense in model.dense for linear in dense.linears}


def _prior(model: MoeModel) -> dict[str, float]:
    """Tensors of a role share what is lost by it evenly."""
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
    """How many weights each tensor has that can be packed."""
    found = {part.packed_name: math.prod(part.shape) for layer in model.layers for part in layer.projections}
    return found | {linear.source: math.prod(linear.shape) for dense in model.dense for linear in dense.linears}


def _mean_square(matrix: Tensor, name: str) -> float:
    """The mean square of some rows at even distances; InvalidTensorError if a weight of theirs is not finite."""
    rows = matrix[:: max(1, len(matrix) // ROWS)].float()
    found = float(rows.square().mean(dtype=torch.float64)) if rows.numel() else 0.0
    if not math.isfinite(found):
        raise InvalidTensorError("has NaN or infinite weights", tensor=name)
    return found


def _rounded(value: float) -> float:
    """To a quarter of an octave, finer than it is known: the last bits of sums depend on the number of threads."""
    return float(2.0 ** (round(4 * math.log2(value)) / 4))

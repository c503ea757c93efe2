"""What an error of each tensor counts: a squared error of a weight, in half nats a token where a text tells."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from moepack.allocation.importance import visits
from moepack.calibration import CalibrationRequest
from moepack.calibration.fisher import fisher
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.architectures import described

__all__ = ["Importance", "find_importance"]

PRIOR = {"attention": 8.0, "mlp": 2.0, "shared": 1.5, "head": 3.0, "embeddings": 3.0}
"""What a weight outside the experts counts where no text tells, over one of an expert that every token visits: the
means that texts gave (docs/methods/auto.md)."""

EXPERTS_LOST = 1.5
"""Nats, times two, that a model would lose by noise as strong as its experts, were the loss a parabola: 1.4 to 1.6."""


@dataclass(frozen=True)
class Importance:
    """What an error of each tensor counts.

    Attributes:
        values: by the packed tensor's name.
        experts: those of them that are experts.
        measured: whether a text said so; otherwise they are right to a factor that all share.
    """

    values: dict[str, float]
    experts: frozenset[str]
    measured: bool

    def loss(self, errors: Iterable[tuple[str, float, float]]) -> float:
        """Nats a token that a model loses by errors: by tensor, squared errors and squares, both times importance."""
        lost, whole = 0.0, 0.0
        for name, error, squares in errors:
            lost += error
            whole += squares if name in self.experts else 0.0
        return 0.5 * lost * (1.0 if self.measured else EXPERTS_LOST / (whole or 1.0))


def find_importance(checkpoint: Checkpoint, model: MoeModel, request: CalibrationRequest | None) -> Importance:
    """Measure what errors count, on the calibration set where there is one and the model fits into memory.

    Raises:
        CalibrationError: the calibration set is unusable.
    """
    found = None
    if request is not None:
        found = fisher(checkpoint, model, request.load(checkpoint), request.settings.device)
    values = _prior(checkpoint, model)
    experts = frozenset(part.packed_name for layer in model.layers for part in layer.projections)
    if found is None:
        return Importance(values, experts, measured=False)
    least = min(filter(None, found.values()), default=1.0)
    return Importance({name: _rounded(found.get(name) or least) for name in values}, experts, measured=True)


def _prior(checkpoint: Checkpoint, model: MoeModel) -> dict[str, float]:
    chosen = described(model.architecture).top_k(checkpoint.config)
    values = {part.packed_name: visits(chosen, layer.experts) for layer in model.layers for part in layer.projections}
    return values | {linear.source: PRIOR[linear.role] for dense in model.dense for linear in dense.linears}


def _rounded(value: float) -> float:
    """To a quarter of an octave, finer than it is known: the last bits of sums depend on the number of threads."""
    return float(2.0 ** (round(4 * math.log2(value)) / 4))

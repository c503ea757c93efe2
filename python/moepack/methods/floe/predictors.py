"""Fits predictors of a layer's experts from the inputs of the previous expert layer (FloE, section 3.3.1).

Three maps are compared: the layer's router, the linear map that fits its choices best, and the sum of that map and a
two-layer network. They are trained on the first seven eighths of the calibration text. The one with the best recall on
the last eighth is kept; if recalls are close, the simpler one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moepack.stores.streaming.prediction import Predictor

__all__ = ["HELD_OUT", "Pair", "fitted", "recalled"]

HELD_OUT = 8
"""One in this many tokens is held out."""

LEARNT = 16_384
"""Maximum number of training tokens."""

WIDTH, STEPS, BATCH, RATE = 256, 400, 512, 3e-3
"""The network: maximum number of neurons, Adam steps, tokens per step, and learning rate."""

GAIN = 0.005
"""Minimum improvement of recall for which a map replaces a simpler one."""


@dataclass(frozen=True)
class Pair:
    """Tokens in two consecutive expert layers.

    Attributes:
        inputs: inputs of the experts of the first layer, [T, H].
        chosen: chosen experts of the second layer, [T, k]; -1 is none.
        logits: router logits of the second layer, [T, E]; None if its router is not a plain matrix.
    """

    inputs: Tensor
    chosen: Tensor
    logits: Tensor | None = None

    def split(self) -> tuple["Pair", "Pair"]:
        """Return the training tokens, at most `LEARNT`, and the held-out tokens."""
        first = len(self.inputs) - len(self.inputs) // HELD_OUT
        step = -(-first // LEARNT) or 1
        return self._part(slice(0, first, step)), self._part(slice(first, None))

    def _part(self, tokens: slice) -> "Pair":
        logits = None if self.logits is None else self.logits[tokens]
        return Pair(self.inputs[tokens], self.chosen[tokens], logits)

    def targets(self, experts: int) -> Tensor:
        """Return the choices as a distribution per token, [T, E]."""
        marks = torch.zeros(len(self.chosen), experts + 1)
        marks.scatter_(1, torch.where(self.chosen < 0, experts, self.chosen).long(), 1.0)
        return marks[:, :experts] / marks[:, :experts].sum(1, keepdim=True).clamp(min=1)


def recalled(predictor: Predictor, pair: Pair) -> float:
    """Return the share of the chosen experts that are among the k likeliest.

    As many experts are predicted as are chosen, so recall equals precision.
    """
    guess = predictor.logits(pair.inputs).topk(pair.chosen.shape[1], dim=1).indices
    found = (pair.chosen[:, :, None] == guess[:, None, :]).any(2) & (pair.chosen >= 0)
    return float(found.sum() / (pair.chosen >= 0).sum().clamp(min=1))


def fitted(pair: Pair, router: Tensor | None, experts: int) -> tuple[Predictor, str, float]:
    """Return the predictor with the best recall on the held-out tokens, its kind, and that recall.

    Args:
        pair: tokens in the order of the text.
        router: router weights of the second layer, [E, H]; None if the router is not a plain matrix.
        experts: number of experts of the second layer.
    """
    learnt, held = pair.split()
    tried = {} if router is None else {"router": Predictor(router.float())}
    tried["linear"] = _linear(learnt, experts)
    tried["network"] = _network(learnt, tried["linear"], experts)
    best, *others = tried
    recalls = {name: recalled(predictor, held) for name, predictor in tried.items()}
    for name in others:
        best = name if recalls[name] > recalls[best] + GAIN else best
    return tried[best], best, recalls[best]


def _linear(pair: Pair, experts: int) -> Predictor:
    """Fit the router logits of the second layer, or its choices if there are none, by damped least squares."""
    x = pair.inputs.float()
    gram = x.T @ x
    gram.diagonal().add_(1e-3 * gram.diagonal().mean() + 1e-12)
    wanted = pair.targets(experts) if pair.logits is None else pair.logits
    wanted = wanted - wanted.mean(1, keepdim=True)
    return Predictor(torch.linalg.solve(gram, x.T @ wanted).T.contiguous())


@torch.enable_grad()
def _network(pair: Pair, start: Predictor, experts: int) -> Predictor:
    """Train the sum of a network and a linear map on the cross-entropy of the choices; deterministic."""
    random = torch.Generator().manual_seed(0)
    columns, width = start.direct.shape[1], min(WIDTH, 16 * experts)
    scale = 1 / start.logits(pair.inputs).std().clamp(min=1e-6)
    spread = pair.inputs.float().square().mean().sqrt().clamp(min=1e-6)
    inner = torch.randn(width, columns, generator=random) / (columns**0.5 * spread)
    parts = [start.direct * scale, inner, torch.zeros(experts, width)]
    parts = [part.detach().clone().requires_grad_() for part in parts]
    adam = torch.optim.Adam(parts, RATE)
    targets = pair.targets(experts)
    for _ in range(STEPS if len(pair.inputs) else 0):
        rows = torch.randint(len(pair.inputs), (BATCH,), generator=random)
        logits = Predictor(*parts).logits(pair.inputs[rows])
        adam.zero_grad()
        functional.cross_entropy(logits, targets[rows]).backward()  # type: ignore[no-untyped-call]
        adam.step()
    return Predictor(*(part.detach() for part in parts))

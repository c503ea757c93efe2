"""Fitting what guesses the experts of a layer from what enters the experts of the layer before (FloE, section 3.3.1).

Three maps are tried: the layer's own router, the linear map that fits its choices best, and that map with two layers of
a network beside it. Each learns from seven eighths of the calibration text; on the last eighth, which lies behind them,
the one with the best recall is kept, the simpler of equal ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moepack.runtime.prediction import Predictor

__all__ = ["HELD_OUT", "Pair", "fitted", "recalled"]

HELD_OUT = 8
"""One token in so many is not learnt from."""

LEARNT = 16_384
"""The most tokens that are learnt from."""

WIDTH, STEPS, BATCH, RATE = 256, 400, 512, 3e-3
"""The network: neurons, at most, steps of Adam, tokens a step, and its learning rate."""

GAIN = 0.005
"""What a fitted map must recall more than the simpler one before it to be kept instead."""


@dataclass(frozen=True)
class Pair:
    """Tokens as one layer and the next see them.

    Attributes:
        inputs: what enters the experts of the first, [T, H].
        chosen: the experts of the next, [T, k]; -1 is none.
        logits: of the next one's router, [T, E]; None where it is no plain matrix.
    """

    inputs: Tensor
    chosen: Tensor
    logits: Tensor | None = None

    def split(self) -> tuple["Pair", "Pair"]:
        """Tokens to learn from, at most `LEARNT`, and those that are held out."""
        first = len(self.inputs) - len(self.inputs) // HELD_OUT
        step = -(-first // LEARNT) or 1
        return self._part(slice(0, first, step)), self._part(slice(first, None))

    def _part(self, tokens: slice) -> "Pair":
        logits = None if self.logits is None else self.logits[tokens]
        return Pair(self.inputs[tokens], self.chosen[tokens], logits)

    def targets(self, experts: int) -> Tensor:
        """The choices as shares of each token, [T, E]."""
        marks = torch.zeros(len(self.chosen), experts + 1)
        marks.scatter_(1, torch.where(self.chosen < 0, experts, self.chosen).long(), 1.0)
        return marks[:, :experts] / marks[:, :experts].sum(1, keepdim=True).clamp(min=1)


def recalled(predictor: Predictor, pair: Pair) -> float:
    """The share of the chosen experts that are among as many likeliest ones; as many are guessed, so precision, too."""
    guess = predictor.logits(pair.inputs).topk(pair.chosen.shape[1], dim=1).indices
    found = (pair.chosen[:, :, None] == guess[:, None, :]).any(2) & (pair.chosen >= 0)
    return float(found.sum() / (pair.chosen >= 0).sum().clamp(min=1))


def fitted(pair: Pair, router: Tensor | None, experts: int) -> tuple[Predictor, str, float]:
    """Return the predictor that recalls most of the tokens held out, what it is, and its recall there.

    Args:
        pair: in the order of the text.
        router: the next layer's, [E, H]; None where it is no plain matrix.
        experts: how many the next layer has.
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
    """The damped least squares: fits the next router's logits, or the choices where there are none."""
    x = pair.inputs.float()
    gram = x.T @ x
    gram.diagonal().add_(1e-3 * gram.diagonal().mean() + 1e-12)
    wanted = pair.targets(experts) if pair.logits is None else pair.logits
    wanted = wanted - wanted.mean(1, keepdim=True)
    return Predictor(torch.linalg.solve(gram, x.T @ wanted).T.contiguous())


@torch.enable_grad()
def _network(pair: Pair, start: Predictor, experts: int) -> Predictor:
    """A network beside a linear map, both trained for the cross entropy of the choices; the same for the same pair."""
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

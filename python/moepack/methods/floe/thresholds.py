"""The thresholds of a model, on a calibration text.

What is compared with a threshold is |x W_up| under the quantized up projection (FloE, equation 6), or, with one
threshold for all experts of a layer, |silu(x W_gate) * x W_up| under both, times the router's weight.

The model runs block by block with quantized up projections in place of the original ones, nothing skipped. Thresholds
come from seven eighths of each expert's tokens; the last eighth, which lies behind them in the text, tells what they
skip of a text that they were not chosen on.

On the way, predictors are fitted: what enters one layer of experts tells what the next one will want.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moepack.calibration import Calibrator, LayerRun, Samples
from moepack.calibration.settings import CalibrationSettings
from moepack.calibration.stage import Stage
from moepack.checkpoint import Checkpoint, MoeLayer, MoeModel
from moepack.methods.floe.channels import GATE, UP
from moepack.methods.floe.predictors import HELD_OUT, Pair, fitted
from moepack.methods.floe.quantiles import Quantiles
from moepack.runtime.prediction import Predictor

__all__ = ["Decision", "Quantized", "decide"]

Quantized = Callable[[str, int, Tensor], Tensor]
"""The values [R, C] that the packed tensor of a name will have of an expert's matrix, from its weights."""


@dataclass(frozen=True)
class Decision:
    """What was decided for a layer.

    Attributes:
        thresholds: one an expert.
        tokens: how many of the calibration set each expert saw.
        pooled: experts without tokens, whose threshold is that of all experts of the layer together.
        predicted: the share of channels that each expert skips for the tokens that thresholds come from; None without.
        achieved: the same of the tokens that were held out.
        order: [E, I], the channels of each expert as they are stored, those that most tokens want first, so
            that what tokens want lies together; None as they come.
        predictor: guesses the experts from what enters the layer before; None of the first layer.
        recall: what guesses that, and what it recalls of the experts and of the channels of tokens held out.
    """

    thresholds: tuple[float, ...]
    tokens: tuple[int, ...]
    pooled: tuple[int, ...]
    predicted: tuple[float | None, ...]
    achieved: tuple[float | None, ...]
    order: Tensor | None = None
    predictor: Predictor | None = None
    recall: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def dense(cls, experts: int) -> "Decision":
        """Skip nothing."""
        return cls((0.0,) * experts, (), (), (0.0,) * experts, (0.0,) * experts)

    def details(self) -> dict[str, Any]:
        """What a manifest says of it."""
        found: dict[str, Any] = {
            "thresholds": [threshold if threshold < float("inf") else "infinity" for threshold in self.thresholds],
            "predicted_sparsity": [*map(_digits, self.predicted)],
            "achieved_sparsity": [*map(_digits, self.achieved)],
        }
        found |= {"recall": dict(self.recall)} if self.recall else {}
        return found | ({"tokens": [*self.tokens], "pooled": [*self.pooled]} if self.tokens else {})


def decide(
    checkpoint: Checkpoint,
    model: MoeModel,
    samples: Samples,
    settings: CalibrationSettings,
    quantized: Quantized,
    shares: Mapping[str, float],
    routed: bool = False,
) -> dict[str, Decision]:
    """Find the thresholds of all layers.

    Args:
        checkpoint: the original.
        model: its description, with gate, up and down projections.
        samples: the calibration set.
        settings: how the model runs.
        quantized: what deciding projections become.
        shares: the share of channels to be skipped, by layer; a layer with 0 is only passed.
        routed: decide by gate, up and the router's weight, with one threshold a layer, instead of by up.

    Raises:
        CalibrationError: the model computes NaN or infinity.
        InvalidTensorError: a weight is NaN or infinite.
        DeviceMemoryError: the device is too small.
    """
    found: dict[str, Decision] = {}
    before: Tensor | None = None
    for run in Calibrator(checkpoint, model, samples, settings).layers():
        rows = run.rows()
        assert rows is not None and isinstance(run.layer, MoeLayer)
        pair = _pair(before, *rows, _router(checkpoint, run.layer, rows[0].shape[1]))
        before = rows[0].clone()
        found[run.layer.name] = _layer(run, quantized, shares[run.layer.name], routed, pair)
    return found


def _router(checkpoint: Checkpoint, layer: MoeLayer, columns: int) -> Tensor | None:
    """The weights [E, H] of a layer's router, where it is a plain matrix."""
    shapes = {name: checkpoint.info(name).shape for name in layer.router}
    name = next((name for name, shape in shapes.items() if tuple(shape) == (layer.experts, columns)), None)
    return None if name is None else checkpoint.tensor(name).float()


def _pair(before: Tensor | None, x: Tensor, chosen: Tensor, router: Tensor | None) -> tuple[Pair, Tensor | None] | None:
    """What is known of the tokens of a layer from the one before, and its router; None where nothing is."""
    if before is None or before.shape != x.shape or len(x) < HELD_OUT:
        return None
    return Pair(before, chosen, None if router is None else x.float() @ router.T), router


@torch.no_grad()
def _layer(
    run: LayerRun, quantized: Quantized, share: float, routed: bool, pair: tuple[Pair, Tensor | None] | None
) -> Decision:
    experts = run.tensors[UP].shape[0]
    seen, held, channels = Quantiles(experts), Quantiles(experts), _Recall(share, pair)
    wanted = torch.zeros(run.tensors[UP].shape[:2], dtype=torch.int64)
    for stage in run:
        with run.smaller_groups():
            values = dict(stage.finite().weights)
            if UP in values:
                coarse = {
                    name: _coarse(quantized, run.tensors[name].name, stage.experts, values[name])
                    for name in ((GATE, UP) if routed else (UP,))
                }
                values[UP] = coarse[UP]
                for position, expert in enumerate(stage.experts if share > 0 else ()):
                    # What a larger group left, for which memory was too small.
                    seen.counts[expert], held.counts[expert], wanted[expert] = 0, 0, 0
                    channels.look(stage, coarse, position)
                    for sizes in _sizes(stage, coarse, position):
                        wanted[expert] += _largest(sizes.float().abs(), share)
                        last = len(sizes) - len(sizes) // HELD_OUT
                        seen.add(expert, sizes[:last])
                        held.add(expert, sizes[last:])
            run.answer(values)
    decision = Decision.dense(experts)
    if share > 0:
        assert run.tokens is not None
        order = wanted.argsort(dim=1, descending=True, stable=True)
        decision = replace(_decision(seen, held, share, run.tokens, routed), order=order)
    if pair is None:
        return decision
    predictor, name, recall = fitted(*pair, experts)
    recalls = {"by": name, "experts": round(recall, 4), "channels": _digits(channels.share)}
    return replace(decision, predictor=None if name == "router" else predictor, recall=recalls)


def _coarse(quantized: Quantized, name: str, experts: Iterable[int], matrices: Tensor) -> Tensor:
    """The values [G, R, C] that the packed tensor `name` will have of the matrices of some experts."""
    return torch.stack([quantized(name, *pair) for pair in zip(experts, matrices, strict=True)])


class _Recall:
    """How many of the channels that tokens held out want are among as many that are guessed from the layer before."""

    def __init__(self, share: float, pair: tuple[Pair, Tensor | None] | None) -> None:
        self._skipped, self._before = share, None if pair is None else pair[0].inputs
        self._right: dict[int, tuple[int, int]] = {}

    @property
    def share(self) -> float | None:
        """The share that was right; None where nothing was guessed."""
        right, wanted = (sum(pair[at] for pair in self._right.values()) for at in (0, 1))
        return right / wanted if wanted else None

    def look(self, stage: Stage, coarse: Mapping[str, Tensor], position: int) -> None:
        """Compare for an expert; a second look at it replaces the first."""
        if self._before is None or self._skipped >= 1:
            return
        assert stage.inputs is not None
        right = wanted = 0
        pieces = zip(
            stage.inputs.rows(position), stage.inputs.pieces(position), stage.inputs.weights(position), strict=True
        )
        for rows, x, weights in pieces:
            last = len(self._before) - len(self._before) // HELD_OUT
            held = rows >= last
            if not bool(held.any()):
                continue
            guess = self._before[rows[held].to(self._before.device)].to(x)
            x, weights = x[held.to(x.device)], weights[held.to(weights.device)]
            true, guessed = (
                _wanted(_judged(each, coarse, position, weights).float().abs(), self._skipped) for each in (x, guess)
            )
            right, wanted = right + int((true & guessed).sum()), wanted + int(true.sum())
        self._right[stage.experts[position]] = right, wanted


def _largest(sizes: Tensor, share: float) -> Tensor:
    """How often each channel is among the largest sizes [n, I] behind a share of them all, [I] int64 on the CPU."""
    return _wanted(sizes, share).sum(0).cpu()


def _wanted(sizes: Tensor, share: float) -> Tensor:
    """Which sizes [n, I] are the largest behind a share of them all."""
    if not len(sizes):
        return torch.zeros(sizes.shape, dtype=torch.bool)
    rank = min(max(1, round(share * sizes.numel())), sizes.numel())
    return sizes >= sizes.flatten().kthvalue(rank).values


def _sizes(stage: Stage, coarse: Mapping[str, Tensor], position: int) -> Iterator[Tensor]:
    """What an expert's channels are judged by, [n, I], token piece by token piece."""
    assert stage.inputs is not None
    pieces, weights = stage.inputs.pieces(position), stage.inputs.weights(position)
    yield from (_judged(x, coarse, position, own) for x, own in zip(pieces, weights, strict=True))


def _judged(x: Tensor, coarse: Mapping[str, Tensor], position: int, weights: Tensor) -> Tensor:
    """What an expert's channels are judged by for tokens [n, H] with router weights [n]: [n, I]."""
    up = x @ coarse[UP][position].to(x.dtype).T
    if GATE not in coarse:
        return up
    return functional.silu(x @ coarse[GATE][position].to(x.dtype).T) * up * weights.to(up)[:, None]


def _decision(seen: Quantiles, held: Quantiles, share: float, tokens: Tensor, routed: bool) -> Decision:
    pool = seen.threshold(share)
    visited = [bool(total) for total in seen.total.tolist()]
    own = [any_ and not routed for any_ in visited]
    thresholds = tuple(seen.threshold(share, expert) if alone else pool for expert, alone in enumerate(own))
    return Decision(
        thresholds,
        tuple(tokens.tolist()),
        tuple(expert for expert, any_ in enumerate(visited) if not any_ and not routed),
        tuple(map(seen.below, range(len(visited)), thresholds)),
        tuple(map(held.below, range(len(visited)), thresholds)),
    )


def _digits(value: float | None) -> float | None:
    return None if value is None else round(value, 5)

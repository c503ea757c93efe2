"""Determines the thresholds of a model on a calibration text.

The score that is compared with a threshold is |x W_up| with the quantized up projection (FloE, equation 6). Its rows
are first multiplied by factors, and the columns of the down projection divided by them, so that equal scores mean equal
outputs on average: a factor is the root mean square of the channel's silu(x W_gate) times the norm of its column of the
down projection. Otherwise the scores would depend on how a checkpoint scales its channels. On SmolLM2-135M, skipping
80 % of the channels leaves a relative error of a layer's output of 0.41 with factors, 0.51 without, and 0.56 if all
columns have equal magnitudes.

If all experts of a layer share one threshold, the score is |silu(x W_gate) * x W_up| with both quantized projections,
times the router weight, and there are no factors.

The model runs block by block with quantized instead of original up projections, and skips no channels. Thresholds come
from the first seven eighths of each expert's tokens. The last eighth measures how much they skip on unseen text.

The same run fits predictors, which predict the needs of a layer from the inputs of the previous expert layer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moepack.calibration import Calibrator, LayerRun, Samples
from moepack.calibration.settings import CalibrationSettings
from moepack.calibration.stage import Stage, Weights
from moepack.checkpoint import Checkpoint, MoeLayer, MoeModel
from moepack.methods.floe.channels import DOWN, GATE, UP
from moepack.methods.floe.predictors import HELD_OUT, Pair, fitted
from moepack.methods.floe.quantiles import Quantiles
from moepack.stores.streaming.prediction import Predictor

__all__ = ["Decision", "Quantized", "decide"]

Quantized = Callable[[str, int, Tensor], Tensor]
"""Returns the packed values [R, C] of an expert's matrix, from the packed tensor's name, the expert and the weights."""


WIDEST = 256.0
"""Largest factor of a channel, and the inverse of the smallest: scales of packed rows have 16 bits."""


@dataclass(frozen=True)
class Decision:
    """The decision for one layer.

    Attributes:
        thresholds: one threshold per expert.
        tokens: number of calibration tokens of each expert.
        pooled: experts without tokens, which use the threshold of the whole layer.
        predicted: share of channels that each expert skips on the tokens that determined the thresholds; None without
            tokens.
        achieved: the same share on the held-out tokens.
        order: [E, I], storage order of the channels of each expert; the most frequently needed channels come first, so
            that they are adjacent. None keeps the original order.
        factors: [E, I] float32 in the original order, by which rows of the up projection are multiplied and columns of
            the down projection divided. None changes nothing.
        predictor: predicts the experts from the inputs of the previous layer; None for the first layer, or if the
            layer's router predicts best.
        recall: the kind of the predictor, and its recall of experts and channels on the held-out tokens.
    """

    thresholds: tuple[float, ...]
    tokens: tuple[int, ...]
    pooled: tuple[int, ...]
    predicted: tuple[float | None, ...]
    achieved: tuple[float | None, ...]
    order: Tensor | None = None
    factors: Tensor | None = None
    predictor: Predictor | None = None
    recall: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def dense(cls, experts: int) -> "Decision":
        """Return a decision that skips nothing."""
        return cls((0.0,) * experts, (), (), (0.0,) * experts, (0.0,) * experts)

    def details(self) -> dict[str, Any]:
        """Return the details for the manifest, as JSON values."""
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
        checkpoint: the original checkpoint.
        model: its description, with gate, up and down projections.
        samples: the calibration set.
        settings: settings of the calibration run.
        quantized: quantizes the projections that decide.
        shares: share of channels to skip, by layer; a layer with 0 skips none.
        routed: decide by gate, up and router weight, with one threshold per layer, instead of by up alone.

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
    """Return the weights [E, H] of a layer's router; None if the router is not a plain matrix."""
    shapes = {name: checkpoint.info(name).shape for name in layer.router}
    name = next((name for name, shape in shapes.items() if tuple(shape) == (layer.experts, columns)), None)
    return None if name is None else checkpoint.tensor(name).float()


def _pair(before: Tensor | None, x: Tensor, chosen: Tensor, router: Tensor | None) -> tuple[Pair, Tensor | None] | None:
    """Return the tokens of a layer with their inputs in the previous layer, and its router; None if unavailable."""
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
    factors = torch.ones(run.tensors[UP].shape[:2])
    for stage in run:
        with run.smaller_groups():
            values = dict(stage.finite().weights)
            if UP in values:
                coarse = {
                    name: _coarse(quantized, run.tensors[name].name, stage.experts, values[name])
                    for name in ((GATE, UP) if routed else (UP,))
                }
                values[UP] = coarse[UP]
                if share > 0 and not routed:
                    factors[list(stage.experts)] = _factors(stage, values[GATE], run.tensors[DOWN])
                    coarse = {UP: coarse[UP] * factors[list(stage.experts), :, None].to(coarse[UP])}
                for position, expert in enumerate(stage.experts if share > 0 else ()):
                    # Discard the counts of a larger group that ran out of memory.
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
        decision = _decision(seen, held, share, run.tokens, routed)
        decision = replace(decision, order=order, factors=None if routed else factors)
    if pair is None:
        return decision
    predictor, name, recall = fitted(*pair, experts)
    recalls = {"by": name, "experts": round(recall, 4), "channels": _digits(channels.share)}
    return replace(decision, predictor=None if name == "router" else predictor, recall=recalls)


def _factors(stage: Stage, gates: Tensor, down: Weights) -> Tensor:
    """Return the factors [G, I] of the channels of a stage's experts; 1 for channels and experts without outputs."""
    assert stage.inputs is not None
    found = []
    for position, expert in enumerate(stage.experts):
        gate, squares, count = gates[position], torch.zeros(()), 0
        for x in stage.inputs.pieces(position):
            squares = squares + functional.silu(x @ gate.to(x.dtype).T).float().square().sum(0).cpu()
            count += len(x)
        sizes = squares.sqrt() * down.expert(expert).float().norm(dim=0) / max(count, 1) ** 0.5
        reached = sizes.isfinite() & (sizes > 0)  # damaged weights are reported when they are packed
        mean = sizes[reached].log().mean().exp() if bool(reached.any()) else 1.0
        factors = (sizes / mean).clamp(1 / WIDEST, WIDEST)
        found.append(torch.where(reached, factors, 1.0) if squares.ndim else torch.ones(len(gate)))
    return torch.stack(found)


def _coarse(quantized: Quantized, name: str, experts: Iterable[int], matrices: Tensor) -> Tensor:
    """Return the packed values [G, R, C] of the tensor `name` for some experts."""
    return torch.stack([quantized(name, *pair) for pair in zip(experts, matrices, strict=True)])


class _Recall:
    """Recall of the channels that held-out tokens need, predicted from the inputs of the previous layer."""

    def __init__(self, share: float, pair: tuple[Pair, Tensor | None] | None) -> None:
        self._skipped, self._before = share, None if pair is None else pair[0].inputs
        self._right: dict[int, tuple[int, int]] = {}

    @property
    def share(self) -> float | None:
        """Share of needed channels that were predicted; None if nothing was predicted."""
        right, wanted = (sum(pair[at] for pair in self._right.values()) for at in (0, 1))
        return right / wanted if wanted else None

    def look(self, stage: Stage, coarse: Mapping[str, Tensor], position: int) -> None:
        """Measure one expert; a second call for an expert replaces the first."""
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
    """Count how often each channel is among the largest sizes [n, I], all but `share` of them; [I] int64 on the CPU."""
    return _wanted(sizes, share).sum(0).cpu()


def _wanted(sizes: Tensor, share: float) -> Tensor:
    """Return a mask of the largest sizes [n, I], all but `share` of them."""
    if not len(sizes):
        return torch.zeros(sizes.shape, dtype=torch.bool)
    rank = min(max(1, round(share * sizes.numel())), sizes.numel())
    return sizes >= sizes.flatten().kthvalue(rank).values


def _sizes(stage: Stage, coarse: Mapping[str, Tensor], position: int) -> Iterator[Tensor]:
    """Yield the scores of an expert's channels, [n, I], for each piece of tokens."""
    assert stage.inputs is not None
    pieces, weights = stage.inputs.pieces(position), stage.inputs.weights(position)
    yield from (_judged(x, coarse, position, own) for x, own in zip(pieces, weights, strict=True))


def _judged(x: Tensor, coarse: Mapping[str, Tensor], position: int, weights: Tensor) -> Tensor:
    """Return the scores [n, I] of an expert's channels for tokens [n, H] with router weights [n]."""
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

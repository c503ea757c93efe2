"""The thresholds of a model, on a calibration text.

What is compared with a threshold is |x W_up| under the quantized up projection (FloE, equation 6), or, with one
threshold for all experts of a layer, |silu(x W_gate) * x W_up| under both, times the router's weight.

The model runs block by block with quantized up projections in place of the original ones, nothing skipped. Thresholds
come from seven eighths of each expert's tokens; the last eighth, which lies behind them in the text, tells what they
skip of a text that they were not chosen on.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moepack.calibration import Calibrator, LayerRun, Samples
from moepack.calibration.settings import CalibrationSettings
from moepack.calibration.stage import Stage
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.methods.floe.channels import UP
from moepack.methods.floe.quantiles import Quantiles

__all__ = ["Decision", "Quantized", "decide"]

GATE = "gate_proj"

Quantized = Callable[[str, Tensor], Tensor]
"""The values [R, C] that a matrix of the packed tensor of that name will have, from its weights."""

_HELD_OUT = 8
"""One token in so many is not used for thresholds."""


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
    """

    thresholds: tuple[float, ...]
    tokens: tuple[int, ...]
    pooled: tuple[int, ...]
    predicted: tuple[float | None, ...]
    achieved: tuple[float | None, ...]
    order: Tensor | None = None

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
    found = {}
    for run in Calibrator(checkpoint, model, samples, settings).layers():
        found[run.layer.name] = _layer(run, quantized, shares[run.layer.name], routed)
    return found


@torch.no_grad()
def _layer(run: LayerRun, quantized: Quantized, share: float, routed: bool) -> Decision:
    experts = run.tensors[UP].shape[0]
    seen, held = Quantiles(experts), Quantiles(experts)
    wanted = torch.zeros(run.tensors[UP].shape[:2], dtype=torch.int64)
    for stage in run:
        with run.smaller_groups():
            values = dict(stage.finite().weights)
            if UP in values:
                deciding = {name: run.tensors[name].name for name in ((GATE, UP) if routed else (UP,))}
                coarse = {
                    name: torch.stack([quantized(own, matrix) for matrix in values[name]])
                    for name, own in deciding.items()
                }
                values[UP] = coarse[UP]
                for position, expert in enumerate(stage.experts if share > 0 else ()):
                    # What a larger group left, for which memory was too small.
                    seen.counts[expert], held.counts[expert], wanted[expert] = 0, 0, 0
                    for sizes in _sizes(stage, coarse, position):
                        wanted[expert] += _largest(sizes.float().abs(), share)
                        last = len(sizes) - len(sizes) // _HELD_OUT
                        seen.add(expert, sizes[:last])
                        held.add(expert, sizes[last:])
            run.answer(values)
    if share <= 0:
        return Decision.dense(experts)
    assert run.tokens is not None
    found = _decision(seen, held, share, run.tokens, routed)
    return replace(found, order=wanted.argsort(dim=1, descending=True, stable=True))


def _largest(sizes: Tensor, share: float) -> Tensor:
    """How often each channel is among the largest sizes [n, I] behind a share of them all, [I] int64 on the CPU."""
    if not len(sizes):
        return torch.zeros(sizes.shape[1], dtype=torch.int64)
    rank = min(max(1, round(share * sizes.numel())), sizes.numel())
    return (sizes >= sizes.flatten().kthvalue(rank).values).sum(0).cpu()


def _sizes(stage: Stage, coarse: Mapping[str, Tensor], position: int) -> Iterator[Tensor]:
    """What an expert's channels are judged by, [n, I], token piece by token piece."""
    assert stage.inputs is not None
    pieces = stage.inputs.pieces(position)
    if GATE not in coarse:
        yield from (x @ coarse[UP][position].to(x.dtype).T for x in pieces)
        return
    for x, weights in zip(pieces, stage.inputs.weights(position), strict=True):
        gate, up = (x @ coarse[name][position].to(x.dtype).T for name in (GATE, UP))
        yield functional.silu(gate) * up * weights.to(up)[:, None]


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

"""The thresholds of a model: |x W_up| under the quantized up projection, on a calibration text (FloE, equation 6).

The model runs block by block with quantized up projections in place of the original ones, nothing skipped. Thresholds
come from seven eighths of each expert's tokens; the last eighth, which lies behind them in the text, tells what they
skip of a text that they were not chosen on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moepack.calibration import Calibrator, LayerRun, Samples
from moepack.calibration.settings import CalibrationSettings
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.methods.floe.channels import UP
from moepack.methods.floe.quantiles import Quantiles

__all__ = ["Decision", "decide"]

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
    """

    thresholds: tuple[float, ...]
    tokens: tuple[int, ...]
    pooled: tuple[int, ...]
    predicted: tuple[float | None, ...]
    achieved: tuple[float | None, ...]

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
    quantized: Callable[[str, Tensor], Tensor],
    shares: Mapping[str, float],
) -> dict[str, Decision]:
    """Find the thresholds of all layers.

    Args:
        checkpoint: the original.
        model: its description, with gate, up and down projections.
        samples: the calibration set.
        settings: how the model runs.
        quantized: the values [R, C] that an up projection of a layer's name will have, from its weights.
        shares: the share of channels to be skipped, by layer; a layer with 0 is only passed.

    Raises:
        CalibrationError: the model computes NaN or infinity.
        InvalidTensorError: a weight is NaN or infinite.
        DeviceMemoryError: the device is too small.
    """
    found = {}
    for run in Calibrator(checkpoint, model, samples, settings).layers():
        found[run.layer.name] = _layer(run, quantized, shares[run.layer.name])
    return found


@torch.no_grad()
def _layer(run: LayerRun, quantized: Callable[[str, Tensor], Tensor], share: float) -> Decision:
    experts = run.tensors[UP].shape[0]
    seen, held = Quantiles(experts), Quantiles(experts)
    for stage in run:
        with run.smaller_groups():
            values = dict(stage.finite().weights)
            if UP in values:
                values[UP] = torch.stack([quantized(run.layer.name, matrix) for matrix in values[UP]])
                assert stage.inputs is not None
                for position, expert in enumerate(stage.experts if share > 0 else ()):
                    seen.counts[expert], held.counts[expert] = 0, 0  # of a larger group, for which memory was too small
                    for x in stage.inputs.pieces(position):
                        ups, last = x @ values[UP][position].to(x.dtype).T, len(x) - len(x) // _HELD_OUT
                        seen.add(expert, ups[:last])
                        held.add(expert, ups[last:])
            run.answer(values)
    if share <= 0:
        return Decision.dense(experts)
    assert run.tokens is not None
    return _decision(seen, held, share, run.tokens)


def _decision(seen: Quantiles, held: Quantiles, share: float, tokens: Tensor) -> Decision:
    pool = seen.threshold(share)
    visited = [bool(total) for total in seen.total.tolist()]
    thresholds = tuple(seen.threshold(share, expert) if any_ else pool for expert, any_ in enumerate(visited))
    return Decision(
        thresholds,
        tuple(tokens.tolist()),
        tuple(expert for expert, any_ in enumerate(visited) if not any_),
        tuple(map(seen.below, range(len(visited)), thresholds)),
        tuple(map(held.below, range(len(visited)), thresholds)),
    )


def _digits(value: float | None) -> float | None:
    return None if value is None else round(value, 5)

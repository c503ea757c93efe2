"""Reports which code runs a model's decoding steps: the core, recorded CUDA graphs, or transformers, and why.

Falling back to the slow path does not change results, only speed. Programs therefore print this report.
"""

from dataclasses import dataclass
from typing import Any

import torch

from moepack.decoding.decoder import DecoderForward
from moepack.decoding.families import FAMILIES, decoder_of, family_of
from moepack.decoding.prefix import new_cache
from moepack.decoding.signature import cache_argument

__all__ = ["Stepping", "stepping", "tried"]

_TRIED = 3
"""Steps of a trial: a GPU records the second step and replays the third."""


@dataclass(frozen=True)
class Stepping:
    """Which code ran decoding steps.

    Attributes:
        fast: the fast path: "moepack's decoder" or "CUDA graphs"; None if this model has none.
        taken: steps run by the fast path.
        left: steps left to transformers.
        reason: why the latest step was left to transformers, or why there is no fast path.
    """

    fast: str | None
    taken: int
    left: int
    reason: str

    def __str__(self) -> str:
        if self.fast is not None and not self.left:
            return f"decoded by {self.fast}"
        why = self.reason if self.fast is None else f"not supported by {self.fast}: {self.reason}"
        if not self.taken:
            return f"decoded by transformers ({why})"
        return f"decoded by {self.fast} in {self.taken} steps and by transformers in {self.left} ({why})"


def stepping(model: Any) -> Stepping:
    """Return which code ran the steps of a loaded model so far."""
    decoder = decoder_of(model)
    forward = vars(decoder).get("forward")
    if not isinstance(forward, DecoderForward):
        return Stepping(None, 0, 0, _obstacle(model, decoder))
    fast = "moepack's decoder" if next(model.parameters()).device.type == "cpu" else "CUDA graphs"
    return Stepping(fast, forward.steps, forward.declined, forward.reason)


def tried(model: Any) -> Stepping:
    """Run a few steps of one sequence and return which code runs the steps of a loaded model."""
    before = stepping(model)
    if before.fast is None:
        return before
    ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        given = cache_argument(model, new_cache(model))
        for place in range(1 + _TRIED):  # multimodal models may keep positions of other sequences: pass them explicitly
            model(ids, position_ids=torch.full_like(ids, place), use_cache=True, **given)
    after = stepping(model)
    taken = after.taken - before.taken
    return Stepping(after.fast, taken, 0 if taken else after.left - before.left, after.reason)


def _obstacle(model: Any, decoder: Any) -> str:
    """Why a model has no fast path."""
    if model.config.is_encoder_decoder:
        return "there is no fast path for encoder-decoders"
    if family_of(decoder) is None:
        kind = getattr(decoder.config, "model_type", type(decoder).__name__)
        return f"moepack's decoder supports {', '.join(FAMILIES)}; this is {kind}"
    return "moepack's decoder needs a packed model; this one is not packed"

"""Which code takes a model's decoding steps: the core, recorded CUDA graphs, or transformers, and why.

A fast path that is not taken changes no result, so nothing but the speed shows it. Programs therefore print this.
"""

from dataclasses import dataclass
from typing import Any

import torch

from moepack.runtime.calls import cache_argument
from moepack.runtime.decoder import DecoderForward
from moepack.runtime.families import FAMILIES, decoder_of, family_of
from moepack.runtime.prefix import new_cache

__all__ = ["Stepping", "stepping", "tried"]

_TRIED = 3
"""Steps of a trial: a GPU records the second one and replays the third."""


@dataclass(frozen=True)
class Stepping:
    """Who took decoding steps.

    Attributes:
        fast: the code that can: "the core" or "CUDA graphs"; None if there is none for this model.
        taken: steps that it took.
        left: steps that it left to transformers.
        reason: why it left the latest one, or why there is none.
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
    """Return who has taken the steps of a loaded model so far."""
    decoder = decoder_of(model)
    forward = vars(decoder).get("forward")
    if not isinstance(forward, DecoderForward):
        return Stepping(None, 0, 0, _obstacle(model, decoder))
    fast = "the core" if next(model.parameters()).device.type == "cpu" else "CUDA graphs"
    return Stepping(fast, forward.steps, forward.declined, forward.reason)


def tried(model: Any) -> Stepping:
    """Return who takes the steps of a loaded model, by a few steps of one sequence."""
    before = stepping(model)
    if before.fast is None:
        return before
    ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        given = cache_argument(model, new_cache(model))
        for place in range(1 + _TRIED):  # models of images and text may keep positions of other sequences: give them
            model(ids, position_ids=torch.full_like(ids, place), use_cache=True, **given)
    after = stepping(model)
    taken = after.taken - before.taken
    return Stepping(after.fast, taken, 0 if taken else after.left - before.left, after.reason)


def _obstacle(model: Any, decoder: Any) -> str:
    """Why there is no fast path for a model."""
    if model.config.is_encoder_decoder:
        return "there is no fast path for encoder-decoders"
    if family_of(decoder) is None:
        kind = getattr(decoder.config, "model_type", type(decoder).__name__)
        return f"the core decodes {', '.join(FAMILIES)}; this is {kind}"
    return "the core decodes packed models; this one is not packed"

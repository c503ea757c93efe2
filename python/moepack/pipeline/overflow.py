"""Warns of float16 models whose numbers come near the largest that float16 holds.

Beyond it is infinity, and the next norm or softmax makes NaN of that: the model writes the same word for ever. Weights
are told from what packing and copying read anyway, activations from a calibration text, where there is one.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from moepack.checkpoint import Checkpoint
from moepack.errors import MoepackWarning

__all__ = ["LARGEST", "is_half", "near_limit", "overflow_notes", "warn_all"]

LIMIT = torch.finfo(torch.float16).max

WEIGHT = LIMIT / 32
"""Magnitude from which a weight is told: activations of a model are rarely below 1, and a product sums thousands."""

ACTIVATION = LIMIT / 4
"""Magnitude from which an activation is told: another text may reach a few times as far."""

LARGEST = "largest"
"""The detail of a packed tensor that says how large its weights are in a float16 source; only near the limit."""

SHOWN = 3
"""The most places that a note names."""


def is_half(checkpoint: Checkpoint) -> bool:
    """Say whether a model runs in float16 unless something else is asked for."""
    for config in (checkpoint.config, checkpoint.config.get("text_config")):
        found: Any = isinstance(config, dict) and (config.get("dtype") or config.get("torch_dtype"))
        if isinstance(found, str):
            return found.removeprefix("torch.") == "float16"
    return any(checkpoint.info(name).dtype == torch.float16 for name in checkpoint.names())


def near_limit(magnitude: float) -> bool:
    """Say whether a weight of a float16 source is so large that it should be told."""
    return magnitude >= WEIGHT


def warn_all(notes: Iterable[str]) -> None:
    """Warn of each note, for those who do not print the report."""
    for note in notes:
        warnings.warn(note, MoepackWarning, stacklevel=3)


def overflow_notes(weights: Mapping[str, float], activations: Mapping[str, float]) -> Iterator[str]:
    """What a user should know, in full sentences.

    Args:
        weights: the largest magnitude in each float16 tensor.
        activations: the largest magnitude that each layer of a float16 model computes.
    """
    for what, found, least in (("weights", weights, WEIGHT), ("activations", activations, ACTIVATION)):
        near = {name: size for name, size in found.items() if size >= least}
        if near:
            ranked = sorted(near, key=lambda name: -near[name])
            places = ", ".join(f"{name} ({near[name]:,.0f})" for name in ranked[:SHOWN])
            more = f" and {len(near) - SHOWN} more" if len(near) > SHOWN else ""
            yield (
                f"The model is in float16, which holds numbers up to {LIMIT:,.0f}, and its {what} come near that: "
                f"{places}{more}. Run it with `--dtype bfloat16` if it computes NaN or repeats one word for ever."
            )

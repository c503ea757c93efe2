"""Warnings for float16 models with values near the float16 maximum.

Larger values become infinite, and the next norm or softmax turns infinity into NaN: the model then repeats one word
forever. Weights are checked while they are packed or copied, activations on the calibration text if there is one.
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
"""Magnitude from which a weight is reported. Activations are rarely below 1, and a product sums thousands of terms."""

ACTIVATION = LIMIT / 4
"""Magnitude from which an activation is reported. Other texts may reach a few times this value."""

LARGEST = "largest"
"""Detail of a packed tensor: largest weight magnitude of a float16 source, stored only if it is near the limit."""

SHOWN = 3
"""Maximum number of places that a note names."""


def is_half(checkpoint: Checkpoint) -> bool:
    """Return whether a model runs in float16 by default."""
    for config in (checkpoint.config, checkpoint.config.get("text_config")):
        found: Any = isinstance(config, dict) and (config.get("dtype") or config.get("torch_dtype"))
        if isinstance(found, str):
            return found.removeprefix("torch.") == "float16"
    return any(checkpoint.info(name).dtype == torch.float16 for name in checkpoint.names())


def near_limit(magnitude: float) -> bool:
    """Return whether a weight of a float16 source is large enough to report."""
    return magnitude >= WEIGHT


def warn_all(notes: Iterable[str]) -> None:
    """Issue each note as a warning, for callers that do not print the report."""
    for note in notes:
        warnings.warn(note, MoepackWarning, stacklevel=3)


def overflow_notes(weights: Mapping[str, float], activations: Mapping[str, float]) -> Iterator[str]:
    """Yield notes for the user, as complete sentences.

    Args:
        weights: the largest magnitude of each float16 tensor.
        activations: the largest magnitude that each layer of a float16 model computes.
    """
    for what, found, least in (("weights", weights, WEIGHT), ("activations", activations, ACTIVATION)):
        near = {name: size for name, size in found.items() if size >= least}
        if near:
            ranked = sorted(near, key=lambda name: -near[name])
            places = ", ".join(f"{name} ({near[name]:,.0f})" for name in ranked[:SHOWN])
            more = f" and {len(near) - SHOWN} more" if len(near) > SHOWN else ""
            yield (
                f"The model is in float16, which holds values up to {LIMIT:,.0f}, and its {what} come close to that: "
                f"{places}{more}. Run it with `--dtype bfloat16` if it computes NaN or repeats one word forever."
            )

"""The loss that a plan expects, from what errors of weights cost."""

from __future__ import annotations

import math
from collections.abc import Mapping

from moepack.checkpoint.dense import EMBEDDING

__all__ = ["WITHIN", "expected_rise", "solved_rise"]

STEEPER, BEND, MOST = 1.2, 4.7, 10.0
"""The loss is a parabola near the original only: 1.2 times as steep on unseen texts, and growing by a factor of e for
each 0.21 nats that the parabola says (docs/methods/auto.md); more than 10 nats is noise."""

COMPENSATED = 0.5
"""What error compensation leaves of what rounding alone would cost: 0.38 to 0.7, model by model."""

LOW_RATE, FALL = 1.7, 2.0
"""How many times more than that a model loses at 0.9 bits a weight, where most integers are zero and compensation is of
less help, and by how much that falls with each bit, as a power of e."""

WITHIN = 2.0
"""Factor, either way, within which a model loses what is expected with a text: 50 of 56 increases of three small models
(`benches/expected.py`), and SmolLM2-135M at 3 and 4 bits on two texts (0.70 to 1.13; docs/methods/sensitivity.md)."""


def expected_rise(errors: Mapping[str, float]) -> float:
    """Nats a token that a model loses, by what errors of each role would cost were the loss a parabola."""
    small = sum(errors.values())
    return min(STEEPER * small * math.exp(min(BEND * small, 10.0)), MOST)


def solved_rise(errors: Mapping[str, float], bits: float) -> float:
    """Nats a token that a model of so many bits a weight loses whose tensors were solved on a text, all but those that
    hold tokens; errors as for `expected_rise`."""
    small = sum(error * (1.0 if role in (EMBEDDING, "head") else COMPENSATED) for role, error in errors.items())
    return min(STEEPER * small * (1 + LOW_RATE * math.exp(-FALL * (bits - 0.9))), MOST)

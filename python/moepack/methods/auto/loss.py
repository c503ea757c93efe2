"""Predicts the loss increase of a plan from the cost of its weight errors."""

from __future__ import annotations

import math
from collections.abc import Mapping

from moepack.checkpoint.dense import EMBEDDING

__all__ = ["WITHIN", "expected_rise", "solved_rise"]

STEEPER, BEND, MOST = 1.2, 4.7, 10.0
"""The loss is quadratic only near the original. It is 1.2 times as steep on unseen texts, and grows by a factor of e
for each 0.21 nats that the quadratic model predicts (docs/methods/auto.md). Beyond 10 nats, the output is noise."""

COMPENSATED = 0.5
"""Loss increase with error compensation relative to rounding to nearest: 0.38 to 0.7, depending on the model."""

LOW_RATE, FALL = 1.7, 2.0
"""Additional loss increase at 0.9 bits per weight, relative to that at high rates, because most integers are zero and
compensation helps less. It falls by a factor of e^FALL with each bit."""

WITHIN = 2.0
"""Factor, up or down, within which the prediction holds with a text: for 50 of 56 increases of three small models
(`benches/quality/plan_accuracy.py`), and for SmolLM2-135M at 2 to 4.5 bits on two texts (0.50 to 1.5;
docs/methods/sensitivity.md)."""


def expected_rise(errors: Mapping[str, float]) -> float:
    """Return the expected loss increase in nats per token for weights rounded to nearest.

    `errors` holds the increase in nats per token that each role would cause if the loss were quadratic.
    """
    small = sum(errors.values())
    return min(STEEPER * small * math.exp(min(BEND * small, 10.0)), MOST)


def solved_rise(errors: Mapping[str, float], bits: float) -> float:
    """Return the expected loss increase in nats per token for weights solved on a text.

    Embedding and head, whose rows are tokens, count as rounded to nearest: error compensation gains a fifth of their
    loss on small models and half of it on SmolLM2-135M (docs/methods/sensitivity.md). `errors` is as for
    `expected_rise`; `bits` is the number of bits per weight of the model.
    """
    small = sum(error * (1.0 if role in (EMBEDDING, "head") else COMPENSATED) for role, error in errors.items())
    return min(STEEPER * small * (1 + LOW_RATE * math.exp(-FALL * (bits - 0.9))), MOST)

"""The calibration of methods that need no text but solve weights on its inputs if there is one."""

from __future__ import annotations

from typing import Protocol

import torch

from moepack.calibration import CalibrationRequest, CalibrationSettings

__all__ = ["TEXT_SETTINGS", "Texted", "request_of"]

TEXT_SETTINGS = ("samples", "sequence_length", "group", "seed")
"""Settings that change the output only with a text."""


class Texted(Protocol):
    """The settings that the calibration depends on (`moepack.methods.shared`)."""

    calibration: str | None
    samples: int
    sequence_length: int
    group: int
    device: str
    seed: int


def request_of(given: Texted) -> CalibrationRequest | None:
    """Return the calibration set, and how the model runs; None without a text.

    The compressed model assigns tokens to experts. The original runs beside it, so that the error of earlier layers can
    be undone.
    """
    if given.calibration is None:
        return None
    settings = CalibrationSettings(
        routing="compressed", drift=True, group=given.group, device=torch.device(given.device)
    )
    return CalibrationRequest(given.calibration, given.samples, given.sequence_length, settings, seed=given.seed)

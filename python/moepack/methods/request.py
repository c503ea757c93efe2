"""The calibration of methods that need no text but solve weights on its inputs if there is one.

They read the built-in text by default. A model that cannot run on it is packed without a text, and a note says why.
"""

from __future__ import annotations

import math
from copy import copy
from typing import ClassVar, Protocol, TypeVar

import torch

from moepack.calibration import CalibrationRequest, CalibrationSettings, Calibrator
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.errors import CalibrationError, TokenError, UnsupportedModelError
from moepack.memory import total_bytes
from moepack.methods.mixins import Calibrates
from moepack.textfile import BUILT_IN
from moepack.units import size

__all__ = ["TEXT_SETTINGS", "DefaultText", "Texted", "installed_bytes", "readable", "request_of"]

TEXT_SETTINGS = ("samples", "sequence_length", "group", "seed")
"""Settings that change the output only with a text."""

STATES = 16
"""Bytes per token and hidden unit: float32 states of two streams, and the inputs of the experts."""


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


class DefaultText(Calibrates):
    """A mixin for methods that read the built-in text by default and can also do without a text.

    Attributes:
        calibration: the text; None: weights alone decide.
        without_text: what that means, as a clause.
        unread: why the built-in text was dropped (`readable`), as a sentence; otherwise empty.
    """

    calibration: str | None
    without_text: ClassVar[str]
    unread: str = ""

    @property
    def needs_text(self) -> bool:
        """Whether these settings are impossible without a text."""
        return False

    def hindrance(self, checkpoint: Checkpoint, model: MoeModel) -> str | None:
        """Return why a model cannot be packed on the text, and a remedy, as clauses; None if it can. Reads no weight.

        It needs a tokenizer that fits, an architecture that transformers builds, and memory for the largest layer in
        float32 beside the states of all tokens.
        """
        request = self.request
        assert request is not None, "there is a calibration set"
        largest = max(sum(math.prod(part.shape) for part in layer.projections) for layer in model.layers)
        width = max(layer.projections[0].shape[-1] for layer in model.layers)
        needed = 4 * largest + STATES * request.samples * request.length * width
        there = total_bytes()
        if there is not None and there < needed:
            return (
                f"the largest layer and the states of the text need {size(needed)} of memory, but only {size(there)} "
                "are installed; compress on a machine with more memory"
            )
        try:
            Calibrator(checkpoint, model, request.load(checkpoint), request.settings)
        except (CalibrationError, TokenError) as error:
            return f"{error}; correct this and compress again"
        except UnsupportedModelError as error:
            return str(error)
        return None


M = TypeVar("M")


def readable(method: M, checkpoint: Checkpoint, model: MoeModel) -> M:
    """Return a method that can pack a model: without the built-in text if the model cannot run on it.

    `DefaultText.unread` of the result says why. Texts that the user gave stay, so that their errors are raised.
    """
    if not isinstance(method, DefaultText) or method.calibration != BUILT_IN or method.needs_text:
        return method
    reason = method.hindrance(checkpoint, model)
    if reason is None:
        return method
    found = copy(method)
    found.calibration = None
    found.unread = f"The built-in text was not used, so {method.without_text} without a text: {reason}."
    return found


def installed_bytes(device: str) -> int | None:
    """Return the memory of a device in bytes; None if unknown."""
    place = torch.device(device)
    return total_bytes() if place.type == "cpu" else torch.cuda.get_device_properties(place).total_memory

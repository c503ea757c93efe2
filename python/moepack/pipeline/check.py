"""Measures the loss of a packed model on a part of the calibration text, at the end of `compress`.

The plan's expected loss is a sum over tensors. The check runs both models, so it detects what a sum cannot: errors that
accumulate over layers, and calibration texts that do not represent the model's use.
"""

import tempfile
from dataclasses import replace
from os import PathLike
from pathlib import Path

from moepack.calibration import CalibrationRequest
from moepack.calibration.text import read_texts
from moepack.errors import MoepackError
from moepack.evaluation import evaluate
from moepack.methods.base import MethodPlan
from moepack.pipeline.report import CompressReport
from moepack.textfile import BUILT_IN, OWN_SAMPLES
from moepack.units import nats

__all__ = ["LARGE", "checked", "far_notes", "is_checked", "measured_increase"]

CHARACTERS = 10_000
"""Characters of the calibration text that are used, about 2,000 tokens."""

LARGE = 10**8
"""Number of weights from which a check takes less than a tenth of the time of a calibrated run on any machine. For
smaller models, loading two models alone takes longer."""

FAR = 1.5
"""A loss above this multiple of the expected upper bound is reported."""


def is_checked(asked: bool | None, request: CalibrationRequest | None, weights: int) -> bool:
    """Return whether to run the check: as requested, or by default if it is cheap compared to a calibrated run."""
    return asked if asked is not None else request is not None and weights >= LARGE


def checked(report: CompressReport, model: Path, plan: MethodPlan) -> CompressReport:
    """Return the report with the measured loss increase, or with a note that says why it could not be measured.

    Args:
        report: report of a complete directory, which is not modified.
        model: the checkpoint.
        plan: the plan by which it was packed; gives the calibration text and the expected loss.
    """
    source = BUILT_IN if plan.request is None or plan.request.source == OWN_SAMPLES else plan.request.source
    try:
        increase = measured_increase(model, report.path, source)
    except MoepackError as error:
        return replace(report, notes=(*report.notes, f"the check of the packed model failed: {error}"))
    if increase is None:
        return replace(report, notes=(*report.notes, "the check of the packed model needs at least 512 tokens of text"))
    return replace(report, increase=increase, notes=(*report.notes, *far_notes(increase, plan.loss)))


def measured_increase(model: Path, packed: Path, source: str | PathLike[str]) -> float | None:
    """Return the loss of the packed model minus that of the original, in nats per token.

    Args:
        model: the checkpoint.
        packed: the packed directory.
        source: the calibration text, as for `read_texts`.

    Returns:
        The increase, or None if the text is shorter than one window.

    Raises:
        CalibrationError, LoadError, NonFiniteError: as for `read_texts` and `evaluate`.
    """
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("\n\n".join(read_texts(source, limit=CHARACTERS)), encoding="utf-8", newline="\n")
        try:
            found = evaluate(packed, text, CHARACTERS, reference=model)
        except ValueError:  # shorter than one window
            return None
    assert found.reference_loss is not None, "there is a reference"
    return found.loss - found.reference_loss


def far_notes(increase: float, expected: tuple[float, float] | None) -> tuple[str, ...]:
    """Return advice if a model loses far more than expected, as a complete sentence."""
    if expected is None or increase <= FAR * expected[1]:
        return ()
    return (
        f"the packed model loses {nats(increase)} on a part of the calibration text, far more than the plan expected "
        f"({nats(expected[0])} to {nats(expected[1])}); more bits (--bits-per-weight, --size) or a calibration text "
        "closer to the model's real input (--calibration) reduce the loss",
    )

"""What a packed model loses, measured at the end of `compress` on a part of the calibration text.

A plan's loss is expected from sums over tensors. The check runs both models, so it notices what a plan cannot: errors
that add up, and texts that say little about the model.
"""

import tempfile
from dataclasses import replace
from os import PathLike
from pathlib import Path

from moepack.calibration.text import BUILT_IN, read_texts
from moepack.errors import MoepackError
from moepack.evaluation import evaluate
from moepack.methods.base import Method
from moepack.pipeline.report import CompressReport
from moepack.units import nats

__all__ = ["LARGE", "checked", "far_notes", "is_checked", "measured_increase"]

CHARACTERS = 10_000
"""Of the calibration text: about 2,000 tokens."""

LARGE = 10**8
"""Weights from which on a check takes less than a tenth of the time of a calibrated run, whatever the machine. Loading
two models takes longer than that for smaller ones."""

FAR = 1.5
"""A loss is far from what was expected beyond this multiple of the upper bound."""


def is_checked(asked: bool | None, method: Method, weights: int) -> bool:
    """Whether a job ends with the check: as asked, or where it is cheap beside a calibrated run."""
    return asked if asked is not None else method.request is not None and weights >= LARGE


def checked(report: CompressReport, model: Path, method: Method) -> CompressReport:
    """The report with what the packed model loses, or with a note that says why that is unknown.

    Args:
        report: of a directory that is complete; nothing here changes it.
        model: the checkpoint.
        method: what packed it, and knows the text and what the plan expected.
    """
    source = BUILT_IN if method.request is None else method.request.source
    try:
        increase = measured_increase(model, report.path, source)
    except MoepackError as error:
        return replace(report, notes=(*report.notes, f"the check of the packed model failed: {error}"))
    if increase is None:
        return replace(report, notes=(*report.notes, "the check of the packed model needs 512 tokens of text"))
    return replace(report, increase=increase, notes=(*report.notes, *far_notes(increase, method.expected_loss)))


def measured_increase(model: Path, packed: Path, source: str | PathLike[str]) -> float | None:
    """The increase of the loss of a packed model over the original, in nats a token; None for too short a text.

    Args:
        model: the checkpoint.
        packed: what was made of it.
        source: the calibration text, as `read_texts` takes it.

    Raises:
        CalibrationError, LoadError, NonFiniteError: as of `read_texts` and `evaluate`.
    """
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("\n\n".join(read_texts(source, limit=CHARACTERS)), encoding="utf-8")
        try:
            found = evaluate(packed, text, CHARACTERS, reference=model)
        except ValueError:  # less than a window
            return None
    assert found.reference_loss is not None, "there is a reference"
    return found.loss - found.reference_loss


def far_notes(increase: float, expected: tuple[float, float] | None) -> tuple[str, ...]:
    """What to do about a model that loses far more than was expected, in a full sentence."""
    if expected is None or increase <= FAR * expected[1]:
        return ()
    return (
        f"the packed model loses {nats(increase)} on a part of the calibration text, far more than the plan expected "
        f"({nats(expected[0])} to {nats(expected[1])}); more bits (--bits-per-weight, --size) or a calibration text "
        "like those that the model reads (--calibration) make it better",
    )

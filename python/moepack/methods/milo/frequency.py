"""Counts how often the router chooses each expert on a text, by running the original model block by block."""

from __future__ import annotations

import torch

from moepack.calibration import CalibrationSettings, Calibrator
from moepack.calibration.load import load_samples
from moepack.checkpoint import Checkpoint, MoeModel

__all__ = ["count_choices"]


def count_choices(
    checkpoint: Checkpoint, model: MoeModel, text: str, samples: int, sequence_length: int, device: str
) -> tuple[dict[str, list[int]], str]:
    """Count the tokens that choose each expert.

    Args:
        checkpoint: the model.
        model: its description.
        text: a text file, JSON lines, directory, or hub data set.
        samples: maximum number of samples.
        sequence_length: tokens per sample.
        device: where the model runs.

    Returns:
        The counts of each layer's experts, and the fingerprint of the samples.

    Raises:
        CalibrationError: the text is unusable, or the model computes NaN on it.
    """
    found = load_samples(checkpoint, text, samples, sequence_length, premask=True, seed=0)
    settings = CalibrationSettings(activations="original", device=torch.device(device))
    counts: dict[str, list[int]] = {}
    for run in Calibrator(checkpoint, model, found, settings).layers():
        run.keep()
        assert run.tokens is not None
        counts[run.layer.name] = run.tokens.tolist()
    return counts, found.fingerprint()

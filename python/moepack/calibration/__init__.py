"""Calibration: feeds text through a model block by block and records the inputs of each layer.

`token_windows` and the `*_samples` functions create the samples, `Calibrator` runs them, and a `Stage` is what a method
solves.
"""

from moepack.calibration.load import CalibrationRequest
from moepack.calibration.run import Calibrator
from moepack.calibration.samples import Samples, SpanTokens, decoder_samples, seq2seq_samples
from moepack.calibration.settings import CalibrationSettings
from moepack.calibration.stage import Inputs, LayerRun, Stage, Weights
from moepack.calibration.text import check_source, read_texts, token_windows

__all__ = [
    "CalibrationRequest",
    "CalibrationSettings",
    "Calibrator",
    "Inputs",
    "LayerRun",
    "Samples",
    "SpanTokens",
    "Stage",
    "Weights",
    "check_source",
    "decoder_samples",
    "read_texts",
    "seq2seq_samples",
    "token_windows",
]

"""Calibration: feeding text through a model block by block and showing each layer what it reads.

`token_windows` and the `*_samples` functions make the samples, `Calibrator` runs them, and `Stage` is what a method is
given to solve.
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

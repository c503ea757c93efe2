"""Calibration: feeding text through a model block by block and showing each layer's experts what they see.

`token_windows` and the `*_samples` functions make the samples, `Calibrator` runs them.
"""

from moepack.calibration.linears import LinearStage, SolveLinears
from moepack.calibration.run import CalibrationSettings, Calibrator, Coverage, DenseWork, Plan, Solve, Stage
from moepack.calibration.samples import Samples, SpanTokens, decoder_samples, seq2seq_samples
from moepack.calibration.text import read_texts, token_windows

__all__ = [
    "CalibrationSettings",
    "Calibrator",
    "Coverage",
    "DenseWork",
    "LinearStage",
    "Plan",
    "Samples",
    "Solve",
    "SolveLinears",
    "SpanTokens",
    "Stage",
    "decoder_samples",
    "read_texts",
    "seq2seq_samples",
    "token_windows",
]

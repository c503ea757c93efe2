"""Fine-tunes the values of codes by gradient descent on the divergence of the packed model from the original."""

from moepack.tuning.gains import Gain, thaw_gains
from moepack.tuning.gradient import Objective, Tuned, TuneSettings, listening, tune_model
from moepack.tuning.modules import TunedExperts, TunedLinear, thaw
from moepack.tuning.tensors import Books, Scales, TunedTensor

__all__ = [
    "Books",
    "Gain",
    "Objective",
    "Scales",
    "TuneSettings",
    "Tuned",
    "TunedExperts",
    "TunedLinear",
    "TunedTensor",
    "listening",
    "thaw",
    "thaw_gains",
    "tune_model",
]

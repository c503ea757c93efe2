"""Fine-tuning of centroids by gradient: the packed model's outputs against the original's (CodeQuant, equation 6)."""

from moepack.methods.codequant.tuning.gradient import Objective, Tuned, TuneSettings, listening, tune_model
from moepack.methods.codequant.tuning.modules import Books, TunedExperts, TunedLinear, thaw

__all__ = [
    "Books",
    "Objective",
    "TuneSettings",
    "Tuned",
    "TunedExperts",
    "TunedLinear",
    "listening",
    "thaw",
    "tune_model",
]

"""QMoE: calibrated quantization of thousands of experts to ternary or two bits.

`method` is the method itself, `forms` what a projection is stored as, `notes` what the user is told.
"""

from moepack.methods.qmoe.method import Qmoe

__all__ = ["Qmoe"]

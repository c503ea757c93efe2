"""QMoE: calibrated quantization of thousands of experts to ternary or two bits.

`method` is the method itself, `grid` and `rate` solve a layer's stages, `forms` are what a projection is stored as, and
`notes` what the user is told.
"""

from moepack.methods.qmoe.method import PUBLISHED, Qmoe

__all__ = ["PUBLISHED", "Qmoe"]

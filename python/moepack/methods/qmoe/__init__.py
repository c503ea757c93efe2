"""QMoE: calibrated quantization of thousands of experts to ternary values or two bits.

`method` is the method itself, `grid` and `rate` solve a layer's stages, `forms` are the stored forms of a projection.
"""

from moepack.methods.qmoe.method import PUBLISHED, Qmoe

__all__ = ["PUBLISHED", "Qmoe"]

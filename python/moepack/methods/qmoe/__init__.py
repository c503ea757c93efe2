"""QMoE: calibrated quantization of thousands of experts to ternary values or two bits.

`method` is the method itself, `grid` and `rate` solve a layer's stages, `forms` are the stored forms of a projection.
"""

from typing import TYPE_CHECKING

from moepack.lazy import lazy

if TYPE_CHECKING:
    from moepack.methods.qmoe.method import PUBLISHED, Qmoe

__all__ = ["PUBLISHED", "Qmoe"]

__getattr__ = lazy(__name__, {"PUBLISHED": "moepack.methods.qmoe.method", "Qmoe": "moepack.methods.qmoe.method"})

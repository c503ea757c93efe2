"""Methods on one axis, for any model: size of all files of weights against the loss that they cost.

`fitting` gives each method the settings that meet a size, `measure` compresses and evaluates, `chart` draws.
"""

from moepack.comparison.chart import draw
from moepack.comparison.fitting import FITTING, fitted
from moepack.comparison.measure import Comparison, Point

__all__ = ["FITTING", "Comparison", "Point", "draw", "fitted"]

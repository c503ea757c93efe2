"""Compares methods on any model: size of all weight files against loss.

`fitting` chooses each method's settings for a given size, `measure` compresses and evaluates, `chart` draws.
"""

from moepack.comparison.chart import draw
from moepack.comparison.fitting import fitted, fittings
from moepack.comparison.measure import Comparison, Point

__all__ = ["Comparison", "Point", "draw", "fitted", "fittings"]

"""FineQuant: uniform integers without calibration, with a granularity chosen for each matrix.

`method` is the method itself. `sizes` has the two rules that choose group sizes: the paper's, and one for a byte
budget.
"""

from typing import TYPE_CHECKING

from moepack.lazy import lazy

if TYPE_CHECKING:
    from moepack.methods.finequant.method import FineQuant

__all__ = ["FineQuant"]

__getattr__ = lazy(__name__, {"FineQuant": "moepack.methods.finequant.method"})

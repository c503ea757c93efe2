"""The method `auto`: a model of a given size, its bytes where the loss needs them.

`target` turns what was asked for into bytes and refuses what cannot be, `importance` says what an error of each tensor
counts, `coded` and `grouped` pack tensors, `mixed` chooses between them where speed is preferred, and `method` is the
method.
"""

from moepack.methods.auto.method import Auto

__all__ = ["Auto"]

"""The method `auto`: compresses a model to a given size and allocates bytes by their effect on the loss.

`target` converts a request into bytes and rejects impossible ones. `moepack.methods.rate.importance` weights the errors
of each tensor. `coded` and `grouped` pack tensors, `mixed` chooses between them with `prefer="speed"`, and `method`
contains the method.
"""

from typing import TYPE_CHECKING

from moepack.lazy import lazy

if TYPE_CHECKING:
    from moepack.methods.auto.method import Auto

__all__ = ["Auto"]

__getattr__ = lazy(__name__, {"Auto": "moepack.methods.auto.method"})

"""The method `floe`: contextual sparsity of experts, decided by a low-bit up projection (FloE, section 3.2)."""

from typing import TYPE_CHECKING

from moepack.lazy import lazy

if TYPE_CHECKING:
    from moepack.methods.floe.method import Floe

__all__ = ["Floe"]

__getattr__ = lazy(__name__, {"Floe": "moepack.methods.floe.method"})

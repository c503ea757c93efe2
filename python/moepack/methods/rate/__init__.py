"""The method `rate`: entropy-coded integers with one uniform step, at any number of bits per weight."""

from typing import TYPE_CHECKING

from moepack.lazy import lazy

if TYPE_CHECKING:
    from moepack.methods.rate.method import Rate

__all__ = ["Rate"]

__getattr__ = lazy(__name__, {"Rate": "moepack.methods.rate.method"})

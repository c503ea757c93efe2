"""Ternary weights, rounded to nearest and entropy coded: a building block of `qmoe`."""

from typing import TYPE_CHECKING

from moepack.lazy import lazy

if TYPE_CHECKING:
    from moepack.methods.ternary.method import Ternary

__all__ = ["Ternary"]

__getattr__ = lazy(__name__, {"Ternary": "moepack.methods.ternary.method"})

"""MiLo: low-bit groups with a mixture of low-rank compensators."""

from typing import TYPE_CHECKING

from moepack.lazy import lazy

if TYPE_CHECKING:
    from moepack.methods.milo.method import Milo

__all__ = ["Milo"]

__getattr__ = lazy(__name__, {"Milo": "moepack.methods.milo.method"})

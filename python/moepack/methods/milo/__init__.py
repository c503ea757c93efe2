"""MiLo: low-bit groups with a mixture of low-rank compensators."""

from moepack.methods.milo.method import Milo

__all__ = ["Milo"]

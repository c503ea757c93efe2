"""The method `rate`: entropy-coded integers with one uniform step, at any number of bits per weight."""

from moepack.methods.rate.method import Rate

__all__ = ["Rate"]

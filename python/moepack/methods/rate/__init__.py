"""The method `rate`: integers of one uniform step, entropy coded, at any number of bits a weight."""

from moepack.methods.rate.method import Rate

__all__ = ["Rate"]

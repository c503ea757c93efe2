"""The method `floe`: contextual sparsity of experts, decided by a low-bit up projection (FloE, section 3.2)."""

from moepack.methods.floe.method import Floe

__all__ = ["Floe"]

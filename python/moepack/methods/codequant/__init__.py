"""CodeQuant: weights as codes into codebooks per row or block, activations rounded per token."""

from typing import TYPE_CHECKING

from moepack.lazy import lazy

if TYPE_CHECKING:
    from moepack.methods.codequant.method import CodeQuant

__all__ = ["CodeQuant"]

__getattr__ = lazy(__name__, {"CodeQuant": "moepack.methods.codequant.method"})

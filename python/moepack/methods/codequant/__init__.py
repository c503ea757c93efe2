"""CodeQuant: weights as codes into codebooks per row or block, activations rounded per token."""

from moepack.methods.codequant.method import CodeQuant

__all__ = ["CodeQuant"]

"""CodeQuant: weights as codes into codebooks of their row or block, activations rounded for each token."""

from moepack.methods.codequant.method import CodeQuant

__all__ = ["CodeQuant"]

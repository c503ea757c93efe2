"""Activations rounded as in the kernels of codebook tensors: per token, asymmetric, 8 or 4 bits.

The range of a token includes zero, so that zero stays zero (CodeQuant, section 4: asymmetric min-max). Calibration and
benches use this module to simulate packed layers.

Before rounding, activations may be rotated by a Hadamard matrix in blocks of columns (QuaRot; CodeQuant_had in section
4.1), which spreads an outlier over its block. Residual streams are rotated offline; this rotation serves inputs that no
offline rotation reaches, mainly those behind a gate.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Rounding", "block_width", "rotated", "round_activations"]

_UNREACHED = ("o_proj", "down_proj", "w2", "kv_b_proj", "q_b_proj")
"""Layers whose inputs a rotation of the residual stream does not reach."""


@dataclass(frozen=True)
class Rounding:
    """How packed layers round their input activations.

    Attributes:
        bits: 4 or 8; 0 leaves activations unchanged.
        hadamard: rotate the inputs of layers that a rotation of the residual stream does not reach.
    """

    bits: int = 0
    hadamard: bool = False

    def width(self, layer: str, columns: int) -> int:
        """Return the number of columns that the layer named `layer` rotates together; 1 means no rotation."""
        return block_width(columns) if self.hadamard and layer.rsplit(".", 1)[-1] in _UNREACHED else 1

    def __call__(self, x: Tensor, layer: str) -> Tensor:
        """Round a layer's input, [..., C].

        A rotation is undone afterwards, so the layer's weights are those of the model.
        """
        if not self.bits:
            return x
        width = self.width(layer, x.shape[-1])
        if width == 1:
            return round_activations(x, self.bits)
        return rotated(round_activations(rotated(x.float(), width), self.bits), width).to(x.dtype)


def block_width(columns: int) -> int:
    """Return the largest power of two that divides a number of columns; 1 for zero columns."""
    return columns & -columns or 1


def rotated(x: Tensor, width: int) -> Tensor:
    """Multiply blocks of `width` columns, a power of two, by a Hadamard matrix; [..., C], as in the kernels."""
    half, y = 1, x
    while half < width:
        low, high = y.reshape(*x.shape[:-1], -1, 2, half).unbind(-2)
        y = torch.stack([low + high, low - high], -2).flatten(-3)
        half *= 2
    return y * width**-0.5 if width > 1 else x


def round_activations(x: Tensor, bits: int) -> Tensor:
    """Round each token to its own grid.

    Args:
        x: [..., C], floating point; computed in float32.
        bits: 4 or 8; 0 or 16 change nothing.

    Returns:
        [..., C] in the dtype of `x`. A token with NaN or infinity becomes NaN.

    Raises:
        ValueError: `bits` is not supported.
    """
    if bits in (0, 16):
        return x
    if bits not in (4, 8):
        raise ValueError(f"activations must have 4, 8 or 16 bits, not {bits}")
    if not x.shape[-1]:
        return x
    values, top = x.float(), float((1 << bits) - 1)
    low, high = torch.aminmax(values, dim=-1, keepdim=True)
    low, high = low.clamp(max=0), high.clamp(min=0)
    step = (high - low) / top
    inverse = 1 / step
    usable = inverse.isfinite()
    inverse = torch.where(usable, inverse, 0)
    zero = (-low * inverse + 0.5).floor().clamp(0, top)
    codes = (values * inverse + (zero + 0.5)).clamp(0, top).floor()
    rounded = (codes - zero) * torch.where(usable, step, 0)
    finite = values.isfinite().all(-1, keepdim=True) & step.isfinite()
    return torch.where(finite, rounded, torch.nan).to(x.dtype)

"""Activations rounded as the kernels of codebook tensors round them: for each token, asymmetric, 8 or 4 bits.

The range of a token is that of its values and zero, so that zero stays zero (CodeQuant, section 4: asymmetric min-max).
Calibration and benches simulate with it what packed layers compute.

Before they are rounded, activations may be rotated by Hadamard's matrix in blocks of columns (QuaRot; CodeQuant_had in
section 4.1): an outlier is then spread over its block. Residual streams are rotated offline; this is for inputs that no
offline rotation reaches, those behind a gate above all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Rounding", "block_width", "rotated", "round_activations"]

_UNREACHED = ("o_proj", "down_proj", "w2", "kv_b_proj", "q_b_proj")
"""Layers whose inputs a rotation of the residual stream does not reach."""


@dataclass(frozen=True)
class Rounding:
    """What becomes of the activations that packed layers read.

    Attributes:
        bits: 4 or 8; 0 leaves them as they are.
        hadamard: rotate the inputs of layers that a rotation of the residual stream does not reach.
    """

    bits: int = 0
    hadamard: bool = False

    def width(self, layer: str, columns: int) -> int:
        """Columns that the layer of this name rotates together; 1 for not at all."""
        return block_width(columns) if self.hadamard and layer.rsplit(".", 1)[-1] in _UNREACHED else 1

    def __call__(self, x: Tensor, layer: str) -> Tensor:
        """Round what a layer reads, [..., C]; rotated back, so that its weights are those of the model."""
        if not self.bits:
            return x
        width = self.width(layer, x.shape[-1])
        if width == 1:
            return round_activations(x, self.bits)
        return rotated(round_activations(rotated(x.float(), width), self.bits), width).to(x.dtype)


def block_width(columns: int) -> int:
    """The largest power of two that divides a number of columns; 1 for none."""
    return columns & -columns or 1


def rotated(x: Tensor, width: int) -> Tensor:
    """Multiply blocks of `width` columns, a power of two, by Hadamard's matrix; [..., C], as the kernels do it."""
    half, y = 1, x
    while half < width:
        low, high = y.reshape(*x.shape[:-1], -1, 2, half).unbind(-2)
        y = torch.stack([low + high, low - high], -2).flatten(-3)
        half *= 2
    return y * width**-0.5 if width > 1 else x


def round_activations(x: Tensor, bits: int) -> Tensor:
    """Round each token to a grid of its own.

    Args:
        x: [..., C], floating point; computed in float32.
        bits: 4 or 8, or 0 or 16 to change nothing.

    Returns:
        [..., C] in the dtype of `x`; a token that holds NaN or infinity becomes NaN.

    Raises:
        ValueError: there is no such number of bits.
    """
    if bits in (0, 16):
        return x
    if bits not in (4, 8):
        raise ValueError(f"activations have 4, 8 or 16 bits, not {bits}")
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

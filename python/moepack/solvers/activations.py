"""Activations rounded as the kernels of codebook tensors round them: for each token, asymmetric, 8 or 4 bits.

The range of a token is that of its values and zero, so that zero stays zero (CodeQuant, section 4: asymmetric min-max).
Calibration and benches simulate with it what packed layers compute.
"""

import torch
from torch import Tensor

__all__ = ["round_activations"]


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

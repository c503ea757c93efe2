"""Layers of experts with code of their own between and behind their products: biases, clamps, norms.

Each slot, a token and one of its experts, is a row of every product. The kernels read the router's tensors on the
device, so nothing synchronizes and calls can be captured in a CUDA graph. Many tokens use `grouped`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moepack.backends.base import Between
from moepack.backends.gpu import clamped
from moepack.backends.gpu.families import kernels_of
from moepack.backends.gpu.matrix import DeviceMatrix

__all__ = ["experts"]


def experts(matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, weights: Tensor, code: Between) -> Tensor:
    """Sum the outputs of each token's experts; arguments and result as in `Backend.own_experts`, on one GPU."""
    slots, count = index.reshape(-1), matrices[0].shape[0]
    *first, last = matrices
    inner = clamped.between(code, [_product(matrix, x, index) for matrix in first], slots, count)
    outputs = _product(last, inner, slots[:, None])
    if code.clamped is not None:
        out = torch.empty((len(x), outputs.shape[1]), dtype=torch.float32, device=x.device)
        clamped.summed(code.clamped, outputs, index, weights, count, out)
        return out
    outputs = code.behind(outputs, slots.clamp(0, count - 1))
    exists = (slots >= 0) & (slots < count)
    weighted = torch.where(exists[:, None], outputs * weights.reshape(-1, 1), 0)
    return weighted.view(*index.shape, -1).sum(1)


def _product(matrix: DeviceMatrix, x: Tensor, index: Tensor) -> Tensor:
    """Multiply each token by its experts' matrices; [T * k, R] float32. Rows without an expert are not written."""
    out = torch.empty((index.numel(), matrix.shape[1]), dtype=torch.float32, device=x.device)
    kernels_of(matrix.kind).project(matrix, x, index, out)
    return out

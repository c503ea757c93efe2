"""Layers of experts with code of their own between and behind their products: biases, clamps, norms.

Each slot, a token and one of its experts, is a row of every product. The kernels read the router's tensors on the
device, so nothing synchronizes and calls can be captured in a CUDA graph. Many tokens use `grouped`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moepack.backends.base import Between
from moepack.backends.gpu.families import kernels_of
from moepack.backends.gpu.matrix import DeviceMatrix

__all__ = ["experts"]


def experts(matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, weights: Tensor, code: Between) -> Tensor:
    """Sum the outputs of each token's experts; arguments and result as in `Backend.own_experts`, on one GPU."""
    slots, count = index.reshape(-1), matrices[0].shape[0]
    exists = (slots >= 0) & (slots < count)
    expert = torch.where(exists, slots, 0)
    *first, last = matrices
    inner = code.between([_product(matrix, x, index) for matrix in first], expert)
    outputs = code.behind(_product(last, inner.contiguous(), slots[:, None]), expert)
    weighted = torch.where(exists[:, None], outputs * weights.reshape(-1, 1), 0)
    return weighted.view(*index.shape, -1).sum(1)


def _product(matrix: DeviceMatrix, x: Tensor, index: Tensor) -> Tensor:
    """Multiply each token by the matrices of its experts; [T * k, R] float32, zeros for experts that do not exist."""
    out = torch.zeros((index.numel(), matrix.shape[1]), dtype=torch.float32, device=x.device)
    kernels_of(matrix.kind).project(matrix, x, index, out)
    return out

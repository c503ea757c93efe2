"""Gradients through packed weights: to activations, and to the weights that a router gives its experts.

Packed weights have no gradient themselves: what is trained stands beside them (LoRA). The gradient of y = W x is W^T g,
which the backend computes from the packed bytes (`Backend.transposed`); a compute mode that rounds activations or
weights counts as one that does not. A layer of experts keeps nothing but its inputs for the backward pass, which
computes the products between them again: one layer at a time is in memory, and experts on disk are read again.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moepack.runtime.backends import Matrix, backend_for

__all__ = ["grouped", "linear", "recomputed"]

Parts = Callable[..., Iterable[Tensor]]
"""Gives the parts that an output is the sum of, by operations of torch and the products of this module."""


def linear(matrix: Matrix, x: Tensor, mode: str | None) -> Tensor:
    """Multiply x [N, C] by the one expert of a matrix, to [N, R] float32; see `Backend.linear`."""
    return _product(matrix, x, None, mode)


def grouped(x: Tensor, offsets: Tensor, *, matrix: Matrix, mode: str | None) -> Tensor:
    """Multiply x [N, C], sorted by expert, by a matrix, to [N, R] float32; see `Backend.grouped`."""
    return _product(matrix, x, offsets, mode)


def recomputed(forward: Callable[..., Tensor], parts: Parts, *inputs: Tensor) -> Tensor:
    """Call a function on its inputs; where a gradient is asked for, the backward pass computes it again, in parts.

    Args:
        forward: computes the output outside autograd.
        parts: gives the parts of the same output, for the same inputs; one at a time is in memory. Parameters that it
            reads get their gradients too.
        inputs: tensors of any dtype.
    """
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
        return forward(*inputs)
    output: Tensor = _Recomputed.apply(forward, parts, *inputs)
    return output


def _product(matrix: Matrix, x: Tensor, offsets: Tensor | None, mode: str | None) -> Tensor:
    if not (torch.is_grad_enabled() and x.requires_grad):
        return _multiply(matrix, x, offsets, mode)
    product: Tensor = _Product.apply(matrix, x, offsets, mode)
    return product


def _multiply(matrix: Matrix, x: Tensor, offsets: Tensor | None, mode: str | None) -> Tensor:
    backend = backend_for(x.device)
    return backend.linear(matrix, x, mode) if offsets is None else backend.grouped(matrix, x, offsets, mode)


class _Product(torch.autograd.Function):
    """y = W x, each row by its own expert."""

    @staticmethod
    def forward(ctx: Any, matrix: Matrix, x: Tensor, offsets: Tensor | None, mode: str | None) -> Tensor:
        ctx.matrix, ctx.offsets, ctx.dtype = matrix, offsets, x.dtype
        return _multiply(matrix, x, offsets, mode)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found = backend_for(gradient.device).transposed(ctx.matrix, gradient, ctx.offsets)
        return None, found.to(ctx.dtype), None, None


class _Recomputed(torch.autograd.Function):
    """A function whose backward pass computes it again; see `recomputed`."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Tensor], parts: Parts, *inputs: Tensor) -> Tensor:
        ctx.parts = parts
        ctx.save_for_backward(*inputs)
        return forward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        needed = ctx.needs_input_grad[2:]
        leaves = [tensor.detach().requires_grad_(need) for tensor, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            for part in ctx.parts(*leaves):
                if part.requires_grad:
                    torch.autograd.backward(part, gradient.to(part.dtype))
        return None, None, *(leaf.grad for leaf in leaves)

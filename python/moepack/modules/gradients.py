"""Gradients through packed weights: to activations and to the routing weights of experts.

Packed weights have no gradients; trainable parameters are separate (LoRA). The gradient of y = W x is W^T g, which the
backend computes from the packed bytes (`Backend.transposed`). The gradient treats compute modes that round activations
or weights as if they did not. A layer of experts saves only its inputs. Its backward pass recomputes the intermediate
products, so memory holds those of one layer at a time, and experts on disk are read again.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moepack.backends import Matrix, backend_for

__all__ = ["grouped", "linear", "recomputed"]

Parts = Callable[..., Iterable[Tensor]]
"""Yields the terms of an output, computed by torch operations and the products of this module."""


def linear(matrix: Matrix, x: Tensor, mode: str | None) -> Tensor:
    """Multiply x [N, C] by a matrix of one expert; return [N, R] float32. See `Backend.linear`."""
    return _product(matrix, x, None, mode)


def grouped(x: Tensor, offsets: Tensor, *, matrix: Matrix, mode: str | None) -> Tensor:
    """Multiply x [N, C], sorted by expert, by a matrix; return [N, R] float32. See `Backend.grouped`."""
    return _product(matrix, x, offsets, mode)


def recomputed(forward: Callable[..., Tensor], parts: Parts, *inputs: Tensor) -> Tensor:
    """Call a function; if gradients are enabled, the backward pass recomputes it term by term.

    Args:
        forward: computes the output outside autograd.
        parts: yields the terms of the same output for the same inputs; one term is in memory at a time. Parameters that
            it reads receive gradients, too.
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
    """y = W x, with the expert of each row."""

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
    """A function that is recomputed in the backward pass; see `recomputed`."""

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

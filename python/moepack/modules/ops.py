"""Packed products as torch operators, for `torch.compile` and `torch.export`.

A compiler cannot trace into packed bytes: it traces a model with tensors that have no storage, and its output must not
depend on Python objects. Each product is therefore one operator on tensors, numbers and names. The packed bytes are an
argument, and the operator looks up the matrix that is open over them (`store.matrix_over`). Outside of compiled code,
modules call their backend directly.

Backward passes are compiled ahead of time, too. The fused experts operator has none; if gradients are needed, modules
compile single products instead.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moepack.backends import Activation, backend_for, is_silu
from moepack.backends.cpu import views
from moepack.stores.mapped import matrix_over

__all__ = ["activation_name", "embedding", "experts", "grouped", "linear"]

_torch: Any = torch.library  # its functions are untyped
_library = _torch.Library("moepack", "DEF")
_library.define("linear(Tensor x, Tensor data, SymInt rows, str? mode) -> Tensor")
_library.define("grouped(Tensor x, Tensor offsets, Tensor data, SymInt rows, str? mode) -> Tensor")
_library.define(
    "experts(Tensor x, Tensor index, Tensor weights, Tensor[] data, SymInt rows, str activation, str? mode) -> Tensor"
)
_library.define("embedding(Tensor index, Tensor data, SymInt columns, ScalarType dtype) -> Tensor")
_library.define("transposed(Tensor y, Tensor? offsets, Tensor data, SymInt columns) -> Tensor")

_activations: dict[str, Activation] = {"silu": functional.silu}


def activation_name(activation: Activation) -> str:
    """Return the name by which operators look up an activation; it is the same in every process."""
    if is_silu(activation):
        return "silu"
    name: str = getattr(activation, "__qualname__", None) or repr(activation)
    _activations[name] = activation
    return name


def linear(x: Tensor, data: Tensor, rows: int, mode: str | None) -> Tensor:
    """Multiply x [N, C] by the packed matrix in `data`; return [N, rows] float32. See `Backend.linear`."""
    product: Tensor = torch.ops.moepack.linear(x, data, rows, mode)
    return product


def grouped(x: Tensor, offsets: Tensor, data: Tensor, rows: int, mode: str | None) -> Tensor:
    """Multiply x [N, C], sorted by expert, by the packed matrices in `data`, to [N, rows]. See `Backend.grouped`."""
    product: Tensor = torch.ops.moepack.grouped(x, offsets, data, rows, mode)
    return product


def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    data: Sequence[Tensor],
    rows: int,
    activation: str,
    mode: str | None,
) -> Tensor:
    """Sum the outputs of each token's experts; return [T, rows] float32. See `Backend.experts`.

    Args:
        x: [T, H].
        index: [T, k].
        weights: [T, k].
        data: the packed bytes of the projections, in order of computation.
        rows: output rows of the last projection.
        activation: the activation's name (`activation_name`).
        mode: a compute mode, or None.
    """
    outputs: Tensor = torch.ops.moepack.experts(x, index, weights, list(data), rows, activation, mode)
    return outputs


def embedding(index: Tensor, data: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Look up rows of the packed matrix in `data` by an index [...]; return [..., columns] in `dtype`."""
    found: Tensor = torch.ops.moepack.embedding(index, data, columns, dtype)
    return found


def _linear(x: Tensor, data: Tensor, rows: int, mode: str | None) -> Tensor:
    return backend_for(x.device).linear(matrix_over(data), x, mode)


def _grouped(x: Tensor, offsets: Tensor, data: Tensor, rows: int, mode: str | None) -> Tensor:
    return backend_for(x.device).grouped(matrix_over(data), x, offsets, mode)


def _experts(
    x: Tensor, index: Tensor, weights: Tensor, data: list[Tensor], rows: int, activation: str, mode: str | None
) -> Tensor:
    matrices = [matrix_over(bytes_) for bytes_ in data]
    return backend_for(x.device).experts(matrices, x, index, weights, _activations[activation], mode)


def _embedding(index: Tensor, data: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return views.rows(matrix_over(data), index, dtype)


def _transposed(y: Tensor, offsets: Tensor | None, data: Tensor, columns: int) -> Tensor:
    return backend_for(y.device).transposed(matrix_over(data), y, offsets)


def _linear_fake(x: Tensor, data: Tensor, rows: int, mode: str | None) -> Tensor:
    return x.new_empty((x.shape[0], rows), dtype=torch.float32)


def _grouped_fake(x: Tensor, offsets: Tensor, data: Tensor, rows: int, mode: str | None) -> Tensor:
    return x.new_empty((x.shape[0], rows), dtype=torch.float32)


def _experts_fake(
    x: Tensor, index: Tensor, weights: Tensor, data: list[Tensor], rows: int, activation: str, mode: str | None
) -> Tensor:
    return x.new_empty((x.shape[0], rows), dtype=torch.float32)


def _embedding_fake(index: Tensor, data: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return index.new_empty((*index.shape, columns), dtype=dtype)


def _transposed_fake(y: Tensor, offsets: Tensor | None, data: Tensor, columns: int) -> Tensor:
    return y.new_empty((y.shape[0], columns), dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what the gradients of `linear` and `grouped` need."""
    x, *offsets, data, _, _ = inputs
    ctx.offsets, ctx.data, ctx.like = (offsets[0] if offsets else None), data, (x.dtype, x.shape[1])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradient of the activations, W^T g."""
    dtype, columns = ctx.like
    found = torch.ops.moepack.transposed(gradient, ctx.offsets, ctx.data, columns).to(dtype)
    return (found, *([None] * (3 if ctx.offsets is None else 4)))


def _refuse(ctx: Any, gradient: Tensor) -> None:
    raise RuntimeError("the fused experts operator has no gradient; use single products")


def _install(name: str, function: Any, fake: Any, backward: Any = None, remember: Any = None) -> None:
    """Register an operator's CPU and GPU implementations, its shape function and its gradient."""
    for device in ("CPU", "CUDA"):
        _library.impl(name, function, device)
    _torch.register_fake(f"moepack::{name}", fake, lib=_library)
    if backward is not None:
        _torch.register_autograd(f"moepack::{name}", backward, setup_context=remember, lib=_library)


_install("linear", _linear, _linear_fake, _backward, _remember)
_install("grouped", _grouped, _grouped_fake, _backward, _remember)
_install("experts", _experts, _experts_fake, _refuse)
_install("embedding", _embedding, _embedding_fake)
_install("transposed", _transposed, _transposed_fake)

"""CPU tensors as arrays for the core: float32, or the bits of bfloat16, sharing memory.

In addition to activations, this covers the parts from which `moepack.decoding.translation` builds a
decoder of the core.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moepack._core import Decoder, DenseMatrix, PackedTensor, RecordMemory, StreamedChannels
from moepack.backends.base import Matrix
from moepack.backends.compute import product_mode
from moepack.errors import LoadError
from moepack.registry import Activations

__all__ = [
    "FLOATS",
    "Decoder",
    "RecordMemory",
    "StreamedChannels",
    "activations",
    "decode",
    "decoded",
    "dense_matrix",
    "dense_product",
    "expert_payloads",
    "first_sequence",
    "packed_matrix",
    "rows",
    "state_arrays",
    "vector",
]

FLOATS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16}
"""The dtypes that the core accepts, and the dtypes by which NumPy represents them."""


def activations(x: Tensor) -> Activations:
    """Convert a tensor for kernels: bfloat16 is viewed, other dtypes become float32."""
    if x.dtype == torch.bfloat16:
        bits: NDArray[np.uint16] = x.contiguous().view(torch.uint16).numpy()
        return bits
    values: NDArray[np.float32] = x.float().contiguous().numpy()
    return values


def vector(tensor: Tensor) -> NDArray[Any]:
    """View a contiguous tensor with a dtype of `FLOATS` as one row, detached from autograd."""
    return tensor.detach().view(FLOATS[tensor.dtype]).numpy().reshape(-1)


def dense_matrix(weight: Tensor) -> DenseMatrix:
    """View a contiguous matrix with a dtype of `FLOATS`."""
    data = weight.detach().view(torch.uint8).numpy().reshape(-1)
    return DenseMatrix(data, str(weight.dtype).removeprefix("torch."), *weight.shape)


def packed_matrix(matrix: Matrix, mode: str | None) -> tuple[PackedTensor, str | None] | None:
    """Return a matrix and its compute mode; None if the core does not know the format."""
    return (matrix, product_mode(matrix, mode)) if isinstance(matrix, PackedTensor) else None


def decoded(matrix: Any, dtype: torch.dtype) -> NDArray[Any]:
    """Decode a packed matrix to one row, in a dtype of `FLOATS`."""
    return np.ascontiguousarray(matrix.dequantize(str(dtype).removeprefix("torch."))).reshape(-1)


def rows(matrix: Matrix, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Look up rows of a packed matrix by an index [...]; return [..., C] in `dtype`.

    Raises:
        LoadError: the format is not one of the core's.
        ValueError: an index is out of range, or the format does not support lookup.
    """
    if not isinstance(matrix, PackedTensor):
        raise LoadError(f"the format {matrix.format} does not support row lookup")
    flat = index.reshape(-1).long().numpy()
    if dtype == torch.bfloat16:
        found = torch.from_numpy(matrix.look_up(flat, "bfloat16")).view(dtype)
    else:
        found = torch.from_numpy(matrix.look_up(flat)).to(dtype)
    return found.view(*index.shape, matrix.shape[2])


def expert_payloads(matrix: Matrix) -> NDArray[np.int64]:
    """Return the byte range of each expert's codes in a packed tensor, [E, 2]; empty ranges if unknown to the core."""
    return matrix.payloads() if isinstance(matrix, PackedTensor) else np.zeros((matrix.shape[0], 2), np.int64)


def dense_product(matrix: DenseMatrix, x: Tensor) -> Tensor:
    """Multiply x [N, C] by a dense matrix; return [N, R] float32."""
    return torch.from_numpy(matrix.matmul(activations(x)))


def first_sequence(keys: Tensor, values: Tensor) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """View the first sequence of buffers [batch, heads, capacity, width]; None if the core cannot read them."""
    kind = {**FLOATS, torch.int8: torch.int8}.get(keys.dtype)
    if kind is None or keys.dtype != values.dtype or keys.device.type != "cpu" or keys.requires_grad:
        return None
    return np.asarray(keys[0].view(kind).numpy()), np.asarray(values[0].view(kind).numpy())


def state_arrays(window: Tensor, state: Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
    """View contiguous tensors: convolution inputs [1, channels, tokens] and a state [1, heads, keys, values]."""
    return np.asarray(window.view(FLOATS[window.dtype]).numpy()), np.asarray(state[0].numpy())


def decode(decoder: Decoder, hidden: Tensor, position: int, caches: list[Any]) -> Tensor:
    """Run one token, hidden [1, H], through all layers after the tokens in the caches; return [1, H] in its dtype."""
    return torch.from_numpy(decoder.step(activations(hidden), position, caches)).to(hidden.dtype)

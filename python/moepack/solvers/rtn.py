"""Round-to-nearest on QMoE's row-wise ternary grid (QMoE, section 4.1: `{w_min, 0, w_max}`).

The grid of a row is its minimum, zero and its maximum, with the range extended to include zero (a row of positive
weights has the levels 0 and max). A weight above max/2 becomes max, one below min/2 becomes min, the rest zero; a
weight exactly half-way becomes zero.

The codes follow from the exact minimum and maximum. The levels are then rounded to bfloat16, because the paper stores
bfloat16, and two 16-bit levels already take 5% of a packed row of 768 weights. For bf16 weights nothing is rounded.
"""

from typing import overload

import numpy as np
import numpy.typing as npt
import torch

from moepack.arrays import as_tensor
from moepack.errors import InvalidTensorError
from moepack.precision import single_precision
from moepack.solvers.chunks import row_chunks

__all__ = ["quantize_ternary"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@overload
def quantize_ternary(
    weight: torch.Tensor, *, level_dtype: torch.dtype = ..., name: str | None = ...
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def quantize_ternary(
    weight: npt.NDArray[np.floating], *, level_dtype: torch.dtype = ..., name: str | None = ...
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]: ...


@single_precision()
def quantize_ternary(
    weight: torch.Tensor | npt.NDArray[np.floating],
    *,
    level_dtype: torch.dtype = torch.bfloat16,
    name: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Quantize a matrix, or a stack of matrices, to three levels per row.

    Args:
        weight: `[..., R, C]`, bf16, f16, f32 or f64; torch or numpy, on any device, contiguous or not.
        level_dtype: dtype to which the levels are rounded: bfloat16 (default), float16 or float32.
        name: the tensor's name, for the error.

    Returns:
        codes: `[..., R, C]` int8: -1 for the row's negative level, 0 for zero, 1 for its positive level.
        levels: `[..., R, 2]` float32, each row's (negative, positive) with negative <= 0 <= positive, exactly
            representable in `level_dtype`. Both are in the same library and on the same device as `weight`.

    Raises:
        InvalidTensorError: the weight contains NaN or infinity, is not a stack of matrices, is not dense, does not have
            a floating-point dtype, or has a level out of range of `level_dtype`.
        TypeError: `weight` is neither a torch tensor nor a numpy array.
    """
    values = as_tensor(weight, "weight" if name is None else f"weight '{name}'")
    _check(values, level_dtype, name)
    codes, levels = _quantize(values, level_dtype, name)
    return (codes.numpy(), levels.numpy()) if isinstance(weight, np.ndarray) else (codes, levels)


def _check(weight: torch.Tensor, level_dtype: torch.dtype, name: str | None) -> None:
    if level_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"level_dtype must be bfloat16, float16 or float32, got {level_dtype}")
    if weight.dtype not in _FLOATS:
        raise InvalidTensorError(f"has dtype {weight.dtype}, expected a floating-point dtype", tensor=name)
    if weight.ndim < 2:
        raise InvalidTensorError(f"has shape {list(weight.shape)}, expected [..., rows, columns]", tensor=name)


def _quantize(weight: torch.Tensor, level_dtype: torch.dtype, name: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a checked tensor, a few rows at a time."""
    codes = torch.zeros(weight.shape, dtype=torch.int8, device=weight.device)
    levels = torch.zeros((*weight.shape[:-1], 2), dtype=torch.float32, device=weight.device)
    for matrix, rows in row_chunks(tuple(weight.shape)):
        chunk = weight[matrix][rows]
        values = chunk if chunk.dtype == torch.float64 else chunk.float()
        # Two passes: torch's aminmax is 30 times slower than amin or amax along the last dimension.
        low = values.amin(dim=-1, keepdim=True).clamp(max=0)
        high = values.amax(dim=-1, keepdim=True).clamp(min=0)
        rounded = torch.cat((low, high), dim=-1).to(level_dtype).float()
        if not bool(rounded.isfinite().all()):
            raise _not_finite(values, rounded, [*matrix, rows.start], level_dtype, name)
        codes[matrix][rows] = (values > high / 2).view(torch.int8) - (values < low / 2).view(torch.int8)
        levels[matrix][rows] = rounded
    return codes, levels


def _not_finite(
    values: torch.Tensor,
    rounded: torch.Tensor,
    first: list[int],
    level_dtype: torch.dtype,
    name: str | None,
) -> InvalidTensorError:
    """Return the error for a chunk with a non-finite level; `first` is the position of its first row."""
    row = int((~rounded.isfinite()).any(dim=-1).nonzero()[0])
    place = [*first[:-1], first[-1] + row]
    bad = (~values[row].isfinite()).nonzero()
    if len(bad):
        column = int(bad[0])
        return InvalidTensorError(f"holds {float(values[row, column])} at {[*place, column]}", tensor=name)
    return InvalidTensorError(f"row {place} has a level out of range of {level_dtype}", tensor=name)

"""Round-to-nearest on uniform grids with a scale per group of columns (FineQuant, sections 3.1 and 3.2).

A weight is `scale * (code - 2^(bits - 1))` (symmetric) or `scale * code + offset`. The paper's scale is `2 amax /
(2^bits - 1)`, and the paper truncates; here weights are rounded, which halves the error. With `search` (the default),
the scale is the best of a ladder of scales by squared error. For given codes q the best scale is the projection `<w, q>
/ <q, q>`, which explains `<w, q>^2 / <q, q>` of the group's energy. So each ladder step only proposes codes, and is
judged with the scale that fits them best. Symmetric grids have one more negative code than positive ones, so scales of
both signs are tried: the side that needs the outermost code gets it.

Scales and offsets are rounded to the stored dtype before the codes are chosen, so a reader reconstructs exactly the
judged values. Groups are first normalized by their largest magnitude, so that no sum overflows for any unit of the
weights.

Shapes: `[..., R, C]` weights, G = ceil(C / group size) groups per row; the last group may be short.
"""

from collections.abc import Collection, Iterator
from numbers import Integral
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack import _core
from moepack.arrays import AnyTensor, as_tensor
from moepack.errors import InvalidTensorError
from moepack.precision import single_precision
from moepack.solvers.chunks import row_chunks
from moepack.solvers.widths import BITS, GROUP_SIZES

__all__ = ["GroupwiseCodes", "check_grid", "group_values", "quantize_groupwise"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_PARAMETERS = (torch.float16, torch.bfloat16)

_REACH = {2: (0.5, 1.6, 12), 3: (0.8, 1.7, 10), 4: (0.875, 1.5, 11), 8: (0.98, 1.06, 8)}
"""The ladder by bits: first step, last step and number of steps. At step t the largest weight is mapped to t times the
outermost code: below 1 no weight is clipped; above 1 the largest weights are clipped, for a finer grid."""


class GroupwiseCodes(NamedTuple):
    """A quantized tensor.

    Attributes:
        codes: `[..., R, C]` uint8, below 2^bits.
        scales: `[..., R, G]` float32, exactly representable in the stored dtype; may be negative.
        offsets: `[..., R, G]` float32, likewise, or None for a symmetric grid.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None


class GroupwiseArrays(NamedTuple):
    """Codes and parameters as in `GroupwiseCodes`, as NumPy arrays."""

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    offsets: npt.NDArray[np.float32] | None


@overload
def quantize_groupwise(
    weight: Tensor,
    bits: int = ...,
    group_size: int | None = ...,
    *,
    symmetric: bool = ...,
    search: bool = ...,
    dtype: torch.dtype = ...,
    name: str | None = ...,
) -> GroupwiseCodes: ...
@overload
def quantize_groupwise(
    weight: npt.NDArray[Any],
    bits: int = ...,
    group_size: int | None = ...,
    *,
    symmetric: bool = ...,
    search: bool = ...,
    dtype: torch.dtype = ...,
    name: str | None = ...,
) -> GroupwiseArrays: ...


@single_precision()
def quantize_groupwise(
    weight: AnyTensor,
    bits: int = 4,
    group_size: int | None = 64,
    *,
    symmetric: bool = True,
    search: bool = True,
    dtype: torch.dtype = torch.float16,
    name: str | None = None,
) -> GroupwiseCodes | GroupwiseArrays:
    """Quantize a matrix, or a stack of matrices, in groups of columns.

    Args:
        weight: `[..., R, C]`, bf16, f16, f32 or f64; torch or numpy. Computed in float32.
        bits: 2, 3, 4 or 8.
        group_size: 16, 32, 64, 128 or 256 columns that share a scale; None for the whole row.
        symmetric: one scale per group; otherwise a scale and an offset.
        search: find the scale with the least squared error; otherwise compute it from the largest magnitude, as in the
            paper, or from minimum and maximum.
        dtype: dtype of the stored parameters, float16 or bfloat16. Below 6e-5 a float16 scale loses precision, and
            below 3e-8 its group (or its offset) becomes zero.
        name: the tensor's name, for errors.

    Returns:
        Codes and parameters, in the library and on the device of `weight`. A group of zeros has scale zero.

    Raises:
        InvalidTensorError: the weight contains NaN or infinity, is not a stack of matrices, is not dense, does not have
            a floating-point dtype, or needs a parameter out of range of `dtype`.
        ValueError: the grid is not supported.
        TypeError: `weight` is neither a torch tensor nor a numpy array.
    """
    check_grid(bits, group_size)
    if dtype not in _PARAMETERS:
        raise ValueError(f"parameters must be float16 or bfloat16, not {dtype}")
    values = _matrices(weight, name)
    width = values.shape[-1] if group_size is None else group_size
    groups = -(-values.shape[-1] // width) if width else 0
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    scales = torch.zeros((*values.shape[:-1], groups), device=values.device)
    offsets = None if symmetric else torch.zeros_like(scales)
    for matrix, rows in row_chunks(tuple(values.shape)):
        chunk = values[matrix][rows].float().contiguous()  # so that the order of sums does not depend on the layout
        if not bool(chunk.isfinite().all()):
            raise _not_finite(chunk, [*matrix, rows.start], name)
        for columns, places in _pieces(values.shape[-1], width):
            part = chunk[:, columns].reshape(len(chunk), places.stop - places.start, -1)
            fit = _symmetric(part, bits, search, dtype) if offsets is None else _affine(part, bits, search, dtype)
            codes[matrix][rows, columns] = fit.codes.flatten(1)
            scales[matrix][rows, places] = fit.scales
            if offsets is not None and fit.offsets is not None:
                offsets[matrix][rows, places] = fit.offsets
    found = GroupwiseCodes(codes, scales, offsets)
    _check_range(found, dtype, name)
    if isinstance(weight, Tensor):
        return found
    return GroupwiseArrays(codes.numpy(), scales.numpy(), None if offsets is None else offsets.numpy())


def _check_range(codes: GroupwiseCodes, dtype: torch.dtype, name: str | None) -> None:
    """Raise an error for parameters that exceed their dtype; names the first such group."""
    for kind, stored in (("scale", codes.scales), ("offset", codes.offsets)):
        if stored is not None and not bool(stored.isfinite().all()):
            place = (~stored.isfinite()).nonzero()[0].tolist()
            raise InvalidTensorError(f"the {kind} of group {place} is out of range of {dtype}", tensor=name)


def _matrices(weight: AnyTensor, name: str | None) -> Tensor:
    """Return the weight as a tensor of floating-point matrices."""
    values = as_tensor(weight, "weight" if name is None else f"weight '{name}'")
    if values.dtype not in _FLOATS:
        raise InvalidTensorError(f"has dtype {values.dtype}, expected a floating-point dtype", tensor=name)
    if values.ndim < 2:
        raise InvalidTensorError(f"has shape {list(values.shape)}, expected [..., rows, columns]", tensor=name)
    return values


def check_grid(bits: int, group_size: int | None) -> None:
    """Raise `ValueError` unless a format with these bits and this group size exists (None: the whole row)."""
    if not _is_one(bits, BITS):
        raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}, not {bits!r}")
    if group_size is not None and not _is_one(group_size, GROUP_SIZES):
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise ValueError(f"the group size must be one of {sizes} or the whole row, not {group_size!r}")


def _is_one(value: object, allowed: Collection[int]) -> bool:
    return isinstance(value, Integral) and value in allowed


def group_values(found: GroupwiseCodes, bits: int, group_size: int | None) -> Tensor:
    """Return the dequantized values `[..., R, C]` float32."""
    columns, values = found.codes.shape[-1], found.codes.float()
    for own, places in _pieces(columns, group_size or max(columns, 1)):
        groups = places.stop - places.start
        parts = values[..., own].view(*values.shape[:-1], groups, (own.stop - own.start) // groups)
        scales = found.scales[..., places, None]
        if found.offsets is None:
            parts.sub_(float(2 ** (bits - 1))).mul_(scales)
        else:
            parts.mul_(scales).add_(found.offsets[..., places, None])
    return values


def _pieces(columns: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Yield columns and groups of all full groups together, then of the short one."""
    full = columns // width
    if full:
        yield slice(0, full * width), slice(0, full)
    if full * width < columns:
        yield slice(full * width, columns), slice(full, full + 1)


def _symmetric(values: Tensor, bits: int, search: bool, dtype: torch.dtype) -> GroupwiseCodes:
    """Quantize groups `[R, G, width]` with a scale."""
    half = 2 ** (bits - 1)
    if search and values.device.type == "cpu":
        scales = _searched(values, bits)
    else:
        largest = values.abs().amax(-1)
        unit = torch.where(largest > 0, largest, torch.ones_like(largest))
        best = _best_scale(values / unit[..., None], bits) if search else None
        scales = largest * (2 / (2**bits - 1)) if best is None else unit * best
    scales = scales.to(dtype).float()
    divisor = torch.where(scales != 0, scales, torch.full_like(scales, torch.inf))
    codes = (values / divisor[..., None]).round_().clamp_(-half, half - 1).add_(half)
    return GroupwiseCodes(codes.to(torch.uint8), scales, None)


def _ladder(bits: int) -> list[float]:
    """Return the factors of normalized weights that are tried, of both signs."""
    half = 2 ** (bits - 1)
    return [sign * step * half for step in torch.linspace(*_REACH[bits]).tolist() for sign in (-1.0, 1.0)]


def _searched(values: Tensor, bits: int) -> Tensor:
    """Return the scale of each group that explains most of its energy, [R, G]: `_best_scale` on the CPU.

    Sums are added in another order, so that another of two equally good scales may win. The core takes a pass over the
    weights, torch one for each operation.
    """
    half, rows = 2 ** (bits - 1), values.flatten(1).contiguous()
    factors = torch.tensor(_ladder(bits), dtype=torch.float32).numpy()
    found = _core.search_scales(rows.numpy(), values.shape[-1], factors, codes=(-half, half - 1))
    return torch.from_numpy(found)


def _best_scale(values: Tensor, bits: int) -> Tensor:
    """Return the scale of each normalized group that explains most of its energy."""
    half = 2 ** (bits - 1)
    best = torch.zeros_like(values[..., 0])
    scale = torch.zeros_like(best)
    for factor in _ladder(bits):
        codes = (values * factor).round_().clamp_(-half, half - 1)
        energy = codes.square().sum(-1).clamp_(min=1)
        share = (codes * values).sum(-1)
        explained = share.square() / energy
        better = explained > best
        scale = torch.where(better, share / energy, scale)
        best = torch.where(better, explained, best)
    return scale


def _affine(values: Tensor, bits: int, search: bool, dtype: torch.dtype) -> GroupwiseCodes:
    """Quantize groups `[R, G, width]` with a scale and an offset."""
    top = 2**bits - 1
    low, high = values.amin(-1), values.amax(-1)
    # Halve first: the range of finite weights may overflow.
    unit = torch.maximum(high / 2 - low / 2, torch.full_like(low, torch.finfo(torch.float32).tiny))
    middle = low / 2 + high / 2
    normalized = (values / 2 - middle[..., None] / 2) / (unit[..., None] / 2)
    scale, offset = torch.full_like(low, 2 / top), torch.full_like(low, -1.0)
    if search:
        scale, offset = _best_line(normalized, bits)
    scales = (scale * unit).to(dtype).float()
    scales = torch.where(high > low, scales, torch.zeros_like(scales))
    offsets = torch.where(high > low, offset * unit + middle, low).to(dtype).float()
    divisor = torch.where(scales != 0, scales, torch.full_like(scales, torch.inf))
    codes = ((values - offsets[..., None]) / divisor[..., None]).round_().clamp_(0, top)
    return GroupwiseCodes(codes.to(torch.uint8), scales, offsets)


def _best_line(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return scale and offset of each group of values in [-1, 1] that explain most of its variance."""
    top = 2**bits - 1
    mean = values.mean(-1)
    centred = values - mean[..., None]
    best = torch.full_like(mean, -1.0)
    scale, offset = torch.zeros_like(mean), mean.clone()
    for step in torch.linspace(1.0, _REACH[bits][1], _REACH[bits][2]).tolist():
        codes = (values * (0.5 * top * step)).add_(0.5 * top).round_().clamp_(0, top)
        average = codes.mean(-1)
        codes -= average[..., None]
        energy = codes.square().sum(-1)
        share = (codes * centred).sum(-1)
        slope = share / energy.clamp(min=1e-6)
        explained = share * slope
        better = explained > best
        scale = torch.where(better, slope, scale)
        offset = torch.where(better, mean - slope * average, offset)
        best = torch.where(better, explained, best)
    return scale, offset


def _not_finite(values: Tensor, first: list[int], name: str | None) -> InvalidTensorError:
    row, column = (~values.isfinite()).nonzero()[0].tolist()
    place = [*first[:-1], first[-1] + row, column]
    return InvalidTensorError(f"holds {float(values[row, column])} at {place}", tensor=name)

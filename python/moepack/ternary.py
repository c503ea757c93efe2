"""Encoded ternary tensors: at most three values per row, stored in well under one bit per weight if most are zero.

`encode_ternary` accepts codes with levels, or values that are already ternary, and is exact. (`quantize_ternary`
converts any weight to ternary rows.) A `TernaryTensor` wraps one packed blob, a flat array of bytes that the kernels
read in place, in memory or in a mapped file.

A `TernaryTensor` has the invariants of `BlobTensor`; the blob's offsets and levels have also been checked.
"""

import numpy as np
import torch

from moepack import _core
from moepack.arrays import AnyTensor, as_tensor
from moepack.errors import InvalidTensorError
from moepack.solvers.chunks import row_chunks
from moepack.tensors import FLOATS, BlobTensor

__all__ = ["CODES", "TernaryTensor", "encode_ternary"]

CODES = ("fsv8", "dict16")
"""The entropy codes, the default first: moepack's byte code, and QMoE's 16-bit dictionary (section 4.3)."""


class TernaryTensor(BlobTensor):
    """An encoded ternary matrix of shape (R, C), or a stack of shape (E, R, C).

    Created by `encode_ternary` and `TernaryTensor.load`. Two tensors are equal if they have the same shape, codes and
    levels, independent of the entropy code. Instances can be pickled and copied.
    """

    kind = "ternary"

    @property
    def code(self) -> str:
        """The entropy code: "fsv8" or "dict16"."""
        return str(self._details["code"])

    @property
    def nonzeros(self) -> int:
        """Number of non-zero codes."""
        return int(self._details["nonzeros"])

    @property
    def levels(self) -> torch.Tensor:
        """The (negative, positive) levels of each row, float32 of shape (R, 2) or (E, R, 2)."""
        return self._parameters("levels")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TernaryTensor):
            return NotImplemented
        if np.array_equal(self._data, other._data):
            return True
        return (
            self.shape == other.shape
            and torch.equal(self.levels, other.levels)
            and torch.equal(self.decode(), other.decode())
        )

    def __repr__(self) -> str:
        return (
            f"TernaryTensor(shape={self.shape}, code='{self.code}', nbytes={self.nbytes}, "
            f"bits_per_weight={self.bits_per_weight:.4f})"
        )


def encode_ternary(tensor: AnyTensor, *, levels: AnyTensor | None = None, code: str = "fsv8") -> TernaryTensor:
    """Encode a ternary matrix or a stack of matrices exactly.

    Args:
        tensor: shape (R, C) or (E, R, C), torch or numpy. Either int8 codes in {-1, 0, 1}; or values (bf16, f16, f32,
            f64), of which each row has at most one distinct negative value, zero, and one distinct positive value.
            `quantize_ternary` computes codes and levels from any weight.
        levels: with codes: the (negative, positive) levels of each row, shape (R, 2) or (E, R, 2), finite,
            negative <= 0 <= positive, exactly representable in float32. With values: None.
        code: the entropy code: "fsv8" (default; one-byte codes), or "dict16" (the 16-bit
            dictionary codes of the QMoE paper).

    Returns:
        The encoded tensor, in memory. Negative zeros become zeros; all other values are preserved exactly.

    Raises:
        InvalidTensorError: (a ValueError) a row has more than three distinct values, or the codes, levels, shapes or
            dtypes are invalid.
        ValueError: `code` is unknown, or `levels` are given with values.
        TypeError: an argument is neither a torch tensor nor a numpy array.
    """
    if code not in CODES:
        raise ValueError(f"unknown code '{code}'; known are {', '.join(CODES)}")
    values = as_tensor(tensor).cpu()
    if values.ndim not in (2, 3):
        raise InvalidTensorError(f"expected a matrix or a stack of matrices, got shape {list(values.shape)}")
    if values.dtype == torch.int8:
        codes, pairs = _checked_codes(values), _checked_levels(levels, tuple(values.shape))
    elif values.dtype in FLOATS:
        if levels is not None:
            raise ValueError("levels belong to int8 codes; the levels of values are found in the values")
        codes, pairs = _recognise(values)
    else:
        raise InvalidTensorError(f"expected int8 codes or floating-point values, got {values.dtype}")
    experts = 1 if codes.ndim == 2 else codes.shape[0]
    blob = _core.encode_ternary(
        codes.reshape(experts, *codes.shape[-2:]).contiguous().numpy(),
        pairs.reshape(experts, codes.shape[-2], 2).contiguous().numpy(),
        ndim=codes.ndim,
        code=code,
    )
    return TernaryTensor(blob)


def _checked_codes(codes: torch.Tensor) -> torch.Tensor:
    for matrix, rows in row_chunks(tuple(codes.shape)):
        chunk = codes[matrix][rows]
        strange = ((chunk < -1) | (chunk > 1)).nonzero()
        if len(strange):
            row, column = (int(i) for i in strange[0])
            value = int(chunk[row, column])
            raise InvalidTensorError(f"{_row(matrix, rows.start + row)} holds the code {value}, not -1, 0 or 1")
    return codes


def _checked_levels(levels: AnyTensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the levels as float32, after checking shape, sign, finiteness and exactness."""
    if levels is None:
        raise InvalidTensorError("int8 codes need levels; quantize_ternary returns both")
    given = as_tensor(levels, "levels").cpu()
    if given.dtype not in FLOATS or tuple(given.shape) != (*shape[:-1], 2):
        raise InvalidTensorError(
            f"levels must be floating-point of shape {[*shape[:-1], 2]}, got {given.dtype} of {list(given.shape)}"
        )
    pairs = given.float() + 0.0
    wrong = {
        "not finite": ~given.isfinite(),
        "not exact in float32": pairs.to(given.dtype) != given,
        "not (negative, positive)": torch.stack((pairs[..., 0] > 0, pairs[..., 1] < 0), dim=-1),
    }
    for reason, mask in wrong.items():
        places = mask.any(dim=-1).nonzero()
        if len(places):
            *matrix, row = (int(i) for i in places[0])
            pair = given[(*matrix, row)].tolist()
            raise InvalidTensorError(f"{_row(tuple(matrix), row)} has the levels {pair}: {reason}")
    return pairs


def _recognise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and levels of values that are already ternary."""
    codes = torch.zeros(values.shape, dtype=torch.int8)
    levels = torch.zeros((*values.shape[:-1], 2), dtype=torch.float32)
    for matrix, rows in row_chunks(tuple(values.shape)):
        chunk = values[matrix][rows]
        # Comparisons are exact in both types: float32 represents every bf16 and f16.
        chunk = chunk if chunk.dtype == torch.float64 else chunk.float()
        low, high = chunk.amin(dim=-1, keepdim=True).clamp(max=0), chunk.amax(dim=-1, keepdim=True).clamp(min=0)
        pairs = torch.cat((low, high), dim=-1)
        positive, negative = (chunk == high) & (chunk > 0), (chunk == low) & (chunk < 0)
        exact = (pairs.float() == pairs) & pairs.isfinite()
        ternary = (positive | negative | (chunk == 0)).all(dim=-1) & exact.all(dim=-1)
        if not bool(ternary.all()):
            row = int((~ternary).nonzero()[0])
            raise InvalidTensorError(f"{_row(matrix, rows.start + row)} {_why_not_ternary(chunk[row])}")
        codes[matrix][rows] = positive.view(torch.int8) - negative.view(torch.int8)
        levels[matrix][rows] = pairs.float() + 0.0
    return codes, levels


def _why_not_ternary(row: torch.Tensor) -> str:
    """Describe why a row of shape (C,) cannot be encoded."""
    if not bool(row.isfinite().all()):
        return f"holds {float(row[~row.isfinite()][0])}"
    distinct = sorted(set(row.tolist()))
    negative, positive = sum(value < 0 for value in distinct), sum(value > 0 for value in distinct)
    if max(negative, positive) <= 1:
        return f"holds {distinct}, which float32 cannot represent exactly"
    zero = ", zero" if 0 in distinct else ""
    return (
        f"holds {len(distinct)} levels ({negative} negative{zero}, {positive} positive); a ternary row has at most one "
        "negative value, zero and one positive value. quantize_ternary makes ternary rows from any weight"
    )


def _row(matrix: tuple[int, ...], row: int) -> str:
    return f"row {row}" + "".join(f" of matrix {index}" for index in matrix)

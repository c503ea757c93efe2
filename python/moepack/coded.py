"""Coded tensors: integers with a uniform step, entropy coded at any number of bits per weight.

`CodedTensor.quantize` quantizes any weight to a size or with a step; `encode_coded` packs given integers exactly. A
`CodedTensor` wraps one packed blob, a flat array of bytes that the kernels read in place, in memory or in a mapped
file.

A `CodedTensor` has the invariants of `BlobTensor`.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
import torch

from moepack import _core
from moepack.arrays import AnyTensor, as_tensor
from moepack.errors import InvalidTensorError
from moepack.solvers.priced import (
    DENSE_BITS,
    DENSE_LARGEST,
    LARGEST,
    LEAST_DEPENDENT,
    MOST,
    NEARLY_ZERO,
    Lengths,
    Profile,
    coder_symbols,
    largest_at,
    least_spread,
    round_priced,
    scale_of,
    worth_of,
)
from moepack.tensors import FLOATS, IntegerTensor

__all__ = ["CodedTensor", "encode_coded"]

CODES = ("dependent", "plain")

LEAST_BITS, MOST_BITS = 0.4, 8.0
"""Range of requested bits per weight."""

NARROWEST, WIDEST, EXACT = 12.0, 6.0, 1 / 64
"""Range of the first search of a step, in octaves below and above the root mean square, and its precision."""

TRIALS, CLOSE = 10, 0.005
"""How often a tensor is encoded to find the step of a size; the share of the size that may remain unused."""

STEEP = 1.25
"""Octaves of the step per bit of a trial. An octave saves one bit at high rates and less at low rates."""

GREATEST = 1e19
"""The largest magnitude of a weight; the core computes squares in float32."""

_INTEGERS = (torch.int8, torch.int16, torch.int32)


class CodedTensor(IntegerTensor):
    """A matrix of entropy-coded integers of shape (R, C), or a stack of shape (E, R, C).

    A weight is `scale * code`, with one scale for the tensor or one per row; columns may have scales as well
    (docs/format.md, section 9). Created by `CodedTensor.quantize`, `encode_coded` and `CodedTensor.load`. Two tensors
    are equal if they have the same bytes. Instances can be pickled and copied.
    """

    kind = "coded"

    @classmethod
    def quantize(
        cls,
        weight: AnyTensor,
        bits_per_weight: float | None = None,
        *,
        step: float | None = None,
        codes: Literal["dependent", "plain"] = "dependent",
    ) -> Self:
        """Quantize and pack a matrix or a stack of matrices with one step, either to a size or with a given step.

        Each weight is rounded to the integer with the smallest sum of squared error and price of its code length.

        Args:
            weight: shape (R, C) or (E, R, C), floating point, finite.
            bits_per_weight: maximum size of the tensor in bits per weight, including all metadata, 0.4 to 8. The
                largest step within it is used.
            step: step of the quantizer, positive. Give either this or `bits_per_weight`.
            codes: "plain", or "dependent" for codes that have a fifth less squared error at equal bits and whose
                products are at most a sixth slower. Dependent codes are used from 1.25 to 5 bits per weight and for
                tensors without blocks of 16 rows that are nearly zero; all other tensors get plain codes.

        Raises:
            InvalidTensorError: (a ValueError) invalid weight, or weights too large for the step.
            ValueError: not exactly one of `bits_per_weight` and `step` is given, or one is out of range, or the
                metadata alone exceed the size.
        """
        if (bits_per_weight is None) == (step is None):
            raise ValueError("give either bits_per_weight or step")
        if codes not in CODES:
            raise ValueError(f"codes must be {' or '.join(CODES)}, not {codes}")
        source = _Source(as_tensor(weight, "weight"), dependent=codes == "dependent")
        if step is not None:
            if not (math.isfinite(step) and step > 0):
                raise ValueError(f"step must be positive and finite, not {step}")
            return cls(source.packed(step, source.kind_at(step)))
        assert bits_per_weight is not None
        if not LEAST_BITS <= bits_per_weight <= MOST_BITS:
            raise ValueError(f"bits_per_weight must be {LEAST_BITS} to {MOST_BITS:.0f}, not {bits_per_weight}")
        return cls(source.within(bits_per_weight))

    @property
    def symbols(self) -> str:
        """What the symbols stand for: "plain", "plain+1" to "plain+3" (with low bits), or "dependent"."""
        return str(self._details["symbols"])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored scales: bfloat16 or float32."""
        return torch.bfloat16 if self._details["dtype"] == "bfloat16" else torch.float32

    @property
    def scales(self) -> torch.Tensor:
        """The scales, float32: a scalar of shape (), or of shape (R,) or (E, R) with one scale per row."""
        with self._corruption():
            found = torch.from_numpy(self._blob.parameters("scales"))
        return found.reshape(self.shape[:-1] if self._details["row_scales"] else ())

    @property
    def column_scales(self) -> torch.Tensor | None:
        """The column scales, float32 of shape (1, C) or (E, C), or None."""
        if not self._details.get("column_scales", False):
            return None
        with self._corruption():
            return torch.from_numpy(self._blob.parameters("columns"))

    def decode(self) -> torch.Tensor:
        """Return the codes in the tensor's shape, int32.

        Raises:
            CorruptionError: the codes contradict the format.
        """
        with self._corruption():
            return torch.from_numpy(_core.decode_coded(self._data)).reshape(self.shape)

    def __repr__(self) -> str:
        return (
            f"CodedTensor(shape={self.shape}, symbols='{self.symbols}', nbytes={self.nbytes}, "
            f"bits_per_weight={self.bits_per_weight:.4f})"
        )


def encode_coded(
    codes: AnyTensor,
    scales: AnyTensor,
    *,
    columns: AnyTensor | None = None,
    symbols: str = "plain",
) -> CodedTensor:
    """Pack integers and scales exactly.

    Args:
        codes: int8, int16 or int32, shape (R, C) or (E, R, C), at most 2^30 in magnitude; torch or numpy.
        scales: one value for the tensor, shape () or (1,), or one per row, shape (R,) or (E, R); floating-point, finite
            and exact in float32.
        columns: column scales of shape (C,), or (1, C) or (E, C); as `scales`.
        symbols: "plain"; "plain+1" to "plain+3", with at most this number of uncompressed low bits per code; or
            "dependent", for codes that follow paths of states (docs/format.md, section 9).

    Raises:
        InvalidTensorError: (a ValueError) invalid codes, scales, shapes or dtypes.
        ValueError: unknown symbols.
        TypeError: an argument is neither a torch tensor nor a numpy array.
    """
    given = as_tensor(codes, "codes").cpu()
    if given.dtype not in _INTEGERS or given.ndim not in (2, 3):
        raise InvalidTensorError(
            f"codes must be int8, int16 or int32 [R, C] or [E, R, C], got {given.dtype} {list(given.shape)}"
        )
    experts, (rows, width) = 1 if given.ndim == 2 else given.shape[0], given.shape[-2:]
    rows_of, columns_of = _floats(scales, "scales"), None if columns is None else _floats(columns, "column scales")
    if tuple(rows_of.shape) not in {(), (1,), tuple(given.shape[:-1])}:
        raise InvalidTensorError(f"scales have shape {list(rows_of.shape)}, but codes have {list(given.shape)}")
    if columns_of is not None:
        if tuple(columns_of.shape) not in {(width,), (1, width), (experts, width)}:
            raise InvalidTensorError(
                f"column scales have shape {list(columns_of.shape)}, but codes have {list(given.shape)}"
            )
        columns_of = columns_of.reshape(-1, width)
    one = rows_of.ndim == 0 or rows_of.shape == (1,) != given.shape[:-1]
    stored = rows_of.reshape((1, 1) if one else (experts, rows))
    return CodedTensor(_encode(given, stored, columns_of, symbols))


def _floats(values: AnyTensor, what: str) -> torch.Tensor:
    given = as_tensor(values, what).cpu()
    if given.dtype not in FLOATS:
        raise InvalidTensorError(f"{what} must be floating-point, got {given.dtype}")
    if not bool((given.float().to(given.dtype) == given).all()) or not bool(given.isfinite().all()):
        raise InvalidTensorError(f"the {what} are not finite or not exact in float32")
    return given.float()


def _encode(
    codes: torch.Tensor, scales: torch.Tensor, columns: torch.Tensor | None, symbols: str
) -> npt.NDArray[np.uint8]:
    """Encode codes [R, C] or [E, R, C], scales [1, 1] or [E, R] and column scales."""
    experts = 1 if codes.ndim == 2 else codes.shape[0]
    stacked = codes.reshape(experts, *codes.shape[-2:]).contiguous().numpy()
    own = None if columns is None else columns.contiguous().numpy()
    try:
        return _core.encode_coded(stacked, scales.contiguous().numpy(), ndim=codes.ndim, columns=own, symbols=symbols)
    except ValueError as cause:
        raise InvalidTensorError(str(cause)) from cause


@dataclass(frozen=True)
class _Kind:
    """The distribution of a tensor's weights as one kind of codes sees it."""

    profile: Profile
    dependent: bool = False

    def lengths(self, step: float) -> Lengths:
        return self.profile.lengths(step, worth_of(self.dependent), self.dependent)

    def bits(self, step: float) -> float:
        """Estimate the bits of all codes."""
        lengths = self.lengths(step)
        return self.profile.bits(step, lengths, lengths.worth)


class _Source:
    """A tensor to quantize. Its unit, a power of two near the root mean square, is the unit of profiles."""

    def __init__(self, weight: torch.Tensor, *, dependent: bool) -> None:
        if weight.dtype not in FLOATS or weight.ndim not in (2, 3):
            message = f"expected floating-point [R, C] or [E, R, C], got {weight.dtype} {list(weight.shape)}"
            raise InvalidTensorError(message)
        given = weight.detach().cpu()
        self.stack = given.reshape(-1, *given.shape[-2:]) if given.numel() else given.new_empty(_stacked(given.shape))
        self.ndim, self.count, self._dependent = given.ndim, given.numel(), dependent
        squares = 0.0
        self._largest, self._narrowest = 0.0, math.inf
        for expert, matrix in enumerate(self.stack):
            values = matrix.float()
            if not bool(values.isfinite().all()):
                row, column = (~values.isfinite()).nonzero()[0].tolist()
                place = [row, column] if given.ndim == 2 else [expert, row, column]
                raise InvalidTensorError(f"holds {float(matrix[row, column])} at {place}")
            if values.numel():
                squares += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
                self._largest = max(self._largest, float(values.abs().max()))
                self._narrowest = min(self._narrowest, least_spread(values))
        if self._largest > GREATEST:
            raise InvalidTensorError(f"weights up to {self._largest} are too large: their squares exceed float32")
        mean = math.sqrt(squares / max(self.count, 1))
        self._unit = 2.0 ** round(math.log2(mean)) if mean else 1.0

    def kind(self, largest: int) -> _Kind:
        """Return plain codes, of which magnitudes up to `largest` have their own code length."""
        profile = Profile(largest)
        for matrix in self.stack:
            profile.add(matrix.float() / self._unit, 1.0)
        return _Kind(profile)

    def kind_at(self, step: float) -> _Kind:
        """Return the kind of codes for a step."""
        plain = self.kind(LARGEST)
        bits = plain.bits(step / self._unit) / max(self.count, 1)
        return self.kind(DENSE_LARGEST) if bits > DENSE_BITS else self._suited(plain, step, bits)

    def _suited(self, plain: _Kind, step: float, bits: float) -> _Kind:
        """Return dependent codes if they are wanted and gain anything."""
        gains = LEAST_DEPENDENT <= bits <= DENSE_BITS and self._narrowest >= NEARLY_ZERO * step
        return replace(plain, dependent=True) if self._dependent and gains else plain

    def packed(self, step: float, kind: _Kind) -> npt.NDArray[np.uint8]:
        """Round and encode all weights."""
        if self._largest > MOST * step:
            raise InvalidTensorError(f"weights up to {self._largest} are too large for a step of {step}")
        lengths = kind.lengths(step / self._unit)
        rounded = [round_priced(matrix, step, lengths, lengths.worth, width=self._unit) for matrix in self.stack]
        dtype = max((codes.dtype for codes in rounded), key=lambda dtype: dtype.itemsize, default=torch.int8)
        codes = torch.empty(self.stack.shape, dtype=dtype)
        for own, found in zip(codes, rounded, strict=True):
            own.copy_(found)
        scale = torch.tensor([[scale_of(step, kind.dependent)]], dtype=torch.float32)
        symbols = coder_symbols(kind.profile.largest, kind.dependent)
        return _encode(codes[0] if self.ndim == 2 else codes, scale, None, symbols)

    def within(self, bits: float) -> npt.NDArray[np.uint8]:
        """Return the largest tensor found that takes at most `bits` per weight.

        The first step is where the estimated bits meet the size; encoding corrects it.
        """
        kind = self.kind(largest_at(bits))
        if not self.count or not self._largest:
            return self.packed(self._unit, kind)
        exponent = self._estimate(kind, bits)
        kind = self._suited(kind, 2.0**exponent * self._unit, bits)
        best, fits, exceeds, trial = None, math.inf, -math.inf, 0
        zeros = math.log2(self._largest / self._unit) + 2  # All codes are zero.
        while trial < TRIALS or best is None:
            # Rounded to bfloat16, as the format stores it in two bytes.
            step = float(torch.tensor(2.0**exponent * self._unit, dtype=torch.float32).bfloat16())
            blob = self.packed(step, kind)
            found = 8 * len(blob) / self.count
            if found <= bits:
                best, fits = blob if best is None or len(blob) >= len(best) else best, exponent
                if found >= (1 - CLOSE) * bits:
                    break
            elif exponent >= zeros:
                raise ValueError(f"metadata alone takes {found:.3f} bits per weight, but {bits} were requested")
            else:
                exceeds = exponent
            if math.isinf(fits):
                exponent = min(exponent + max(STEEP * (found - bits), 0.05 * trial), zeros)
            else:
                exponent = exponent - STEEP * (bits - found) if math.isinf(exceeds) else (fits + exceeds) / 2
            trial += 1
        return best

    def _estimate(self, kind: _Kind, bits: float) -> float:
        """Return the exponent, in units, of the smallest step at which the code lengths fit."""
        low, high = -NARROWEST, WIDEST
        while high - low > EXACT:
            middle = (low + high) / 2
            low, high = (middle, high) if kind.bits(2.0**middle) > bits * self.count else (low, middle)
        return high


def _stacked(shape: torch.Size) -> tuple[int, ...]:
    return (1, *shape) if len(shape) == 2 else tuple(shape)

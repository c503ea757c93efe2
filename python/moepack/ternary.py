"""A ternary tensor, encoded: at most three values a row, stored in well under one bit a weight where zeros abound.

`encode_ternary` takes codes with levels, or values that already are ternary, and never rounds: what it returns decodes
to exactly what went in. (`quantize_ternary` makes ternary rows from any weight.) A `TernaryTensor` wraps one packed
blob, a flat array of bytes that the kernels read in place, whether it lies in memory or in a mapped file.

Invariants of a `TernaryTensor`: its blob's header, sizes, offsets and levels have been checked; the blob is never
written to; results do not depend on the number of threads.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from moepack import _core
from moepack.arrays import AnyTensor, as_tensor
from moepack.checkpoint.header import Header, read_header
from moepack.errors import CorruptionError, InvalidTensorError, LoadError
from moepack.format.shard import Entry, write_shard
from moepack.solvers.chunks import row_chunks

__all__ = ["CODES", "TernaryTensor", "encode_ternary"]

CODES = ("fsv8", "dict16")
"""The codes, the default first: moepack's byte code, and the 16-bit dictionary of QMoE (section 4.2)."""

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)
_NAME = "ternary"
_FORMAT = "moepack.ternary"
_VERSION = "1"

Array = TypeVar("Array", torch.Tensor, npt.NDArray[Any])
Bytes = npt.NDArray[np.uint8]


class TernaryTensor:
    """An encoded ternary matrix `[R, C]`, or a stack of them `[E, R, C]`.

    Made by `encode_ternary` and `TernaryTensor.load`. Two tensors are equal if they have the same shape, codes and
    levels, whichever code stores them. Instances can be pickled and copied.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: Bytes, *, file: str | PathLike[str] | None = None, tensor: str | None = None) -> None:
        """Wrap a packed blob without copying it.

        Args:
            data: `[nbytes]`, the blob; it must not change afterwards.
            file: where it comes from, for errors.
            tensor: its name there, for errors.

        Raises:
            CorruptionError: header, sizes, offsets or levels are not those of a packed ternary tensor.
        """
        self._data = data
        self._place: dict[str, Any] = {"file": file, "tensor": tensor}
        with self._corruption():
            self._blob = _core.TernaryBlob(data)

    @property
    def shape(self) -> tuple[int, ...]:
        """`(R, C)`, or `(E, R, C)` for a stack."""
        matrix = (self._blob.rows, self._blob.columns)
        return matrix if self._blob.rank == 2 else (self._blob.experts, *matrix)

    @property
    def ndim(self) -> int:
        """2, or 3 for a stack."""
        return self._blob.rank

    @property
    def code(self) -> str:
        """The code that stores it: "fsv8" or "dict16"."""
        return self._blob.code

    @property
    def nbytes(self) -> int:
        """Size in bytes of everything that the tensor needs: header, levels, row index, codes and padding.

        Only the dictionaries are not counted; they are part of the program.
        """
        return self._blob.nbytes

    @property
    def bits_per_weight(self) -> float:
        """`nbytes` in bits over the number of weights; infinite for an empty tensor, whose header holds no weight."""
        weights = self._blob.experts * self._blob.rows * self._blob.columns
        return 8 * self.nbytes / weights if weights else float("inf")

    @property
    def nonzeros(self) -> int:
        """How many codes are not zero."""
        return self._blob.nonzeros

    @property
    def levels(self) -> torch.Tensor:
        """`[R, 2]` or `[E, R, 2]` float32: each row's (negative, positive)."""
        return torch.from_numpy(self._blob.levels()).reshape(*self.shape[:-1], 2)

    @property
    def data(self) -> Bytes:
        """The packed blob, `[nbytes]`, read-only."""
        view = self._data.view()
        view.flags.writeable = False
        return view

    def decode(self) -> torch.Tensor:
        """The codes: int8 in {-1, 0, 1}, of the tensor's shape.

        Raises:
            CorruptionError: the codes of a row do not cover it.
        """
        with self._corruption():
            return torch.from_numpy(self._blob.decode()).reshape(self.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, of the tensor's shape; each level is rounded once, to `dtype`.

        Args:
            dtype: bfloat16, float16, float32 or float64.

        Raises:
            ValueError: `dtype` is none of these.
            CorruptionError: the codes of a row do not cover it.
        """
        if dtype not in _FLOATS:
            raise ValueError(f"dtype must be bfloat16, float16, float32 or float64, not {dtype}")
        with self._corruption():
            if dtype == torch.bfloat16:
                return torch.from_numpy(self._blob.dequantize("bfloat16")).view(dtype).reshape(self.shape)
            return torch.from_numpy(self._blob.dequantize("float32")).reshape(self.shape).to(dtype)

    def matmul(self, x: Array) -> Array:
        """Multiply activations by the packed weights without unpacking them: `y = x W^T`, accumulated in float32.

        A weight of zero contributes nothing, even to an activation that is not finite. No gradient flows through.

        Args:
            x: `[tokens, C]`, or `[C]` for one token; `[E, tokens, C]` for a stack. float32, bfloat16 or float16;
                torch or numpy.

        Returns:
            `[tokens, R]`, `[R]` or `[E, tokens, R]`, with the dtype and on the device of `x`.

        Raises:
            ValueError: the shape does not fit, or the dtype is none of the three.
        """
        tokens = as_tensor(x, "activations")
        if tokens.dtype not in _ACTIVATIONS:
            raise ValueError(f"activations must be float32, bfloat16 or float16, not {tokens.dtype}")
        stack: tuple[int, ...] = self.shape[:-2]
        if tokens.shape[-1:] != self.shape[-1:] or tokens.shape[:-2] != stack:
            expected = f"{[*stack, 'tokens', self.shape[-1]]}"
            raise ValueError(f"activations have shape {list(tokens.shape)}, expected {expected}")
        product = self._product(_kernel_input(tokens)).reshape(*tokens.shape[:-1], self.shape[-2])
        result = torch.from_numpy(product).to(device=tokens.device, dtype=tokens.dtype)
        return result.numpy() if isinstance(x, np.ndarray) else result

    def _product(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """`[N, C]` to `[N, R]`; of a stack, equal shares of the rows belong to the experts in turn."""
        if self.ndim == 2:
            return self._blob.matmul(x)
        experts = self._blob.experts
        offsets = np.arange(experts + 1, dtype=np.int64) * (len(x) // max(experts, 1))
        return self._blob.matmul_grouped(x, offsets)

    def verify(self) -> None:
        """Decode everything and check it: codes, row lengths, padding, the number of non-zeros.

        Raises:
            CorruptionError: something contradicts the format; the message says where.
        """
        with self._corruption():
            self._blob.verify()

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file, atomically: `path` is replaced as a whole or not touched.

        Raises:
            DiskError: the disk refused.
        """
        metadata = {"format": _FORMAT, "version": _VERSION, "sha256": hashlib.sha256(self._data.data).hexdigest()}
        blob = Entry(_NAME, "U8", (self.nbytes,), lambda: self.data.data, packed=True)
        write_shard(Path(path), [blob], metadata)

    @classmethod
    def load(cls, path: str | PathLike[str], *, verify: bool = True) -> "TernaryTensor":
        """Open a file that `save` wrote. The blob stays in the file, mapped into memory.

        Args:
            path: the file.
            verify: check the file's checksum, which reads all of it. Without, damage may give wrong numbers, never a
                read outside the tensor.

        Raises:
            LoadError: there is no such file, or it is another kind of file.
            CorruptionError: it is truncated or damaged.
        """
        file = Path(path)
        if not file.is_file():
            raise LoadError("does not exist", file=file)
        header = read_header(file, CorruptionError)
        data = _map(header)
        if verify and hashlib.sha256(data.data).hexdigest() != header.metadata.get("sha256"):
            raise CorruptionError("the checksum differs from the one in the header", file=file, tensor=_NAME)
        return cls(data, file=file, tensor=_NAME)

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

    def __reduce__(self) -> tuple[object, ...]:
        return TernaryTensor, (np.array(self._data),)

    def __repr__(self) -> str:
        return (
            f"TernaryTensor(shape={self.shape}, code='{self.code}', nbytes={self.nbytes}, "
            f"bits_per_weight={self.bits_per_weight:.4f})"
        )

    @contextmanager
    def _corruption(self) -> Iterator[None]:
        """Give the core's error the file and the tensor."""
        try:
            yield
        except _core.CorruptionError as cause:
            raise CorruptionError(str(cause), **self._place) from cause


def encode_ternary(tensor: AnyTensor, *, levels: AnyTensor | None = None, code: str = "fsv8") -> TernaryTensor:
    """Encode a ternary matrix, or a stack of them, exactly.

    Args:
        tensor: `[R, C]` or `[E, R, C]`, torch or numpy. Either int8 codes in {-1, 0, 1}; or values (bf16, f16, f32,
            f64) of which every row holds at most one negative value, zero, and one positive value.
        levels: with codes: `[R, 2]` or `[E, R, 2]`, each row's (negative, positive), finite, negative <= 0 <= positive,
            exactly representable in float32. With values: None.
        code: "fsv8" (default) or "dict16".

    Returns:
        The encoded tensor, in memory. Negative zeros become zeros; everything else decodes to what went in.

    Raises:
        InvalidTensorError: (a ValueError) a row holds more than three values, or the codes, levels, shapes or dtypes
            are not as above. `quantize_ternary` makes codes and levels from any weight.
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
    elif values.dtype in _FLOATS:
        if levels is not None:
            raise ValueError("levels belong to int8 codes; the levels of values are found in the values")
        codes, pairs = _recognise(values)
    else:
        raise InvalidTensorError(f"expected int8 codes or floating-point values, got {values.dtype}")
    experts = 1 if codes.ndim == 2 else codes.shape[0]
    blob = _core.encode_ternary(
        codes.reshape(experts, *codes.shape[-2:]).contiguous().numpy(),
        pairs.reshape(experts, codes.shape[-2], 2).contiguous().numpy(),
        rank=codes.ndim,
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
    """The levels of codes of `shape` as float32, after checking shape, sign, finiteness and exactness."""
    if levels is None:
        raise InvalidTensorError("int8 codes need levels; quantize_ternary returns both")
    given = as_tensor(levels, "levels").cpu()
    if given.dtype not in _FLOATS or tuple(given.shape) != (*shape[:-1], 2):
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
    """Codes and levels of values that already are ternary."""
    codes = torch.zeros(values.shape, dtype=torch.int8)
    levels = torch.zeros((*values.shape[:-1], 2), dtype=torch.float32)
    for matrix, rows in row_chunks(tuple(values.shape)):
        chunk = values[matrix][rows]
        # Comparisons are exact in either type: float32 holds every bf16 and f16.
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
    """What is wrong with a row `[C]` that cannot be encoded."""
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


def _kernel_input(tokens: torch.Tensor) -> npt.NDArray[Any]:
    """`[N, C]` as the kernels take it: float32, or the bits of bfloat16 in uint16."""
    flat = tokens.cpu().reshape(-1, tokens.shape[-1]) if tokens.numel() else tokens.cpu().flatten(0, -2)
    if flat.dtype == torch.bfloat16:
        bits: npt.NDArray[Any] = flat.contiguous().view(torch.uint16).numpy()
        return bits
    return flat.float().contiguous().numpy()


def _map(header: Header) -> Bytes:
    """The blob of a saved tensor, mapped read-only."""
    metadata = header.metadata
    info = header.tensors.get(_NAME)
    if metadata.get("format") != _FORMAT or info is None:
        raise LoadError("is not a file that TernaryTensor.save wrote", file=header.file)
    if metadata.get("version") != _VERSION:
        raise LoadError(
            f"has version {metadata.get('version')}, this moepack reads {_VERSION}", file=header.file, tensor=_NAME
        )
    if info.dtype != torch.uint8 or len(info.shape) != 1 or info.nbytes == 0:
        raise CorruptionError(f"has dtype {info.dtype} and shape {info.shape}", file=header.file, tensor=_NAME)
    return np.memmap(header.file, dtype=np.uint8, mode="r", offset=info.offset, shape=(info.nbytes,))

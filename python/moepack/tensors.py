"""The base class of packed tensors: shape, size, products, files.

A format derives from `BlobTensor`, sets its name, and adds its codes and parameters.

Invariants: the blob's metadata have been checked; it is never written to; results do not depend on the number of
threads.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable

from moepack import _core
from moepack.arrays import Array, as_given, as_tensor
from moepack.errors import CorruptionError, LoadError
from moepack.format.header import Header, TensorInfo, read_header
from moepack.format.regular import open_regular
from moepack.format.shard import Entry, write_shard
from moepack.mapping import own_memory

__all__ = ["FLOATS", "BlobTensor", "IntegerTensor"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Supported dtypes of source weights and of dequantized values."""

_ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)
_VERSION = "1"

Bytes = npt.NDArray[np.uint8]


class BlobTensor:
    """A packed matrix of shape (R, C), or a stack of shape (E, R, C)."""

    __hash__ = None  # type: ignore[assignment]

    kind: ClassVar[str]
    """Name of the format, and of the tensor in a saved file."""

    def __init__(self, data: Bytes, *, file: str | PathLike[str] | None = None, tensor: str | None = None) -> None:
        """Wrap a packed blob without copying it.

        Args:
            data: the blob, shape (nbytes,). It must not change afterwards.
            file: path of its file, for error messages.
            tensor: its name in the file, for error messages.

        Raises:
            CorruptionError: header, sizes, offsets or levels contradict the format.
        """
        self._data = data
        self._place: dict[str, Any] = {"file": file, "tensor": tensor}
        with self._corruption():
            self._blob = _core.PackedTensor(data)
        if self._blob.kind != self.kind:
            raise CorruptionError(f"is a {self._blob.kind} tensor, not a {self.kind} one", **self._place)
        self._details = self._blob.details()

    @property
    def shape(self) -> tuple[int, ...]:
        """`(R, C)`, or `(E, R, C)` for a stack."""
        return self._blob.shape[-self._blob.ndim :]

    @property
    def ndim(self) -> int:
        """2, or 3 for a stack."""
        return self._blob.ndim

    @property
    def nbytes(self) -> int:
        """Total size in bytes: header, parameters, codes and padding."""
        return self._blob.nbytes

    @property
    def bits_per_weight(self) -> float:
        """`nbytes` in bits divided by the number of weights; infinite for an empty tensor."""
        weights = math.prod(self.shape)
        return 8 * self.nbytes / weights if weights else float("inf")

    @property
    def data(self) -> Bytes:
        """The packed blob, read-only, shape (nbytes,)."""
        view = self._data.view()
        view.flags.writeable = False
        return view

    def decode(self) -> torch.Tensor:
        """Return the codes in the tensor's shape, uint8; int8 in {-1, 0, 1} for a ternary tensor.

        Raises:
            CorruptionError: the codes contradict the format.
        """
        with self._corruption():
            return torch.from_numpy(self._blob.decode()).reshape(self.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the values in the tensor's shape, computed in float32 and rounded once to `dtype`.

        Raises:
            ValueError: `dtype` is not bfloat16, float16, float32 or float64.
            CorruptionError: the codes contradict the format.
        """
        if dtype not in FLOATS:
            raise ValueError(f"dtype must be bfloat16, float16, float32 or float64, not {dtype}")
        with self._corruption():
            if dtype == torch.bfloat16:
                return torch.from_numpy(self._blob.dequantize("bfloat16")).view(dtype).reshape(self.shape)
            return torch.from_numpy(self._blob.dequantize()).reshape(self.shape).to(dtype)

    def _parameters(self, name: str) -> torch.Tensor:
        """Return stored parameters by name, with one row per row of the tensor."""
        with self._corruption():
            found: npt.NDArray[np.float32] = self._blob.parameters(name)
        return torch.from_numpy(found).reshape(*self.shape[:-1], *found.shape[2:])

    def matmul(self, x: Array) -> Array:
        """Multiply activations by the packed weights without unpacking them: `y = x W^T`, accumulated in float32.

        The gradient with respect to `x` is W^T g; it ignores rounding in the product.

        Args:
            x: activations of shape (tokens, C), or (C,) for one token; (E, tokens, C) for a stack. float32, bfloat16 or
                float16; torch or numpy.

        Returns:
            Outputs of shape (tokens, R), (R,) or (E, tokens, R), with the dtype and on the device of `x`.

        Raises:
            ValueError: wrong shape or unsupported dtype.
        """
        return self._multiply(x)

    def _multiply(self, x: Array, **options: Any) -> Array:
        """Implement `matmul`. `options` are passed to the kernel."""
        if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            return cast(Array, _Product.apply(x, self, options))
        tokens = as_tensor(x, "activations")
        if tokens.dtype not in _ACTIVATIONS:
            raise ValueError(f"activations must be float32, bfloat16 or float16, not {tokens.dtype}")
        stack: tuple[int, ...] = self.shape[:-2]
        if tokens.shape[-1:] != self.shape[-1:] or tokens.shape[:-2] != stack:
            expected = f"{[*stack, 'tokens', self.shape[-1]]}"
            raise ValueError(f"activations have shape {list(tokens.shape)}, expected {expected}")
        with self._corruption():
            product = self._product(_kernel_input(tokens), options).reshape(*tokens.shape[:-1], self.shape[-2])
        return as_given(torch.from_numpy(product).to(tokens.dtype), x)

    def _product(self, x: npt.NDArray[Any], options: dict[str, Any]) -> npt.NDArray[np.float32]:
        """Multiply (N, C) to (N, R). For a stack, the rows are split equally among the experts in order."""
        if self.ndim == 2:
            return self._blob.matmul(x, **options)
        return self._blob.matmul_grouped(x, self._shares(len(x)), **options)

    def _shares(self, rows: int) -> npt.NDArray[np.int64]:
        """Return the first row of each expert, shape (E + 1,), for an equal split."""
        experts = self._blob.shape[0]
        return np.arange(experts + 1, dtype=np.int64) * (rows // max(experts, 1))

    def _transposed(self, y: torch.Tensor) -> torch.Tensor:
        """Return `y W`, shape (..., R) to (..., C), with the dtype and on the device of `y`."""
        rows = _kernel_input(y)
        with self._corruption():
            product = self._blob.matmul_transposed(rows, self._shares(len(rows)))
        return torch.from_numpy(product).reshape(*y.shape[:-1], self.shape[-1]).to(y)

    def verify(self) -> None:
        """Decode all data and check them against the format.

        Raises:
            CorruptionError: the data contradict the format; the message gives the place.
        """
        with self._corruption():
            self._blob.verify()

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file atomically.

        Raises:
            DiskError: writing failed.
        """
        metadata = {
            "format": f"moepack.{self.kind}",
            "version": _VERSION,
            "sha256": hashlib.sha256(self._data.data).hexdigest(),
        }
        blob = Entry(self.kind, "U8", (self.nbytes,), lambda: self.data.data, packed=True)
        write_shard(Path(path), [blob], metadata)

    @classmethod
    def load(cls, path: str | PathLike[str], *, verify: bool = True, resident: bool = False) -> Self:
        """Open a file written by `save`. The blob is mapped from the file unless it is resident.

        Args:
            path: the file.
            verify: check the file's checksum, which reads the whole file. Without it, damage may give wrong numbers,
                but never an access outside the tensor.
            resident: read the blob into anonymous memory. If a mapped file is overwritten during use, results are wrong
                or a CorruptionError is raised; if it is truncated, the process dies (SIGBUS). A resident blob is not
                affected.

        Raises:
            LoadError: the file does not exist or is of another kind.
            CorruptionError: the file is truncated or damaged.
        """
        file = Path(path)
        if not file.is_file():
            raise LoadError("does not exist", file=file)
        header = read_header(file, CorruptionError)
        info = _blob_info(header, cls.kind, cls.__name__)
        data = _read(info) if resident else np.memmap(file, np.uint8, "r", info.offset, (info.nbytes,))
        if verify and hashlib.sha256(data.data).hexdigest() != header.metadata.get("sha256"):
            raise CorruptionError("the checksum differs from the one in the header", file=file, tensor=cls.kind)
        return cls(data, file=file, tensor=cls.kind)

    def __eq__(self, other: object) -> bool:
        return np.array_equal(self._data, other._data) if isinstance(other, type(self)) else NotImplemented

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (np.array(self._data),)

    @contextmanager
    def _corruption(self) -> Iterator[None]:
        """Add file and tensor to the core's errors."""
        try:
            yield
        except _core.CorruptionError as cause:
            raise CorruptionError(str(cause), **self._place) from cause


class IntegerTensor(BlobTensor):
    """A packed tensor of integers with scales; products can also round activations."""

    def matmul(self, x: Array, mode: Literal["auto", "exact", "bf16", "int8"] = "auto") -> Array:
        """Multiply activations by the packed weights: `y = x W^T`, accumulated in float32. Gradients are W^T g.

        Args:
            x: activations of shape (tokens, C), or (C,) for one token; (E, tokens, C) for a stack. float32, bfloat16 or
                float16; torch or numpy.
            mode: "exact"; "bf16", which rounds both factors, but multiplies few tokens exactly; "auto", the faster of
                the two; or "int8", which quantizes activations to eight bits per token and group of columns.

        Returns:
            Outputs of shape (tokens, R), (R,) or (E, tokens, R), with the dtype and on the device of `x`.

        Raises:
            ValueError: wrong shape, unsupported dtype, or unknown mode.
        """
        return self._multiply(x, mode=mode)


class _Product(torch.autograd.Function):
    """`BlobTensor.matmul` with a gradient with respect to the activations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tensor: BlobTensor, options: dict[str, Any]) -> torch.Tensor:
        ctx.tensor = tensor
        return tensor._multiply(x.detach(), **options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.tensor._transposed(gradient), None, None


def _kernel_input(tokens: torch.Tensor) -> npt.NDArray[Any]:
    """Return activations as (N, C) for the kernels: float32, or the bits of bfloat16 in uint16."""
    flat = tokens.cpu().reshape(-1, tokens.shape[-1]) if tokens.numel() else tokens.cpu().flatten(0, -2)
    if flat.dtype == torch.bfloat16:
        bits: npt.NDArray[Any] = flat.contiguous().view(torch.uint16).numpy()
        return bits
    return flat.float().contiguous().numpy()


def _blob_info(header: Header, kind: str, owner: str) -> TensorInfo:
    """Return the place of the blob in a saved file."""
    metadata = header.metadata
    info = header.tensors.get(kind)
    if metadata.get("format") != f"moepack.{kind}" or info is None:
        raise LoadError(f"is not a file written by {owner}.save", file=header.file)
    if metadata.get("version") != _VERSION:
        raise LoadError(
            f"has version {metadata.get('version')}, but this moepack reads {_VERSION}", file=header.file, tensor=kind
        )
    if info.dtype != torch.uint8 or len(info.shape) != 1 or info.nbytes == 0:
        raise CorruptionError(f"has dtype {info.dtype} and shape {info.shape}", file=header.file, tensor=kind)
    return info


def _read(info: TensorInfo) -> Bytes:
    """Read the bytes of a tensor into anonymous memory, aligned to 64. The file may have changed after the header."""
    data = own_memory(info.nbytes)
    with open_regular(info.file) as stream:
        stream.seek(info.offset)
        if stream.readinto(data.data) != info.nbytes:
            raise CorruptionError("was truncated while it was read", file=info.file, tensor=info.name)
    return data

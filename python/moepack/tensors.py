"""What the tensor of every packed format offers: shape, size, products, files.

A format derives from `BlobTensor`, names itself, and adds what its codes and parameters are.

Invariants: the blob's metadata have been checked; it is never written to; results do not depend on the number of
threads.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self, cast

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

__all__ = ["FLOATS", "BlobTensor"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""What weights may be, and be dequantized to."""

_ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)
_VERSION = "1"

Bytes = npt.NDArray[np.uint8]


class BlobTensor:
    """A packed matrix `[R, C]`, or a stack of them `[E, R, C]`."""

    __hash__ = None  # type: ignore[assignment]

    kind: ClassVar[str]
    """Name of the format; of the tensor in a file, too."""

    def __init__(self, data: Bytes, *, file: str | PathLike[str] | None = None, tensor: str | None = None) -> None:
        """Wrap a packed blob without copying it.

        Args:
            data: `[nbytes]`, the blob; it must not change afterwards.
            file: where it comes from, for errors.
            tensor: its name there, for errors.

        Raises:
            CorruptionError: header, sizes, offsets or levels are not those of the format.
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
        """Size in bytes of everything that the tensor needs: header, parameters, codes and padding."""
        return self._blob.nbytes

    @property
    def bits_per_weight(self) -> float:
        """`nbytes` in bits over the number of weights; infinite for an empty tensor, whose header holds no weight."""
        weights = math.prod(self.shape)
        return 8 * self.nbytes / weights if weights else float("inf")

    @property
    def data(self) -> Bytes:
        """The packed blob, `[nbytes]`, read-only."""
        view = self._data.view()
        view.flags.writeable = False
        return view

    def decode(self) -> torch.Tensor:
        """The codes, uint8 of the tensor's shape; int8 in {-1, 0, 1} of a ternary one.

        Raises:
            CorruptionError: the codes contradict the format.
        """
        with self._corruption():
            return torch.from_numpy(self._blob.decode()).reshape(self.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, of the tensor's shape, computed in float32 and rounded once, to `dtype`.

        Raises:
            ValueError: `dtype` is none of bfloat16, float16, float32 and float64.
            CorruptionError: the codes contradict the format.
        """
        if dtype not in FLOATS:
            raise ValueError(f"dtype must be bfloat16, float16, float32 or float64, not {dtype}")
        with self._corruption():
            if dtype == torch.bfloat16:
                return torch.from_numpy(self._blob.dequantize("bfloat16")).view(dtype).reshape(self.shape)
            return torch.from_numpy(self._blob.dequantize()).reshape(self.shape).to(dtype)

    def _parameters(self, name: str) -> torch.Tensor:
        """The stored parameters of a name, a row of them for each row of the tensor."""
        with self._corruption():
            found: npt.NDArray[np.float32] = self._blob.parameters(name)
        return torch.from_numpy(found).reshape(*self.shape[:-1], *found.shape[2:])

    def matmul(self, x: Array) -> Array:
        """Multiply activations by the packed weights without unpacking them: `y = x W^T`, accumulated in float32.

        Where a gradient of `x` is asked for, it is W^T g, as if the product rounded nothing.

        Args:
            x: `[tokens, C]`, or `[C]` for one token; `[E, tokens, C]` for a stack. float32, bfloat16 or float16;
                torch or numpy.

        Returns:
            `[tokens, R]`, `[R]` or `[E, tokens, R]`, with the dtype and on the device of `x`.

        Raises:
            ValueError: the shape does not fit, or the dtype is none of the three.
        """
        return self._multiply(x)

    def _multiply(self, x: Array, **options: Any) -> Array:
        """Do what `matmul` says; `options` go to the kernel."""
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
        """`[N, C]` to `[N, R]`; of a stack, equal shares of the rows belong to the experts in turn."""
        if self.ndim == 2:
            return self._blob.matmul(x, **options)
        return self._blob.matmul_grouped(x, self._shares(len(x)), **options)

    def _shares(self, rows: int) -> npt.NDArray[np.int64]:
        """Where the rows of each expert begin, `[E + 1]`: all have equally many."""
        experts = self._blob.shape[0]
        return np.arange(experts + 1, dtype=np.int64) * (rows // max(experts, 1))

    def _transposed(self, y: torch.Tensor) -> torch.Tensor:
        """`y W`: `[..., R]` to `[..., C]`, with the dtype and on the device of `y`."""
        rows = _kernel_input(y)
        with self._corruption():
            product = self._blob.matmul_transposed(rows, self._shares(len(rows)))
        return torch.from_numpy(product).reshape(*y.shape[:-1], self.shape[-1]).to(y)

    def verify(self) -> None:
        """Decode everything and check it against the format.

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
        metadata = {
            "format": f"moepack.{self.kind}",
            "version": _VERSION,
            "sha256": hashlib.sha256(self._data.data).hexdigest(),
        }
        blob = Entry(self.kind, "U8", (self.nbytes,), lambda: self.data.data, packed=True)
        write_shard(Path(path), [blob], metadata)

    @classmethod
    def load(cls, path: str | PathLike[str], *, verify: bool = True, resident: bool = False) -> Self:
        """Open a file that `save` wrote. The blob stays in the file, mapped into memory, unless it is resident.

        Args:
            path: the file.
            verify: check the file's checksum, which reads all of it. Without, damage may give wrong numbers, never a
                read outside the tensor.
            resident: read the blob into memory of its own. A mapped file that is overwritten while the tensor is used
                gives wrong numbers or CorruptionError, and one that is truncated ends the process (SIGBUS); a resident
                blob is out of a writer's reach.

        Raises:
            LoadError: there is no such file, or it is another kind of file.
            CorruptionError: it is truncated or damaged.
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
        """Give the core's error the file and the tensor."""
        try:
            yield
        except _core.CorruptionError as cause:
            raise CorruptionError(str(cause), **self._place) from cause


class _Product(torch.autograd.Function):
    """`BlobTensor.matmul` with a gradient of the activations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tensor: BlobTensor, options: dict[str, Any]) -> torch.Tensor:
        ctx.tensor = tensor
        return tensor._multiply(x.detach(), **options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.tensor._transposed(gradient), None, None


def _kernel_input(tokens: torch.Tensor) -> npt.NDArray[Any]:
    """`[N, C]` as the kernels take it: float32, or the bits of bfloat16 in uint16."""
    flat = tokens.cpu().reshape(-1, tokens.shape[-1]) if tokens.numel() else tokens.cpu().flatten(0, -2)
    if flat.dtype == torch.bfloat16:
        bits: npt.NDArray[Any] = flat.contiguous().view(torch.uint16).numpy()
        return bits
    return flat.float().contiguous().numpy()


def _blob_info(header: Header, kind: str, owner: str) -> TensorInfo:
    """Where the blob of a saved tensor lies."""
    metadata = header.metadata
    info = header.tensors.get(kind)
    if metadata.get("format") != f"moepack.{kind}" or info is None:
        raise LoadError(f"is not a file that {owner}.save wrote", file=header.file)
    if metadata.get("version") != _VERSION:
        raise LoadError(
            f"has version {metadata.get('version')}, this moepack reads {_VERSION}", file=header.file, tensor=kind
        )
    if info.dtype != torch.uint8 or len(info.shape) != 1 or info.nbytes == 0:
        raise CorruptionError(f"has dtype {info.dtype} and shape {info.shape}", file=header.file, tensor=kind)
    return info


def _read(info: TensorInfo) -> Bytes:
    """The bytes of a tensor in memory of the process's own, aligned to 64; they may have changed since the header."""
    data = own_memory(info.nbytes)
    with open_regular(info.file) as stream:
        stream.seek(info.offset)
        if stream.readinto(data.data) != info.nbytes:
            raise CorruptionError("was truncated while it was read", file=info.file, tensor=info.name)
    return data

"""What the runtime asks of a packed weight, and how it finds the class that reads a blob.

A packed tensor is one flat U8 array whose first eight bytes say which format it is in. The runtime knows formats only
through `PackedMatrix`: shape, size and a grouped product. A format takes part by `register_format`; nothing else in
the runtime changes when one is added.

Invariants: a matrix never copies or changes its bytes, and keeps the array (hence the file map) alive.
"""

from collections.abc import Callable
from functools import partial
from os import PathLike
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from moepack.errors import CorruptionError, LoadError

__all__ = [
    "MAGIC_BYTES",
    "MODES",
    "GroupwiseMatrix",
    "HasModes",
    "PackedMatrix",
    "TernaryMatrix",
    "open_matrix",
    "register_format",
]

MAGIC_BYTES = 8

MODES = ("exact", "int8")
"""How group-wise integers are multiplied: by float32 activations, or by activations that are quantized to eight bits
for each token and group of columns."""

Activations = NDArray[np.float32] | NDArray[np.uint16]


class PackedMatrix(Protocol):
    """The weights of one projection of one layer: E experts of R rows by C columns, packed.

    Attributes:
        format: name of the format, as `doctor` and `inspect` print it, for example `ternary-fsv8`.
        shape: (E, R, C).
        nbytes: size of the blob.
    """

    @property
    def format(self) -> str:
        """Name of the format."""
        ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, rows and columns."""
        ...

    @property
    def nbytes(self) -> int:
        """Size of the blob in bytes."""
        ...

    def matmul_grouped(self, x: Activations, offsets: NDArray[np.int64]) -> NDArray[np.float32]:
        """Multiply each run of rows by its own expert: y[i] = W[e] x[i] for offsets[e] <= i < offsets[e + 1].

        Args:
            x: [N, C], rows sorted by expert; float32, or bfloat16 given as its uint16 bits.
            offsets: [E + 1], ascending, from 0 to N.

        Returns:
            [N, R], accumulated in float32.
        """
        ...


@runtime_checkable
class HasModes(Protocol):
    """A matrix whose products can be computed in more than one way."""

    def set_mode(self, mode: str) -> None:
        """Choose one of `MODES` for the products to come."""
        ...


class _BlobMatrix:
    """A blob of the core, multiplied by the Rust kernels straight from its bytes."""

    __slots__ = ("_blob", "matmul_grouped")

    def __init__(self, blob: Any) -> None:
        self._blob = blob
        self.matmul_grouped: Callable[[Activations, NDArray[np.int64]], NDArray[np.float32]] = blob.matmul_grouped

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, rows and columns."""
        return self._blob.experts, self._blob.rows, self._blob.columns

    @property
    def nbytes(self) -> int:
        """Size of the blob in bytes."""
        return int(self._blob.nbytes)


class TernaryMatrix(_BlobMatrix):
    """A ternary blob (`MOEPTERN`)."""

    __slots__ = ()

    def __init__(self, data: NDArray[np.uint8]) -> None:
        from moepack import _core

        super().__init__(_core.TernaryBlob(data))

    @property
    def format(self) -> str:
        """`ternary-fsv8` or `ternary-dict16`."""
        return f"ternary-{self._blob.code}"


class GroupwiseMatrix(_BlobMatrix):
    """A group-wise blob (`MOEPGRPW`)."""

    __slots__ = ()

    def __init__(self, data: NDArray[np.uint8]) -> None:
        from moepack import _core

        super().__init__(_core.GroupwiseBlob(data))

    def set_mode(self, mode: str) -> None:
        """Let products take float32 activations ("exact") or quantize them ("int8")."""
        self.matmul_grouped = partial(self._blob.matmul_grouped, mode=mode)

    @property
    def format(self) -> str:
        """For example `groupwise-4bit`."""
        return f"groupwise-{self._blob.bits}bit"


_FORMATS: dict[bytes, Callable[[NDArray[np.uint8]], Any]] = {b"MOEPTERN": TernaryMatrix, b"MOEPGRPW": GroupwiseMatrix}


def register_format(magic: bytes, reader: Callable[[NDArray[np.uint8]], PackedMatrix]) -> None:
    """Let blobs that start with `magic` (eight bytes) be opened by `reader`.

    `reader` takes the blob (flat uint8, maybe a read-only file map), validates its metadata and raises `ValueError`
    where the bytes contradict the format.

    Raises:
        ValueError: `magic` is not eight bytes long, or belongs to another reader.
    """
    if len(magic) != MAGIC_BYTES:
        raise ValueError(f"a format's magic is {MAGIC_BYTES} bytes, got {len(magic)}")
    if _FORMATS.setdefault(magic, reader) is not reader:
        raise ValueError(f"the magic {magic!r} is already registered")


def open_matrix(
    data: NDArray[np.uint8], *, file: str | PathLike[str] | None = None, tensor: str | None = None
) -> PackedMatrix:
    """Open a blob by its magic.

    Args:
        data: the blob, flat and contiguous uint8; it is neither copied nor changed.
        file: the file that it lies in, for messages.
        tensor: its name, for messages.

    Raises:
        CorruptionError: the blob contradicts its format, or is too short to have one.
        LoadError: no format of this version of moepack starts with these bytes.
    """
    magic = data[:MAGIC_BYTES].tobytes()
    if len(magic) < MAGIC_BYTES:
        raise CorruptionError(f"{len(magic)} bytes cannot be a packed tensor", file=file, tensor=tensor)
    reader = _FORMATS.get(magic)
    if reader is None:
        known = ", ".join(sorted(name.decode("ascii", "replace") for name in _FORMATS))
        message = f"unknown packed format {magic!r} (known: {known}); a newer moepack may read it"
        raise LoadError(message, file=file, tensor=tensor)
    try:
        matrix: PackedMatrix = reader(data)
    except ValueError as error:
        raise CorruptionError(str(error), file=file, tensor=tensor) from error
    return matrix

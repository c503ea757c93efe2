"""Opens packed tensors by their first eight bytes.

The core reads its own formats (`_core.formats`). Formats written in Python are added with `register`; directories may
then contain such tensors, `verify` checks them, `inspect` lists them, and the runtime multiplies by them. No other part
of the package lists formats.

Invariants: an opened tensor never copies or changes its bytes, and keeps the array (and its file map) alive.
"""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moepack import _core
from moepack.errors import CorruptionError, LoadError

__all__ = ["MAGIC_BYTES", "Activations", "OpenTensor", "kinds", "open_tensor", "register"]

MAGIC_BYTES = 8

Activations = NDArray[np.float32] | NDArray[np.uint16]
"""Inputs of products: float32, or the bits of bfloat16."""


class OpenTensor(Protocol):
    """A packed tensor with checked metadata, such as `_core.PackedTensor`."""

    @property
    def kind(self) -> str:
        """Name of the format in manifests, for example `groupwise`."""
        ...

    @property
    def format(self) -> str:
        """Format with its main parameters for display, for example `groupwise-4bit`."""
        ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts (1 for a matrix), rows and columns."""
        ...

    @property
    def ndim(self) -> int:
        """Number of axes for the user: 2 for a matrix, 3 for a stack of experts."""
        ...

    @property
    def nbytes(self) -> int:
        """Total size in bytes."""
        ...

    @property
    def modes(self) -> Sequence[str]:
        """Supported compute modes, the default first."""
        ...

    def details(self) -> Mapping[str, Any]:
        """Return the metadata besides the shape, as JSON values by name. A manifest must not contradict them."""
        ...

    def verify(self) -> None:
        """Check every byte. Raises a ValueError that describes the error and its place."""
        ...

    def dequantize(self, dtype: Any = "float32") -> NDArray[Any]:
        """Return the values [E, R, C]: float32, or for "bfloat16" its bits in uint16."""
        ...

    def matmul_grouped(
        self, x: Activations, offsets: NDArray[np.int64], mode: str | None = None
    ) -> NDArray[np.float32]:
        """Multiply each run of rows by its own expert: y[i] = W[e] x[i] for offsets[e] <= i < offsets[e + 1].

        Args:
            x: [N, C], rows sorted by expert.
            offsets: [E + 1], ascending, from 0 to N.
            mode: one of `modes`; default: the format's own.

        Returns:
            [N, R], accumulated in float32.
        """
        ...


Opener = Callable[[NDArray[np.uint8]], OpenTensor]

_REGISTERED: dict[bytes, tuple[str, Opener]] = {}


def register(kind: str, magic: bytes, opener: Opener) -> None:
    """Add a format written in Python.

    Args:
        kind: name of the format in manifests.
        magic: the first eight bytes of each of its tensors.
        opener: opens a tensor (flat uint8, possibly a read-only file map) and checks its metadata. Raises `ValueError`
            if they contradict the format.

    Raises:
        ValueError: `magic` is not eight bytes long, or another format has the same magic or kind.
    """
    if len(magic) != MAGIC_BYTES:
        raise ValueError(f"a format's magic is {MAGIC_BYTES} bytes, got {len(magic)}")
    if _REGISTERED.get(magic) == (kind, opener):
        return
    if kind in kinds() or magic in _magics():
        raise ValueError(f"the kind {kind!r} or the magic {magic!r} is already registered")
    _REGISTERED[magic] = kind, opener


def kinds() -> frozenset[str]:
    """Return the names of all formats."""
    return frozenset([*(kind for kind, _, _ in _core.formats()), *(kind for kind, _ in _REGISTERED.values())])


def open_tensor(
    data: NDArray[np.uint8], *, file: str | PathLike[str] | None = None, tensor: str | None = None
) -> OpenTensor:
    """Open a packed tensor by its magic.

    Args:
        data: the bytes, flat and contiguous uint8. They are neither copied nor changed.
        file: path of the file, for error messages.
        tensor: name of the tensor, for error messages.

    Raises:
        CorruptionError: the bytes contradict their format, or are too short.
        LoadError: no format of this version of moepack has this magic.
    """
    magic = data[:MAGIC_BYTES].tobytes()
    _, opener = _REGISTERED.get(magic, ("", _core.PackedTensor))
    try:
        return opener(data)
    except _core.UnknownFormatError as error:
        raise LoadError(str(error), file=file, tensor=tensor) from error
    except ValueError as error:
        raise CorruptionError(str(error), file=file, tensor=tensor) from error


def _magics() -> frozenset[bytes]:
    return frozenset([*(magic for _, magic, _ in _core.formats()), *_REGISTERED])

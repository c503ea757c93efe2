"""What the runtime asks of a packed weight, and how it finds the class that reads a blob.

A packed tensor is one flat U8 array whose first eight bytes say which format it is in. The runtime knows formats only
through `PackedMatrix`: shape, size and a grouped product. A format takes part by `register_format`; nothing else in
the runtime changes when one is added.

Invariants: a matrix never copies or changes its bytes, and keeps the array (hence the file map) alive.
"""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, ClassVar, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from moepack.errors import CorruptionError, LoadError
from moepack.runtime.compute import compute_mode

__all__ = [
    "MAGIC_BYTES",
    "CodebookMatrix",
    "CodedGroupwiseMatrix",
    "CompensatedMatrix",
    "GroupwiseMatrix",
    "ModalMatrix",
    "PackedMatrix",
    "TernaryMatrix",
    "core_blob",
    "gated_experts",
    "open_matrix",
    "register_format",
]

MAGIC_BYTES = 8

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


class _BlobMatrix:
    """A blob of the core.

    Attributes:
        blob: the core's reader.
        layered: whether the core runs whole layers of such blobs (`gated_experts`).
    """

    __slots__ = ("blob",)

    layered: ClassVar[bool] = False

    def __init__(self, blob: Any) -> None:
        self.blob = blob

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, rows and columns."""
        return self.blob.experts, self.blob.rows, self.blob.columns

    @property
    def nbytes(self) -> int:
        """Size of the blob in bytes."""
        return int(self.blob.nbytes)

    def product_mode(self) -> str | None:
        """The mode of its products; None is the format's default."""
        return None


class TernaryMatrix(_BlobMatrix):
    """A ternary blob (`MOEPTERN`)."""

    __slots__ = ("matmul_grouped",)

    layered = True

    def __init__(self, data: NDArray[np.uint8]) -> None:
        from moepack import _core

        super().__init__(_core.TernaryBlob(data))
        self.matmul_grouped: Callable[[Activations, NDArray[np.int64]], NDArray[np.float32]] = self.blob.matmul_grouped

    @property
    def format(self) -> str:
        """`ternary-fsv8` or `ternary-dict16`."""
        return f"ternary-{self.blob.code}"


class ModalMatrix(_BlobMatrix):
    """A blob whose products have a compute mode.

    Attributes:
        mode: "exact", "int8", "bf16", or None for the mode of the process (`moepack.runtime.compute`).
    """

    __slots__ = ("mode",)

    def __init__(self, blob: Any) -> None:
        super().__init__(blob)
        self.mode: str | None = None

    def product_mode(self) -> str | None:
        """The matrix's mode, or that of the process."""
        return self.mode or compute_mode()

    def matmul_grouped(self, x: Activations, offsets: NDArray[np.int64]) -> NDArray[np.float32]:
        """As `PackedMatrix.matmul_grouped`, in the matrix's mode."""
        product: NDArray[np.float32] = self.blob.matmul_grouped(x, offsets, mode=self.product_mode())
        return product


class GroupwiseMatrix(ModalMatrix):
    """A group-wise blob (`MOEPGRPW`)."""

    __slots__ = ()

    layered = True

    def __init__(self, data: NDArray[np.uint8]) -> None:
        from moepack import _core

        super().__init__(_core.GroupwiseBlob(data))

    @property
    def format(self) -> str:
        """For example `groupwise-4bit`."""
        return f"groupwise-{self.blob.bits}bit"


class CodedGroupwiseMatrix(ModalMatrix):
    """An entropy-coded group-wise blob (`MOEPGRPC`): a product decodes 16 rows at a time."""

    __slots__ = ()

    layered = True

    def __init__(self, data: NDArray[np.uint8]) -> None:
        from moepack import _core

        super().__init__(_core.CodedGroupwiseBlob(data))

    @property
    def format(self) -> str:
        """For example `groupwise-2bit-coded`."""
        return f"groupwise-{self.blob.bits}bit-coded"


class CompensatedMatrix(ModalMatrix):
    """A group-wise blob with low-rank compensators (`MOEPCOMP`); the mode is that of its group-wise part."""

    __slots__ = ()

    layered = True

    def __init__(self, data: NDArray[np.uint8]) -> None:
        from moepack import _core

        super().__init__(_core.CompensatedBlob(data))

    @property
    def format(self) -> str:
        """For example `groupwise-3bit+lowrank-3bit`."""
        return f"groupwise-{self.blob.bits}bit+lowrank-{self.blob.rank_bits}bit"


def gated_experts(
    matrices: Sequence[PackedMatrix], x: Activations, experts: NDArray[np.int64], weights: NDArray[np.float32]
) -> NDArray[np.float32] | None:
    """Compute a layer of experts gated by SiLU in one call, where its matrices can.

    Args:
        matrices: gate, up and down projection.
        x: [T, H], float32, or bfloat16 given as its uint16 bits.
        experts: [T, k]; a number that is no expert's is skipped.
        weights: [T, k].

    Returns:
        For each token the sum over its experts of weight * down(silu(gate x) * up x), [T, H]; None where a matrix is of
        a format that takes no part.
    """
    from moepack import _core

    gate, up, down = matrices
    if not (_layered(gate) and _layered(up) and _layered(down)):
        return None
    modes = gate.product_mode(), up.product_mode(), down.product_mode()
    return _core.gated_experts(gate.blob, up.blob, down.blob, x, experts, weights, modes)


def core_blob(matrix: PackedMatrix) -> Any:
    """The core's reader of a matrix that takes part in layers; None for others."""
    return matrix.blob if _layered(matrix) else None


def _layered(matrix: PackedMatrix) -> TypeGuard[_BlobMatrix]:
    return isinstance(matrix, _BlobMatrix) and matrix.layered


class CodebookMatrix(ModalMatrix):
    """A codebook blob (`MOEPCODE`). The mode is what the tensor asks for, unless this matrix has one or that of the
    process is "int8"."""

    __slots__ = ()

    layered = True

    def __init__(self, data: NDArray[np.uint8]) -> None:
        from moepack import _core

        super().__init__(_core.CodebookBlob(data))

    def product_mode(self) -> str | None:
        """The matrix's mode, "int8" if the process has it, or None; integer modes round activations to the tensor's
        bits, or to 8. There is no "bf16" of codebooks: None stands for it too."""
        if self.mode is None:
            return "int8" if compute_mode() == "int8" else None
        return None if self.mode == "bf16" else self.mode

    @property
    def format(self) -> str:
        """For example `codebook-4bit`, or `codebook-4bit-a8` with activations of 8 bits."""
        width = self.blob.activation_bits
        return f"codebook-{self.blob.bits}bit" + (f"-a{width}" if width else "")


_FORMATS: dict[bytes, Callable[[NDArray[np.uint8]], Any]] = {
    b"MOEPTERN": TernaryMatrix,
    b"MOEPGRPW": GroupwiseMatrix,
    b"MOEPGRPC": CodedGroupwiseMatrix,
    b"MOEPCODE": CodebookMatrix,
    b"MOEPCOMP": CompensatedMatrix,
}


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

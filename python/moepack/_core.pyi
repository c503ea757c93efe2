"""The Rust core: packed ternary tensors, threads and instruction sets."""

from typing import Any, Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CodebookBlob",
    "CodedGroupwiseBlob",
    "CompensatedBlob",
    "CorruptionError",
    "Decoder",
    "DenseMatrix",
    "GroupwiseBlob",
    "TernaryBlob",
    "__version__",
    "available_isas",
    "code_groupwise",
    "encode_codebook",
    "encode_compensated",
    "encode_compensated_f16",
    "encode_groupwise",
    "encode_ternary",
    "fit_groups",
    "gated_experts",
    "isa",
    "kernels",
    "kmeans",
    "pack_int3",
    "refine_codebooks",
    "set_threads",
    "threads",
    "unpack_int3",
]

__version__: str

class CorruptionError(ValueError):
    """Bytes of a packed tensor contradict its format or end too early."""

def set_threads(threads: int) -> None:
    """Set the number of threads of all later calls, 1 to 1024; ValueError for any other number."""

def threads() -> int:
    """Return the number of threads that calls use."""

def isa() -> str:
    """Return the instruction set in use: scalar, avx2, avx512 or amx; ValueError if MOEPACK_ISA forces a wrong one."""

def available_isas() -> list[str]:
    """Return the instruction sets that the processor runs, the most general first."""

def kernels() -> dict[str, str]:
    """Return the kernel that matrix products of every packed format run on this machine, by the format's name."""

def encode_ternary(
    codes: NDArray[np.int8], levels: NDArray[np.float32], *, ndim: int, code: str = "fsv8"
) -> NDArray[np.uint8]:
    """Encode ternary codes into a packed tensor, uint8 [bytes].

    Args:
        codes: int8 [experts, rows, columns], C-contiguous, each -1, 0 or 1.
        levels: float32 [experts, rows, 2], C-contiguous: the negative (<= 0) and the positive (>= 0) value of a row.
        ndim: axes that the user sees: 2 (a matrix, one expert) or 3.
        code: "fsv8" or "dict16" (the dictionary of the QMoE paper, section 4.3).

    Raises:
        ValueError: a code, level or shape is out of range; the message names expert and row.
    """

@final
class TernaryBlob:
    """A packed ternary tensor of experts x rows x columns over an array that it keeps and reads in place.

    Raises CorruptionError at construction if header, levels or offsets contradict the format.
    """

    def __new__(cls, data: NDArray[np.uint8]) -> TernaryBlob: ...
    @property
    def code(self) -> str:
        """The entropy code: "fsv8" or "dict16"."""
    @property
    def experts(self) -> int:
        """The number of experts, 1 for a matrix."""
    @property
    def rows(self) -> int:
        """The number of rows of an expert."""
    @property
    def columns(self) -> int:
        """The number of columns."""
    @property
    def ndim(self) -> int:
        """Axes of the tensor as its user sees it: 2 or 3."""
    @property
    def nonzeros(self) -> int:
        """The number of weights that are not zero."""
    @property
    def nbytes(self) -> int:
        """The size of the packed tensor in bytes, everything counted."""
    @property
    def payload_bytes(self) -> int:
        """The size of the codes alone in bytes."""
    @property
    def level_dtype(self) -> str:
        """The type of the stored levels: "bfloat16", "float16" or "float32"."""
    def decode(self) -> NDArray[np.int8]:
        """Return the codes, int8 [experts, rows, columns]; CorruptionError names expert, row and byte."""
    def decode_rows(self, expert: int, start: int, stop: int) -> NDArray[np.int8]:
        """Return the codes of some rows of an expert, int8 [stop - start, columns]; IndexError if there are none."""
    def dequantize(self, dtype: Literal["float32", "bfloat16"]) -> NDArray[np.float32] | NDArray[np.uint16]:
        """Return the values [experts, rows, columns]; bfloat16 comes as its bits in uint16."""
    def levels(self) -> NDArray[np.float32]:
        """Return the levels, float32 [experts, rows, 2]: negative and positive."""
    def verify(self) -> None:
        """Check every code, offset and padding byte; CorruptionError names expert, row and byte."""
    def matmul(
        self, x: NDArray[np.float32] | NDArray[np.uint16], expert: int = 0, isa: str | None = None
    ) -> NDArray[np.float32]:
        """Return W x for one expert without unpacking W, float32 [tokens, rows], accumulated in float32.

        Args:
            x: float32, or bfloat16 as its bits in uint16; [tokens, columns], C-contiguous, finite.
            expert: whose weights.
            isa: the instruction set, by default the active one.

        Raises:
            ValueError: sizes do not match, there is no such expert, or the processor lacks the set.
        """
    def matmul_grouped(
        self, x: NDArray[np.float32] | NDArray[np.uint16], offsets: NDArray[np.int64], isa: str | None = None
    ) -> NDArray[np.float32]:
        """Return W x with each expert's own tokens, in one parallel region: float32 [tokens, rows].

        Args:
            x: as in `matmul`, its tokens sorted by expert.
            offsets: int64 [experts + 1], ascending from 0 to the number of tokens: expert e takes the tokens
                `offsets[e]` to `offsets[e + 1]`.
            isa: the instruction set, by default the active one.

        Raises:
            ValueError: sizes or offsets do not match, or the processor lacks the set.
        """

def pack_int3(codes: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Pack 3-bit codes, uint8 [n] to uint32 [3 * n / 32]; ValueError if a code or n is out of range."""

def unpack_int3(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Undo `pack_int3`, uint32 [n] to uint8 [32 * n / 3]; ValueError if n is no multiple of 3."""

def encode_groupwise(
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    offsets: NDArray[np.float32] | None,
    *,
    bits: int,
    group_size: int,
    ndim: int,
    dtype: str = "float16",
) -> NDArray[np.uint8]:
    """Pack group-wise codes, uint8 [bytes].

    Args:
        codes: uint8 [experts, rows, columns], C-contiguous, below 2^bits.
        scales: float32 [experts, rows, groups], C-contiguous, finite, exactly what `dtype` holds.
        offsets: the same, or None for a symmetric tensor, whose weights are scale * (code - 2^(bits - 1)).
        bits: 2, 3, 4 or 8.
        group_size: columns a group: 16, 32, 64, 128, 256, or at least the columns, which means one group a row.
        ndim: axes that the user sees: 2 (a matrix, one expert) or 3.
        dtype: of the stored parameters, "float16" or "bfloat16".

    Raises:
        ValueError: a code, parameter, setting or shape is out of range.
    """

def encode_compensated(
    base: NDArray[np.uint8],
    ranks: NDArray[np.int64],
    right: tuple[NDArray[np.uint8], NDArray[np.float32]],
    left: tuple[NDArray[np.uint8], NDArray[np.float32]],
    *,
    bits: int,
) -> NDArray[np.uint8]:
    """Add integer low-rank compensators to a packed group-wise tensor, W = Wq + U V; uint8 [bytes].

    Args:
        base: the packed group-wise tensor, uint8 [bytes].
        ranks: int64 [experts], each at most min(rows, columns); their sum is T.
        right: codes uint8 [T, columns] and scales float32 [T, ceil(columns / 64)] of the rows of V, expert by expert;
            a value is scale * (code - 2^(bits - 1)), and scales are exactly what float16 holds.
        left: likewise the rows of U^T, [T, rows].
        bits: 3 or 8.

    Raises:
        ValueError: a rank, code, scale or shape is out of range.
        CorruptionError: `base` is no group-wise tensor.
    """

def encode_compensated_f16(
    base: NDArray[np.uint8],
    ranks: NDArray[np.int64],
    right: NDArray[np.float32],
    left: NDArray[np.float32],
) -> NDArray[np.uint8]:
    """Add float16 low-rank compensators to a packed group-wise tensor; uint8 [bytes].

    Args:
        base: the packed group-wise tensor, uint8 [bytes].
        ranks: int64 [experts], each at most min(rows, columns); their sum is T.
        right: float32 [T, columns], exactly what float16 holds: the rows of V, expert by expert.
        left: float32 [T, rows], the rows of U^T.

    Raises:
        ValueError: a rank, value or shape is out of range.
        CorruptionError: `base` is no group-wise tensor.
    """

@final
class CompensatedBlob:
    """A packed group-wise tensor with low-rank compensators over an array that it keeps and reads in place.

    Raises CorruptionError at construction if headers, ranks and size contradict each other.
    """

    def __new__(cls, data: NDArray[np.uint8]) -> CompensatedBlob: ...
    @property
    def bits(self) -> int:
        """The bits of a code: 2, 3, 4 or 8."""
    @property
    def group_size(self) -> int:
        """The columns that share a scale; of one group a row, the columns."""
    @property
    def symmetric(self) -> bool:
        """Whether weights are scale * (code - 2^(bits - 1)), without offsets."""
    @property
    def dtype(self) -> str:
        """The type of the stored parameters: "float16" or "bfloat16"."""
    @property
    def rank_bits(self) -> int:
        """The bits of a value of the compensators: 3, 8 or 16."""
    @property
    def experts(self) -> int:
        """The number of experts, 1 for a matrix."""
    @property
    def rows(self) -> int:
        """The number of rows of an expert."""
    @property
    def columns(self) -> int:
        """The number of columns."""
    @property
    def ndim(self) -> int:
        """Axes of the tensor as its user sees it: 2 or 3."""
    @property
    def nbytes(self) -> int:
        """The size of the packed tensor in bytes, everything counted."""
    def ranks(self) -> NDArray[np.int64]:
        """Return the rank of each expert's compensator, int64 [experts]."""
    def dequantize(self) -> NDArray[np.float32]:
        """Return the values, compensators added, float32 [experts, rows, columns]."""
    def verify(self) -> None:
        """Check every parameter, scale and padding byte; CorruptionError says where."""
    def matmul(
        self,
        x: NDArray[np.float32] | NDArray[np.uint16],
        expert: int = 0,
        mode: str = "exact",
        isa: str | None = None,
    ) -> NDArray[np.float32]:
        """Return (Wq + U V) x for one expert, float32 [tokens, rows].

        Args:
            x: float32, or bfloat16 as its bits in uint16; [tokens, columns], C-contiguous.
            expert: whose weights.
            mode: of the group-wise part: "exact", "int8" or "bf16"; the compensator is always exact.
            isa: the instruction set, by default the active one.

        Raises:
            ValueError: sizes do not match, there is no such expert, or the processor lacks the set.
        """
    def matmul_grouped(
        self,
        x: NDArray[np.float32] | NDArray[np.uint16],
        offsets: NDArray[np.int64],
        mode: str = "exact",
        isa: str | None = None,
    ) -> NDArray[np.float32]:
        """Return (Wq + U V) x with each expert's own tokens, in one parallel region: float32 [tokens, rows].

        Args:
            x: float32, or bfloat16 as its bits in uint16; [tokens, columns], C-contiguous, sorted by expert.
            offsets: int64 [experts + 1], ascending from 0 to the number of tokens.
            mode: of the group-wise part: "exact", "int8" or "bf16"; the compensator is always exact.
            isa: the instruction set, by default the active one.

        Raises:
            ValueError: sizes or offsets do not match, or the processor lacks the set.
        """

@final
class GroupwiseBlob:
    """A packed group-wise tensor of experts x rows x columns over an array that it keeps and reads in place.

    Raises CorruptionError at construction if header and size contradict each other.
    """

    def __new__(cls, data: NDArray[np.uint8]) -> GroupwiseBlob: ...
    @property
    def bits(self) -> int:
        """The bits of a code: 2, 3, 4 or 8."""
    @property
    def group_size(self) -> int:
        """The columns that share a scale; of one group a row, the columns."""
    @property
    def symmetric(self) -> bool:
        """Whether weights are scale * (code - 2^(bits - 1)), without offsets."""
    @property
    def dtype(self) -> str:
        """The type of the stored parameters: "float16" or "bfloat16"."""
    @property
    def experts(self) -> int:
        """The number of experts, 1 for a matrix."""
    @property
    def rows(self) -> int:
        """The number of rows of an expert."""
    @property
    def columns(self) -> int:
        """The number of columns."""
    @property
    def ndim(self) -> int:
        """Axes of the tensor as its user sees it: 2 or 3."""
    @property
    def nbytes(self) -> int:
        """The size of the packed tensor in bytes, everything counted."""
    def decode(self) -> NDArray[np.uint8]:
        """Return the codes, uint8 [experts, rows, columns]."""
    def dequantize(self) -> NDArray[np.float32]:
        """Return the values, float32 [experts, rows, columns]."""
    def scales(self) -> NDArray[np.float32]:
        """Return the scales, float32 [experts, rows, groups]."""
    def offsets(self) -> NDArray[np.float32] | None:
        """Return the offsets, float32 [experts, rows, groups], or None for a symmetric tensor."""
    def verify(self) -> None:
        """Check every parameter and padding byte; CorruptionError names expert and row."""
    def matmul(
        self,
        x: NDArray[np.float32] | NDArray[np.uint16],
        expert: int = 0,
        mode: str = "exact",
        isa: str | None = None,
    ) -> NDArray[np.float32]:
        """Return W x for one expert, float32 [tokens, rows].

        Args:
            x: float32, or bfloat16 as its bits in uint16; [tokens, columns], C-contiguous.
            expert: whose weights.
            mode: "exact" (the precision of float32), "int8" (quantized for each token and group of columns) or "bf16"
                (rounded; few tokens exactly).
            isa: the instruction set, by default the active one.

        Raises:
            ValueError: sizes do not match, there is no such expert, or the processor lacks the set.
        """
    def matmul_grouped(
        self,
        x: NDArray[np.float32] | NDArray[np.uint16],
        offsets: NDArray[np.int64],
        mode: str = "exact",
        isa: str | None = None,
    ) -> NDArray[np.float32]:
        """Return W x with each expert's own tokens, in one parallel region: float32 [tokens, rows].

        Args:
            x: float32, or bfloat16 as its bits in uint16; [tokens, columns], C-contiguous, sorted by expert.
            offsets: int64 [experts + 1], ascending from 0 to the number of tokens.
            mode: "exact" (the precision of float32), "int8" (quantized for each token and group of columns) or "bf16"
                (rounded; few tokens exactly).
            isa: the instruction set, by default the active one.

        Raises:
            ValueError: sizes or offsets do not match, or the processor lacks the set.
        """

def code_groupwise(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Entropy code a packed group-wise tensor block by block, uint8 [bytes]; the result may be larger.

    Args:
        data: uint8 [bytes], contiguous, as `encode_groupwise` writes it.

    Raises:
        CorruptionError: the bytes are no group-wise tensor.
        ValueError: its rows are too long for the coded format (beyond some 45,000 columns of 2 bits).
    """

@final
class CodedGroupwiseBlob:
    """An entropy-coded group-wise tensor of experts x rows x columns over an array that it keeps and reads in place.

    Raises CorruptionError at construction if header, index and size contradict each other.
    """

    def __new__(cls, data: NDArray[np.uint8]) -> CodedGroupwiseBlob: ...
    @property
    def bits(self) -> int:
        """The bits of a code: 2, 3, 4 or 8."""
    @property
    def group_size(self) -> int:
        """The columns that share a scale; of one group a row, the columns."""
    @property
    def symmetric(self) -> bool:
        """Whether weights are scale * (code - 2^(bits - 1)), without offsets."""
    @property
    def dtype(self) -> str:
        """The type of the stored parameters: "float16" or "bfloat16"."""
    @property
    def experts(self) -> int:
        """The number of experts, 1 for a matrix."""
    @property
    def rows(self) -> int:
        """The number of rows of an expert."""
    @property
    def columns(self) -> int:
        """The number of columns."""
    @property
    def ndim(self) -> int:
        """Axes of the tensor as its user sees it: 2 or 3."""
    @property
    def nbytes(self) -> int:
        """The size of the coded tensor in bytes, everything counted."""
    def expand(self) -> NDArray[np.uint8]:
        """Return the tensor without the entropy code, as `GroupwiseBlob` reads it, uint8 [bytes]."""
    def decode(self) -> NDArray[np.uint8]:
        """Return the codes, uint8 [experts, rows, columns]."""
    def dequantize(self) -> NDArray[np.float32]:
        """Return the values, float32 [experts, rows, columns]."""
    def verify(self) -> None:
        """Decode everything, check every parameter and padding byte; CorruptionError names the place."""
    def matmul_grouped(
        self,
        x: NDArray[np.float32] | NDArray[np.uint16],
        offsets: NDArray[np.int64],
        mode: str = "exact",
        isa: str | None = None,
    ) -> NDArray[np.float32]:
        """Return W x with each expert's own tokens, in one parallel region: float32 [tokens, rows].

        Args:
            x: float32, or bfloat16 as its bits in uint16; [tokens, columns], C-contiguous, sorted by expert.
            offsets: int64 [experts + 1], ascending from 0 to the number of tokens.
            mode: "exact" (the precision of float32), "int8" (quantized for each token and group of columns) or "bf16"
                (rounded; few tokens exactly).
            isa: the instruction set, by default the active one.

        Raises:
            ValueError: sizes or offsets do not match, or the processor lacks the set.
        """

def fit_groups(
    weights: NDArray[np.float32],
    bits: int,
    group_size: int,
    *,
    symmetric: bool = False,
    dtype: str = "float16",
    iterations: int = 8,
    start: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
    compensation: NDArray[np.float32] | None = None,
    isa: str | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32], NDArray[np.float64]]:
    """Find codes, scales and offsets of least squared error: `scale * code + offset` for each row and group of columns.

    Args:
        weights: float32 [rows, columns], C-contiguous.
        bits: of a code, 1 to 8.
        group_size: columns that share parameters.
        symmetric: offsets are -2^(bits - 1) times the scales.
        dtype: "float16" or "bfloat16", what parameters are rounded to.
        iterations: most regressions.
        start: scales and offsets, float32 [rows, groups], to start from instead of a search.
        compensation: float32 [rows, columns], what something else adds to the codes' values; it is overwritten by the
            weights less the codes' values.
        isa: the instruction set, by default the active one; the result does not depend on it.

    Returns:
        Codes, uint8 [rows, columns]; scales and offsets, float32 [rows, groups]; the squared norms of the weights less
        the codes' values, float64 [rows].

    Raises:
        ValueError: sizes do not match, an array is not contiguous, or the processor lacks the set.
    """

def kmeans(
    values: NDArray[np.float32], clusters: int, weights: NDArray[np.float32] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.uint8], NDArray[np.float64]]:
    """Cluster the values of each row so that the weighted sum of squared errors is least.

    Args:
        values: float32 [rows, columns], C-contiguous, finite.
        clusters: 1 to 16.
        weights: float32 [groups, columns], C-contiguous, finite, none negative: the importance of each column, for rows
            / groups successive rows at a time; by default 1.

    Returns:
        Centroids, float32 [rows, clusters], ascending; codes of the nearest centroid, uint8 [rows, columns]; errors,
        float64 [rows].

    Raises:
        ValueError: sizes do not match, or a value or weight is out of range.
    """

@final
class DenseMatrix:
    """A dense matrix of rows x columns, read in place.

    Args:
        data: uint8 [bytes], contiguous: the values, row by row; it is kept and not copied.
        dtype: "float32" or "bfloat16".
        rows: of the matrix.
        columns: of the matrix.

    Raises:
        ValueError: there is no such dtype, or the size is another one.
    """

    def __new__(cls, data: NDArray[np.uint8], dtype: str, rows: int, columns: int) -> DenseMatrix: ...
    def matmul(self, x: NDArray[np.float32] | NDArray[np.uint16], isa: str | None = None) -> NDArray[np.float32]:
        """Return y = W x, float32 [tokens, rows].

        Args:
            x: float32, or bfloat16 as its bits in uint16; [tokens, columns], C-contiguous. Each token reads the matrix.
            isa: the instruction set, by default the active one.

        Raises:
            ValueError: sizes do not match, or the processor lacks the set.
        """

_Layered: TypeAlias = GroupwiseBlob | CodedGroupwiseBlob | CompensatedBlob | TernaryBlob | CodebookBlob | DenseMatrix
_Vector: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]

@final
class Decoder:
    """A decoder of packed and dense tensors, without embedding and head, that takes one token at a time.

    A layer is h = x + attention(norm x), y = h + experts(norm h). Tensors are kept, not copied; vectors are float32, or
    bfloat16 as its bits in uint16; a matrix is a pair of a tensor and the mode of its products, or None.

    Args:
        layers: for each layer a mapping (`moepack.runtime.plan` writes them).
        frequencies: float32 [head width / 2], the angle of each pair of a head's values at position 1.
        rotary_scale: what turned values are multiplied by.
        norm: of the output.
        epsilon: of that norm.

    Raises:
        TypeError: a layer is described in another way.
        KeyError: the same.
    """

    def __new__(
        cls,
        layers: list[dict[str, Any]],
        frequencies: NDArray[np.float32],
        rotary_scale: float,
        norm: _Vector,
        epsilon: float,
    ) -> Decoder: ...
    def step(
        self,
        x: NDArray[np.float32] | NDArray[np.uint16],
        position: int,
        caches: list[tuple[NDArray[Any], NDArray[Any]]],
        length: int,
        isa: str | None = None,
    ) -> NDArray[np.float32]:
        """Return what a token's hidden state becomes behind all layers, normed, float32 [1, hidden].

        Args:
            x: float32, or bfloat16 as its bits in uint16; [1, hidden], C-contiguous.
            position: of the token.
            caches: for each layer keys and values, [groups, capacity, width], float32 or bfloat16 as its bits,
                C-contiguous; the token's are written at `length`.
            length: tokens that are in the caches, all of which the token sees.
            isa: the instruction set, by default the active one.

        Raises:
            TypeError: a matrix is no tensor, or a cache no array.
            ValueError: sizes do not match, a cache is full, there is no such mode, or the processor lacks the set.
        """

def gated_experts(
    gate: _Layered,
    up: _Layered,
    down: _Layered,
    x: NDArray[np.float32] | NDArray[np.uint16],
    experts: NDArray[np.int64],
    weights: NDArray[np.float32],
    modes: tuple[str | None, str | None, str | None] = ...,
    isa: str | None = None,
) -> NDArray[np.float32]:
    """Return for each token the sum over its experts of weight * down(silu(gate x) * up x), float32 [tokens, columns].

    Args:
        gate: experts x hidden x columns.
        up: as `gate`; the three may be of different formats.
        down: experts x columns x hidden.
        x: float32, or bfloat16 as its bits in uint16; [tokens, columns], C-contiguous.
        experts: int64 [tokens, top_k], C-contiguous; a number that is no expert's is skipped.
        weights: float32 [tokens, top_k], C-contiguous.
        modes: those of gate, up and down, as their `matmul_grouped` take them; None is the format's default.
        isa: the instruction set, by default the active one.

    Raises:
        TypeError: a projection is no packed tensor.
        ValueError: sizes do not match, a format has no such mode, or the processor lacks the set.
    """

def encode_codebook(
    codes: NDArray[np.uint8],
    centroids: NDArray[np.int16],
    scales: NDArray[np.float32],
    *,
    bits: int,
    block: int,
    ndim: int,
    activation_bits: int = 0,
    hadamard: int = 1,
) -> NDArray[np.uint8]:
    """Pack codes and codebooks, uint8 [bytes]; a weight is `scale * centroid[code]`.

    Args:
        codes: uint8 [experts, rows, columns], C-contiguous, below 2^bits.
        centroids: int16 [experts, rows, blocks, 2^bits], C-contiguous, -32639 to 32639; multiples of 256 unless
            activation_bits is 0, for then the high byte alone is stored.
        scales: float32 [experts, rows, blocks], C-contiguous, finite and not negative.
        bits: of a code: 2, 3 or 4.
        block: columns that share a codebook, a multiple of 128; at least the columns means one codebook a row.
        ndim: axes that the user sees: 2 (a matrix, one expert) or 3.
        activation_bits: to how many bits the runtime rounds activations: 4 or 8, or 0 for not at all.
        hadamard: columns that products turn together by Hadamard's matrix before they multiply, a power of two that
            divides the columns, 1 for not at all; codes and centroids are those of the turned weights.

    Raises:
        ValueError: a code, centroid, scale or shape is out of range.
    """

@final
class CodebookBlob:
    """A packed codebook tensor of experts x rows x columns over an array that it keeps and reads in place.

    Raises CorruptionError at construction if header and size contradict each other.
    """

    def __new__(cls, data: NDArray[np.uint8]) -> CodebookBlob: ...
    @property
    def bits(self) -> int:
        """The bits of a code: 2, 3 or 4."""
    @property
    def activation_bits(self) -> int:
        """To how many bits products round activations unless told otherwise: 4 or 8, or 0 for not at all."""
    @property
    def hadamard(self) -> int:
        """The columns that products turn together by Hadamard's matrix before they multiply; 1 for not at all."""
    @property
    def block_size(self) -> int:
        """The columns that share a codebook."""
    @property
    def experts(self) -> int:
        """The number of experts, 1 for a matrix."""
    @property
    def rows(self) -> int:
        """The number of rows of an expert."""
    @property
    def columns(self) -> int:
        """The number of columns."""
    @property
    def ndim(self) -> int:
        """Axes of the tensor as its user sees it: 2 or 3."""
    @property
    def nbytes(self) -> int:
        """The size of the packed tensor in bytes, everything counted."""
    def decode(self) -> NDArray[np.uint8]:
        """Return the codes, uint8 [experts, rows, columns]."""
    def dequantize(self) -> NDArray[np.float32]:
        """Return the values, float32 [experts, rows, columns]."""
    def verify(self) -> None:
        """Check every parameter and padding byte; CorruptionError names expert, row and block."""
    def matmul(
        self,
        x: NDArray[np.float32] | NDArray[np.uint16],
        expert: int = 0,
        *,
        mode: Literal["exact", "int16", "int8"] | None = None,
        activation_bits: int | None = None,
        isa: str | None = None,
    ) -> NDArray[np.float32]:
        """Return W x for one expert without unpacking W, float32 [tokens, rows].

        Args:
            x: float32, or bfloat16 as its bits in uint16; [tokens, columns], C-contiguous.
            expert: whose weights.
            mode: "exact" (floating point), "int16" (activations quantized a token, whole centroids) or "int8"
                (centroids rounded to 8 bits); by default what the tensor asks for, exact without activation bits.
            activation_bits: of the integer modes, 4 or 8; by default the tensor's, or 8.
            isa: the instruction set, by default the active one.

        Raises:
            ValueError: sizes do not match, there is no such expert or mode, or the processor lacks the set.
        """
    def matmul_grouped(
        self,
        x: NDArray[np.float32] | NDArray[np.uint16],
        offsets: NDArray[np.int64],
        *,
        mode: Literal["exact", "int16", "int8"] | None = None,
        activation_bits: int | None = None,
        isa: str | None = None,
    ) -> NDArray[np.float32]:
        """Return W x with each expert's own tokens, in one parallel region: float32 [tokens, rows].

        Args:
            x: as in `matmul`, its tokens sorted by expert.
            offsets: int64 [experts + 1], ascending from 0 to the number of tokens.
            mode: as in `matmul`.
            activation_bits: as in `matmul`.
            isa: as in `matmul`.

        Raises:
            ValueError: sizes or offsets do not match, there is no such mode, or the processor lacks the set.
        """

def refine_codebooks(
    targets: NDArray[np.float32],
    hessians: NDArray[np.float32],
    codes: NDArray[np.uint8],
    centroids: NDArray[np.float32],
    *,
    block: int,
    steps: int,
    factors: NDArray[np.float32] | None = None,
    points: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float64]]:
    """Refine codes and centroids of rows on their output error (q - t) H (q - t)^T.

    Args:
        targets: float32 [experts, rows, columns], C-contiguous: t.
        hessians: float32 [experts, columns, columns], C-contiguous: H, symmetric.
        codes: uint8 [experts, rows, columns], C-contiguous: the start.
        centroids: float32 [experts, rows, blocks, clusters], C-contiguous, ascending: the start.
        block: columns that share a codebook.
        steps: how often assignments and centroids are improved.
        factors: float32 [experts, columns, columns], C-contiguous: unit upper triangular factors of the Hessians, to
            round with error feedback in the first step.
        points: float32 as the targets: assign to the centroids nearest to these instead of column by column.

    Returns:
        Codes and centroids, flat; the objectives, float64 [experts, rows, steps + 1], which never rise.

    Raises:
        ValueError: sizes do not match, a code is no cluster's, or both factors and points are given.
    """

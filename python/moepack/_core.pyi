"""The Rust core: packed tensors of every format, solvers, decoding, threads and instruction sets.

Arrays are C-contiguous. Packing functions and solvers raise a ValueError that names the value, size or setting that is
out of range. `isa` is an instruction set of `available_isas`, by default the active one.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CorruptionError", "Decoder", "DenseMatrix", "PackedTensor", "RecordMemory", "StreamedChannels",
    "UnknownFormatError", "__version__", "available_isas", "coded_frame", "coded_from_device", "coded_to_device",
    "count_integers", "count_symbols", "count_values", "decode_coded", "encode_channels", "encode_codebook",
    "encode_coded", "encode_compensated", "encode_groupwise", "encode_ternary", "fit_groups", "formats",
    "gated_experts", "isa", "kernels", "kmeans", "pack_int3", "packed_bytes", "refine_channels", "refine_codebooks",
    "round_priced", "round_samples", "search_scales", "set_threads", "solve_dependent", "sparse_channels",
    "sparse_experts", "ternary_table", "threads", "unpack_int3",
]  # fmt: skip

__version__: str

_Bytes: TypeAlias = NDArray[np.uint8]
_Floats: TypeAlias = NDArray[np.float32]
_Counts: TypeAlias = list[tuple[int, NDArray[np.uint64]]]
_Factor: TypeAlias = tuple[_Bytes, _Floats] | _Floats
_Integers: TypeAlias = NDArray[np.int8] | NDArray[np.int16] | NDArray[np.int32]
_Indices: TypeAlias = NDArray[np.int64]
_Channels: TypeAlias = PackedTensor | StreamedChannels
_Vector: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]
"""float32, or bfloat16 as bits."""

class CorruptionError(ValueError):
    """Bytes of a packed tensor contradict its format or end too early."""

class UnknownFormatError(CorruptionError):
    """Bytes do not begin with the magic of a known packed format."""

def set_threads(threads: int) -> None:
    """Set the number of threads for all later calls, 1 to 1024; ValueError for any other number."""

def threads() -> int:
    """Return the number of threads that calls use."""

def isa() -> str:
    """Return the set in use: scalar, neon, avx2, avx512 or amx; ValueError if MOEPACK_ISA forces an unsupported one."""

def available_isas() -> list[str]:
    """Return the instruction sets that the processor supports, the most general first."""

def kernels() -> dict[str, str]:
    """Return the matrix product kernel of every packed format on this machine, by the format's name."""

def formats() -> list[tuple[str, bytes, int]]:
    """Return the packed formats: kind, magic and version of each."""

def packed_bytes(kind: str, shape: tuple[int, int, int], **specification: bool | int | str) -> int:
    """Return the size in bytes of a packed tensor of experts x rows x columns, everything included.

    Args:
        kind: groupwise, codebook or compensated.
        shape: experts, rows, columns.
        specification: as in `PackedTensor.details`: bits, group_size, symmetric (for a compensated tensor also
            rank_bits, total_rank); for codebooks bits, block_size, activation_bits.

    Raises:
        ValueError: the kind or the tensor does not exist, or its size depends on its codes.
        TypeError: a value is not a bool, a number or a string.
    """

@final
class PackedTensor:
    """A packed tensor of experts x rows x columns, of any format, opened by its first eight bytes and read in place.

    Args:
        data: uint8 [bytes], exactly one packed tensor; it is referenced and not copied, and must not change afterwards.

    Raises:
        CorruptionError: the header, offsets or size contradict the format. Codes are checked on use.
        UnknownFormatError: the bytes do not begin with the magic of a known format.
    """

    def __new__(cls, data: _Bytes) -> PackedTensor: ...
    @property
    def kind(self) -> str:
        """The format's name in manifests: "groupwise"."""
    @property
    def format(self) -> str:
        """The format with the main part of its specification: "groupwise-4bit"."""
    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts (1 for a matrix), rows and columns."""
    @property
    def ndim(self) -> int:
        """The number of axes that the user sees: 2 or 3."""
    @property
    def nbytes(self) -> int:
        """The size of the packed tensor in bytes, everything included."""
    @property
    def modes(self) -> list[str]:
        """The supported compute modes, the default first."""
    def details(self) -> dict[str, Any]:
        """Return the tensor's specification besides its shape, JSON values in a fixed order."""
    def sections(self) -> dict[str, tuple[int, int]]:
        """Return the parts of the format, name -> (offset, bytes), in order, without the header.

        Group-wise tensors have "blocks", codebooks "panels", ternary ones "levels", "index", "starts", "payload",
        compensated ones "base", "ranks", "right_scales", "right", "left_scales", "left" (docs/format.md).
        """
    def payloads(self) -> _Indices:
        """Return the byte range of each expert's codes, [experts, 2]; products of other experts do not read it."""
    def decode(self) -> NDArray[Any]:
        """Return the codes [experts, rows, columns], int8 (ternary, coded) or uint8; CorruptionError, ValueError."""
    def dequantize(self, dtype: Literal["float32", "bfloat16"] = "float32") -> NDArray[Any]:
        """Return the values [experts, rows, columns], bfloat16 as bits in uint16; ValueError, CorruptionError."""
    def look_up(self, rows: _Indices, dtype: Literal["float32", "bfloat16"] = "float32") -> NDArray[Any]:
        """Return the values [n, columns] of rows [n], counted over all experts, without decoding others; ValueError."""
    def parameters(self, name: str) -> NDArray[Any]:
        """Return the stored parameters of a name, float32 or (ranks) int64; ValueError if the tensor has none.

        Args:
            name: "levels" [experts, rows, 2] of ternary tensors; "scales" and, unless symmetric, "offsets" [experts,
                rows, groups] of group-wise ones; in addition "ranks" [experts], "right" [sum of ranks, columns] and
                "left" [sum of ranks, rows] of compensated ones; "scales" [experts, rows, blocks] and "centroids" [...,
                2^bits] of codebooks; "scales" [experts, rows] or [1, 1] of coded ones and, if columns have scales,
                "columns" [experts, columns] or [1, columns].
        """
    def verify(self) -> None:
        """Check every byte: codes, parameters, offsets, padding; CorruptionError names the position."""
    def matmul(
        self,
        x: _Vector,
        expert: int = 0,
        mode: str | None = None,
        isa: str | None = None,
        activation_bits: int | None = None,
    ) -> _Floats:
        """Return W x for one expert without unpacking W, float32 [tokens, rows].

        Args:
            x: [tokens, columns].
            expert: the expert's index.
            mode: one of `modes`, by default "exact", or the mode that a codebook tensor is designed for.
            isa: the instruction set.
            activation_bits: bits of rounded activations for codebook tensors, 4 or 8; by default the tensor's, or 8.

        Raises:
            ValueError: sizes do not match, the expert or mode does not exist, or the processor lacks the set.
        """
    def matmul_grouped(
        self,
        x: _Vector,
        offsets: _Indices,
        mode: str | None = None,
        isa: str | None = None,
        activation_bits: int | None = None,
    ) -> _Floats:
        """Return W x with each expert's own tokens, in one parallel region: float32 [tokens, rows].

        Args:
            x: [tokens, columns], sorted by expert.
            offsets: [experts + 1], ascending from 0 to the number of tokens: expert e takes the tokens `offsets[e]` to
                `offsets[e + 1]`.
            mode, isa, activation_bits: as in `matmul`.

        Raises:
            ValueError: sizes or offsets do not match, the mode does not exist, or the processor lacks the set.
        """
    def matmul_transposed(self, y: _Vector, offsets: _Indices, isa: str | None = None) -> _Floats:
        """Return W^T y with each expert's own tokens, float32 [tokens, columns]; W is decoded 64 rows at a time.

        Args:
            y: [tokens, rows], sorted by expert.
            offsets, isa: as in `matmul_grouped`.

        Raises:
            ValueError: sizes or offsets do not match, or the processor lacks the set.
            CorruptionError: codes contradict the format.
        """

def encode_ternary(codes: NDArray[np.int8], levels: _Floats, *, ndim: int, code: str = "fsv8") -> _Bytes:
    """Encode ternary codes into a packed tensor, uint8 [bytes].

    Args:
        codes: int8 [experts, rows, columns], each -1, 0 or 1.
        levels: float32 [experts, rows, 2]: the negative (<= 0) and the positive (>= 0) value of a row.
        ndim: the number of axes that the user sees: 2 (a matrix, one expert) or 3.
        code: "fsv8" or "dict16" (the dictionary of the QMoE paper, section 4.3).
    """

def encode_groupwise(
    codes: _Bytes,
    scales: _Floats,
    offsets: _Floats | None,
    *,
    bits: int,
    group_size: int,
    ndim: int,
    dtype: str = "float16",
) -> _Bytes:
    """Pack group-wise codes, uint8 [bytes].

    Args:
        codes: uint8 [experts, rows, columns], below 2^bits.
        scales: float32 [experts, rows, groups], finite and exactly representable in `dtype`.
        offsets: the same, or None for a symmetric tensor, whose weights are scale * (code - 2^(bits - 1)).
        bits: 2, 3, 4 or 8.
        group_size: columns per group: 16, 32, 64, 128, 256, or at least the columns, which means one group per row.
        ndim: the number of axes that the user sees: 2 (a matrix, one expert) or 3.
        dtype: the storage type of parameters, "float16" or "bfloat16".
    """

def encode_channels(records: tuple[_Bytes, _Floats] | NDArray[np.uint16], thresholds: _Floats, *, bits: int) -> _Bytes:
    """Pack experts by channels, uint8 [bytes]: for each channel the gate row, then the down projection's column.

    Args:
        records: the bits of finite bfloat16 values, [experts, channels, 2 columns]; or codes of the same shape, below
            2^bits, with scales [experts, channels, 2 ceil(columns / 64)], exactly representable in bfloat16: a value
            is scale * (code - 2^(bits - 1)).
        thresholds: float32 [experts], not negative; infinity skips every channel.
        bits: 4 or 8, or 16 for bfloat16.
    """

def encode_coded(
    codes: _Integers,
    scales: _Floats,
    *,
    ndim: int,
    columns: _Floats | None = None,
    stream_rows: int | None = None,
    symbols: str = "plain",
) -> _Bytes:
    """Entropy code integers, uint8 [bytes]; a weight is `scale * code`, or `(scale * code) * column`, in float32.

    Args:
        codes: int8, int16 or int32 [experts, rows, columns], at most 2^30 in magnitude.
        scales: float32 [experts, rows], or [1, 1] for the whole tensor; finite.
        ndim: the number of axes that the user sees: 2 (a matrix, one expert) or 3.
        columns: column scales, float32 [experts, columns], or [1, columns] for all experts; finite.
        stream_rows: rows coded together, 16 or 64; the default depends on the columns.
        symbols: what the symbols stand for: "plain", integers; "plain+1" to "plain+3", integers with at most this
            number of uncompressed low bits per code (the number that gives the smallest size is used); "dependent",
            indices of codes that follow paths of states (docs/format.md, section 9), ValueError for other codes.
    """

def decode_coded(data: _Bytes) -> NDArray[np.int32]:
    """Return the codes of a coded tensor, int32 [experts, rows, columns], however large; CorruptionError."""

def coded_to_device(data: _Bytes, segment_chunks: int | None = None) -> _Bytes:
    """Return the GPU layout of a coded tensor, in segments of 1 to 16 chunks of 256 columns; CorruptionError."""

def coded_frame(data: _Bytes) -> tuple[_Bytes, NDArray[np.uint64]]:
    """Return the GPU layout without records, and the start of each stream and the last end, uint64; CorruptionError."""

def coded_from_device(data: _Bytes) -> _Bytes:
    """Undo `coded_to_device`; CorruptionError."""

def encode_codebook(
    codes: _Bytes,
    centroids: NDArray[np.int16],
    scales: _Floats,
    *,
    bits: int,
    block: int,
    ndim: int,
    activation_bits: int = 0,
    hadamard: int = 1,
) -> _Bytes:
    """Pack codes and codebooks, uint8 [bytes]; a weight is `scale * centroid[code]`.

    Args:
        codes: uint8 [experts, rows, columns], below 2^bits.
        centroids: int16 [experts, rows, blocks, 2^bits], -32639 to 32639; multiples of 256 unless
            activation_bits is 0, because then only the high byte is stored.
        scales: float32 [experts, rows, blocks], finite and not negative.
        bits: bits per code: 2, 3 or 4.
        block: columns that share a codebook, a multiple of 128; at least the columns means one codebook per row.
        ndim: the number of axes that the user sees: 2 (a matrix, one expert) or 3.
        activation_bits: bits of rounded activations at run time: 4 or 8, or 0 for no rounding.
        hadamard: the width of the Hadamard rotation that products apply to activations, a power of two that divides
            the columns, or 1 for no rotation; codes and centroids are those of the rotated weights.
    """

def encode_compensated(base: _Bytes, ranks: _Indices, right: _Factor, left: _Factor, *, bits: int) -> _Bytes:
    """Add low-rank compensators to a packed group-wise tensor, W = Wq + U V; uint8 [bytes].

    Args:
        base: the packed group-wise tensor, uint8 [bytes].
        ranks: int64 [experts], each at most min(rows, columns); their sum is T.
        right: the rows of V, expert by expert. For 3 or 8 bits, codes uint8 [T, columns] and scales float32
            [T, ceil(columns / 64)]: a value is scale * (code - 2^(bits - 1)). For 16 bits, values float32 [T, columns].
            Scales and values must be exactly representable in float16.
        left: likewise the rows of U^T, [T, rows].
        bits: 3, 8 or 16.

    Raises:
        CorruptionError: `base` is not a group-wise tensor.
    """

def pack_int3(codes: _Bytes) -> NDArray[np.uint32]:
    """Pack 3-bit codes, uint8 [n] to uint32 [3 * n / 32]; ValueError if a code or n is out of range."""

def unpack_int3(words: NDArray[np.uint32]) -> _Bytes:
    """Undo `pack_int3`, uint32 [n] to uint8 [32 * n / 3]; ValueError if n is not a multiple of 3."""

def ternary_table(dictionary: int | None = None) -> tuple[NDArray[np.uint32], int, bool]:
    """Return the decoding table of a ternary code: entries, class bits, and whether entries have three slots.

    The index of an entry is `code << bits | previous code >> (8 - bits)`, or the code for dict16. Entries have:

    - two slots: positions of non-zeros in bits 0-7 and 8-15, their symbols (1, 2; 0 unused) in bits 16-17 and 18-19;
    - three slots: positions in bits 0-4, 5-9 and 10-14, symbols in bits 16-17, 18-19 and 20-21;
    - the word's length in bits 24-31.

    Args:
        dictionary: the index of an FSV8 dictionary (docs/format.md, section 5.1), below 36; None for dict16.

    Raises:
        ValueError: the dictionary does not exist.
    """

def kmeans(
    values: _Floats, clusters: int, weights: _Floats | None = None
) -> tuple[_Floats, _Bytes, NDArray[np.float64]]:
    """Cluster the values of each row with the lowest weighted sum of squared errors.

    Args:
        values: float32 [rows, columns], finite.
        clusters: 1 to 16.
        weights: float32 [groups, columns], finite and not negative: the importance of each column, shared by
            rows / groups consecutive rows; by default 1.

    Returns:
        Centroids, float32 [rows, clusters], ascending; codes of the nearest centroid, uint8 [rows, columns]; errors,
        float64 [rows].
    """

def round_priced(
    weights: _Vector,
    lengths: _Floats,
    out: _Integers,
    *,
    step: float,
    price: float,
    width: float = 1.0,
    dependent: bool = False,
) -> int:
    """Round weights w to integers q that minimize `(w / step - q)^2 + price * bits(q)`; return the largest magnitude.

    Args:
        weights: float32, or bfloat16 as bits in uint16; [rows, columns], finite.
        lengths: float32 [N, 2 L + 1], bits of the integers from -L to L (at most 1,023) in each class of row blocks
            (16 rows) by root mean square: a quarter of an octave each from 2^-24 on; the last includes all wider ones.
        out: receives the integers, or their low bits if the largest does not fit; weights beyond L become the nearest
            integer, at most 2^30 in magnitude.
        step: the value of an integer of one.
        price: the cost of a bit in squared steps.
        width: weights are divided by it to find their class.
        dependent: find the codes of the cheapest path (docs/format.md, section 9); lengths are of indices, L below 32.
    """

def round_samples(
    samples: _Floats, lengths: _Floats, prices: NDArray[np.float32], *, dependent: bool = False
) -> NDArray[np.int32]:
    """Round samples [E, R, C] in steps to codes of the same shape.

    Each matrix has bits [E, 2 L + 1] of the symbols from -L to L, and a price [E] in squared steps per bit.

    Raises:
        ValueError: a value is NaN or infinite.
    """

def count_values(values: _Floats, *, classes: int, bins: int, reach: float) -> _Counts:
    """Count weights [rows, columns] by class, [bins] each from -`reach` to `reach` root mean squares.

    The first and the last bin include all weights beyond.
    """

def count_integers(values: _Floats, integers: _Integers, *, classes: int, largest: int) -> _Counts:
    """Count the integers [1, rows, columns] of weights by class, [2 `largest` + 3] each.

    The ends include all integers beyond.
    """

def count_symbols(
    codes: _Integers, runs: _Indices, *, number: int, largest: int, dependent: bool = False
) -> NDArray[np.float64]:
    """Count the symbols of codes [E, R, C] by the run [E, R] of their rows, [`number`, 2 `largest` + 3].

    The ends include all symbols beyond. The symbols of dependent codes are their indices.
    """

def solve_dependent(
    weights: NDArray[np.float32],
    upper: NDArray[np.float32],
    pivots: _Floats,
    prices: NDArray[np.float32],
    lengths: _Floats,
    runs: _Indices,
    *,
    step: float,
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Find dependent codes with GPTQ along each path. Columns are visited lane by lane: 0, 4, 8, ..., 1, 5, ...

    Args:
        weights: [E, R, C], finite.
        upper, pivots: [E, C, C] and [E, C] of the factorized Hessians, rows and columns in the order of visits.
        prices: [E], the cost of a bit in squared steps for a pivot of 1.
        lengths: [N, 2 L + 3], bits of the indices from -L - 1 to L + 1, L at most 62; the ends include all beyond.
        runs: [E, R], the list of lengths of each row.
        step: the value of four codes.

    Returns:
        Codes [E, R, C]; losses [E, C], sums over rows of (pivot * error in codes)^2, not finite after overflow.
    """

def refine_codebooks(
    targets: _Floats,
    hessians: _Floats,
    codes: _Bytes,
    centroids: _Floats,
    *,
    block: int,
    steps: int,
    factors: _Floats | None = None,
    points: _Floats | None = None,
) -> tuple[_Bytes, _Floats, NDArray[np.float64]]:
    """Refine codes and centroids of rows on their output error (q - t) H (q - t)^T.

    Args:
        targets: float32 [experts, rows, columns]: t.
        hessians: float32 [experts, columns, columns]: H, symmetric.
        codes: uint8 [experts, rows, columns]: the start.
        centroids: float32 [experts, rows, blocks, clusters], ascending: the start.
        block: columns that share a codebook.
        steps: the number of updates of assignments and centroids.
        factors: float32 [experts, columns, columns]: unit upper triangular factors of the Hessians, for error feedback
            in the first step.
        points: float32, same shape as the targets: assign weights to the centroids nearest to these points instead of
            column by column.

    Returns:
        Codes and centroids, flat; the objectives, float64 [experts, rows, steps + 1], which never rise.
    """

def fit_groups(
    weights: _Floats,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = False,
    dtype: str = "float16",
    iterations: int = 8,
    start: tuple[_Floats, _Floats] | None = None,
    compensation: _Floats | None = None,
    isa: str | None = None,
) -> tuple[_Bytes, _Floats, _Floats, NDArray[np.float64]]:
    """Find codes, scales and offsets of least squared error: `scale * code + offset` for each row and group of columns.

    Args:
        weights: float32 [rows, columns].
        bits: bits per code, 1 to 8.
        group_size: columns that share parameters.
        symmetric: offsets are -2^(bits - 1) times the scales.
        dtype: "float16" or "bfloat16", the storage type of parameters.
        iterations: the maximum number of regressions.
        start: scales and offsets, float32 [rows, groups], to start from instead of a search.
        compensation: float32 [rows, columns], the values of a compensator, which are added to those of the codes; they
            are overwritten by the weights minus the codes' values.
        isa: the instruction set, by default the active one; the result does not depend on it.

    Returns:
        Codes, uint8 [rows, columns]; scales and offsets, float32 [rows, groups]; the squared norms of the weights minus
        the codes' values, float64 [rows].
    """

def search_scales(
    weights: _Floats, group_size: int, factors: _Floats, *, codes: tuple[float, float], isa: str | None = None
) -> _Floats:
    """Find the scale of each group that explains most of its energy, out of a ladder of trial scales.

    Args:
        weights: float32 [rows, columns].
        group_size: columns that share a scale; a divisor of the columns.
        factors: float32 [trials], multiples of weights that are divided by the largest magnitude of their group; of
            either sign, at most 2^22 in magnitude.
        codes: the smallest and the largest code.
        isa: the instruction set, by default the active one; the result does not depend on it.

    Returns:
        Scales, float32 [rows, groups]; 0 for groups of zeros.
    """

@final
class RecordMemory:
    """Memory for records, shared by the tensors of a model: memory of dropped records is reused."""

    def __new__(cls) -> RecordMemory: ...

@final
class StreamedChannels:
    """Packed channels whose records are loaded from a file on demand.

    Args:
        memory: the memory for loaded records.
        head: the bytes before the first record.
        file, start: the file, and the offset of the tensor in it.
        direct: bypass the page cache; the file system must support it.

    Raises:
        CorruptionError: `head` contradicts the format.
        OSError: the file cannot be opened.

    Attributes:
        format, shape: as in `PackedTensor`.
        record_bytes, buffer_bytes: the bytes of a record, and of the buffer of each reading thread.
    """

    format: str
    shape: tuple[int, int, int]
    record_bytes: int
    buffer_bytes: int
    def __new__(cls, memory: RecordMemory, head: _Bytes, file: str, start: int, direct: bool) -> StreamedChannels: ...
    def thresholds(self) -> _Floats:
        """Return the experts' thresholds, float32 [experts]."""

    def read(self, records: _Indices, threads: int) -> tuple[int, int]:
        """Load records, ascending numbers over all experts; return the number of reads, and their bytes.

        Raises:
            EOFError: the file ends early; the argument is the byte where it ends.
            OSError: the drive reports an error.
        """

    def drop(self, records: _Indices) -> None:
        """Drop records, ascending; records that are not loaded are ignored."""

@final
class DenseMatrix:
    """A dense matrix of rows x columns, read in place.

    Args:
        data: uint8 [bytes], contiguous: the values, row by row; it is referenced and not copied.
        dtype: "float32" or "bfloat16".
        rows, columns: the shape of the matrix.
    """

    def __new__(cls, data: _Bytes, dtype: str, rows: int, columns: int) -> DenseMatrix: ...
    def matmul(self, x: _Vector, isa: str | None = None) -> _Floats:
        """Return y = W x, float32 [tokens, rows], of x [tokens, columns]. Each token reads the matrix."""

@final
class Decoder:
    """A decoder of packed and dense tensors, without embedding and head, that takes one token at a time.

    A layer is h = x + mixer(norm x), y = h + experts(norm h). Tensors are referenced, not copied. Vectors are float32,
    or bfloat16 as bits in uint16. A matrix is a pair of a tensor and the mode of its products, or None.

    Args:
        layers: a mapping for each layer (see `moepack.decoding.translation`).
        rotary: a mapping: `frequencies`, float32, the angle of each pair of a head's values at position 1; `scale`,
            the factor of rotated values; `order`, the order of pairs: "halves", "pairs" or "pairs to halves".
        norm: the final norm: weight, epsilon, and an offset added to the weight.

    Raises:
        TypeError, KeyError: the description of a layer is invalid.
    """

    def __new__(
        cls, layers: list[dict[str, Any]], rotary: dict[str, Any], norm: tuple[_Vector, float, float]
    ) -> Decoder: ...
    def step(
        self,
        x: _Vector,
        position: int,
        caches: list[tuple[NDArray[Any], NDArray[Any], int, int]],
        isa: str | None = None,
    ) -> _Floats:
        """Pass a token's hidden state through all layers and return the normed output, float32 [1, hidden].

        Args:
            x: [1, hidden].
            position: the position of the token.
            caches: for each layer keys and values, [groups, capacity, width], float32 or bfloat16 as bits,
                C-contiguous, the first visible token, and the number of tokens; the token's keys and values are
                appended. For a delta rule: the last inputs of its convolution, [1, channels, tokens], and its state,
                float32 [heads, width of keys, width of values], both of which are updated; the numbers are ignored.
            isa: the instruction set.

        Raises:
            TypeError: a matrix is not a tensor, or a cache is not an array.
            ValueError: sizes do not match, a cache is full, a mode does not exist, or the processor lacks the set.
        """

def gated_experts(
    gate: PackedTensor | DenseMatrix,
    up: PackedTensor | DenseMatrix,
    down: PackedTensor | DenseMatrix,
    x: _Vector,
    experts: _Indices,
    weights: _Floats,
    modes: Sequence[str | None] = ...,
    isa: str | None = None,
) -> _Floats:
    """Return, for each token, the sum over its experts of weight * down(silu(gate x) * up x).

    The result is float32 [tokens, columns].

    Args:
        gate: experts x hidden x columns.
        up: as `gate`; the three may be of different formats.
        down: experts x columns x hidden.
        x: [tokens, columns].
        experts: int64 [tokens, top_k]; numbers that are not valid experts are skipped.
        weights: float32 [tokens, top_k].
        modes: the modes of gate, up and down, as in `matmul_grouped`; None is the format's default.
        isa: the instruction set, by default the active one.

    Raises:
        TypeError: a projection is not a packed tensor.
        ValueError: sizes do not match, a format has no such mode, or the processor lacks the set.
    """

def refine_channels(
    channels: _Channels,
    x: _Vector,
    experts: _Indices,
    weights: _Floats,
    ups: _Floats,
    gates: _Floats,
    inner: _Floats,
    isa: str | None = None,
) -> tuple[_Floats, int]:
    """Compute the contributions of records to coarse copies of a layer; records hold the differences of finer weights.

    Args:
        channels, x, experts, weights, ups, isa: as for `sparse_channels`.
        gates: g, same shape as `ups`, the outputs of the coarse gates.
        inner: [tokens, top_k, hidden]; if u_c is not zero it becomes h_c = silu(g_c + gate_c x) * u_c.

    Returns:
        For each token the sum over its experts and those channels of weight * h_c * down_c, float32 [tokens, columns],
        and their number; errors as `sparse_experts`.
    """

def sparse_channels(
    channels: _Channels, x: _Vector, experts: _Indices, weights: _Floats, ups: _Floats, isa: str | None = None
) -> tuple[_Floats, int]:
    """Compute a layer of experts whose channels are selected by given outputs of the up projection.

    Args:
        channels, x, experts, weights, isa: as for `sparse_experts`.
        ups: u, [tokens, top_k, hidden]; zero for skipped channels.

    Returns:
        For each token the sum over its experts and their channels c with u_c not zero of
        weight * silu(gate_c x) * u_c * down_c, float32 [tokens, columns], and their number; errors as `sparse_experts`.
    """

def sparse_experts(
    up: PackedTensor,
    channels: PackedTensor,
    x: _Vector,
    experts: _Indices,
    weights: _Floats,
    mode: str | None = None,
    isa: str | None = None,
) -> tuple[_Floats, int]:
    """Compute a layer of experts whose channels are selected by the experts' thresholds.

    Args:
        up: experts x hidden x columns, of any format; its outputs u select channels.
        channels: experts x hidden x 2 columns, in the format `channels`.
        x, experts, weights, isa: as for `gated_experts`.
        mode: the mode of the products with `up`; None is the format's default.

    Returns:
        For each token the sum over its experts and their channels c with |u_c| >= threshold of
        weight * silu(gate_c x) * u_c * down_c, float32 [tokens, columns]; and the number of these channels.

    Raises:
        CorruptionError: `channels` has another format.
        ValueError: sizes do not match, the format has no such mode, or the processor lacks the set.
    """

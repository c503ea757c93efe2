"""Codebook tensors: codes of 2, 3 or 4 bits into 4, 8 or 16 centroids per row or block of a row.

`CodebookTensor.quantize` clusters any weight with exact k-means. `encode_codebook` packs given codes and centroids.
`lut_matmul` multiplies by unpacked codes and codebooks. Centroids are stored as integers with one scale per codebook:
16 bits, or 8 bits if products round activations (see `fixed_point`).

A `CodebookTensor` has the invariants of `BlobTensor`.
"""

from typing import Any, Literal, Self

import torch

from moepack import _core
from moepack.arrays import AnyTensor, Array, as_tensor
from moepack.errors import InvalidTensorError
from moepack.solvers.fixed_point import centroid_bits, fixed_point, split_blocks
from moepack.solvers.kmeans import kmeans
from moepack.tensors import FLOATS, BlobTensor

__all__ = [
    "CodebookTensor",
    "encode_codebook",
    "lut_matmul",
]

BLOCK_UNIT = 128
Mode = Literal["auto", "exact", "bf16", "int16", "int8"]


class CodebookTensor(BlobTensor):
    """A matrix of codes of shape (R, C) with one codebook per row or block of columns, or a stack (E, R, C).

    Created by `CodebookTensor.quantize`, `encode_codebook` and `CodebookTensor.load`. Two tensors are equal if they
    have the same bytes. Instances can be pickled and copied.
    """

    kind = "codebook"

    @classmethod
    def quantize(
        cls,
        weight: AnyTensor,
        bits: int = 4,
        block: int | None = None,
        *,
        importance: AnyTensor | None = None,
        activation_bits: int = 0,
    ) -> Self:
        """Cluster and pack a matrix or a stack of matrices.

        Args:
            weight: shape (R, C) or (E, R, C), floating point, finite, C > 0.
            bits: bits per code: 2, 3 or 4, for 4, 8 or 16 centroids.
            block: columns per codebook, a multiple of 128; None for one codebook per row.
            importance: non-negative weight of the squared error of each column, shape (C,) or (E, C); default: 1.
            activation_bits: bits to which products round activations by default: 0 (no rounding), 4 or 8. With 4 or 8,
                centroids have 8 bits, otherwise 16.

        Raises:
            InvalidTensorError: invalid weight or importance.
            ValueError: unsupported bits or block.
        """
        _check(bits, block, activation_bits)
        values = as_tensor(weight, "weight")
        if values.dtype not in FLOATS or values.ndim not in (2, 3) or not values.shape[-1]:
            message = f"expected floating-point [R, C] or [E, R, C] with columns, got {values.dtype}"
            raise InvalidTensorError(f"{message} {list(values.shape)}")
        parts = split_blocks(values, block)
        shares: list[torch.Tensor | None] = [None] * len(parts)
        if importance is not None:
            shares = list(split_blocks(as_tensor(importance, "importance"), block))
        found = [kmeans(part, 1 << bits, share) for part, share in zip(parts, shares, strict=True)]
        codes = torch.cat([book.codes for book in found], -1)
        centroids = torch.stack([book.centroids for book in found], -2)
        return cls(_encode(codes, centroids, bits, block, activation_bits))

    @property
    def bits(self) -> int:
        """Bits per code: 2, 3 or 4."""
        return int(self._details["bits"])

    @property
    def block_size(self) -> int:
        """Stored columns per codebook, a multiple of 128."""
        return int(self._details["block_size"])

    @property
    def activation_bits(self) -> int:
        """Bits to which products round activations by default; 0 for no rounding."""
        return int(self._details["activation_bits"])

    @property
    def hadamard(self) -> int:
        """Columns that products rotate together by a Hadamard matrix (docs/format.md, section 7); 1 for no rotation."""
        return int(self._details["hadamard"])

    def matmul(self, x: Array, mode: Mode | None = None, activation_bits: int | None = None) -> Array:
        """Multiply activations by the packed weights: `y = x W^T`. Gradients are W^T g.

        Args:
            x: activations of shape (tokens, C), or (C,) for one token; (E, tokens, C) for a stack. float32, bfloat16 or
                float16; torch or numpy.
            mode: "exact" (float32); "bf16" (both factors rounded, but few tokens exact); "int16" (activations rounded
                per token, asymmetric min-max; full centroids); "int8" (centroids also rounded to 8 bits); or "auto",
                the default: int8 if the tensor was made for rounded activations, otherwise exact for few tokens, and
                bf16 for many if that is faster.
            activation_bits: activation bits of the integer modes, 4 or 8; default: the tensor's, or 8.

        Returns:
            Outputs of shape (tokens, R), (R,) or (E, tokens, R), with the dtype and on the device of `x`.

        Raises:
            ValueError: wrong shape, unsupported dtype, or unknown mode.
        """
        if activation_bits not in (None, 4, 8):
            raise ValueError(f"products round activations to 4 or 8 bits, not {activation_bits}")
        return self._multiply(x, mode=mode, activation_bits=activation_bits)

    def __repr__(self) -> str:
        return (
            f"CodebookTensor(shape={self.shape}, bits={self.bits}, block_size={self.block_size}, "
            f"activation_bits={self.activation_bits}, nbytes={self.nbytes}, bits_per_weight={self.bits_per_weight:.4f})"
        )


def encode_codebook(
    codes: AnyTensor, codebooks: AnyTensor, *, block: int | None = None, activation_bits: int = 0
) -> CodebookTensor:
    """Pack codes and codebooks. Centroids are rounded to 16 bits by `fixed_point`, or to 8 bits with activation bits.

    Args:
        codes: uint8 codes below K, shape (R, C) or (E, R, C).
        codebooks: finite centroids, shape (R, K) or (E, R, K), or (..., R, B, K) with blocks; K is 4, 8 or 16.
        block: columns per codebook, a multiple of 128; None for one codebook per row.
        activation_bits: bits to which products round activations by default: 0 (no rounding), 4 or 8.

    Raises:
        InvalidTensorError: (a ValueError) invalid codes or codebooks.
        ValueError: unsupported block or bits.
        TypeError: an argument is neither a torch tensor nor a numpy array.
    """
    given, books = as_tensor(codes, "codes").cpu(), as_tensor(codebooks, "codebooks").cpu()
    if given.dtype != torch.uint8 or given.ndim not in (2, 3):
        raise InvalidTensorError(f"codes must be uint8 [R, C] or [E, R, C], got {given.dtype} {list(given.shape)}")
    sizes = {4: 2, 8: 3, 16: 4}
    if books.ndim < given.ndim or books.shape[-1] not in sizes:
        raise InvalidTensorError(f"codebooks must be [..., K] with K of 4, 8 or 16, got {list(books.shape)}")
    if books.ndim == given.ndim:
        # One codebook per row. A row without columns has no block and stores no codebook.
        books = books.unsqueeze(-2)[..., : given.shape[-1], :]
    blocks = -(-given.shape[-1] // block) if block else min(given.shape[-1], 1)
    expected = [*given.shape[:-1], blocks, books.shape[-1]]
    if list(books.shape) != expected:
        message = f"codebooks have shape {list(books.shape)}, but codes of shape {list(given.shape)} with block {block}"
        raise InvalidTensorError(f"{message} need {expected}")
    if books.dtype not in FLOATS:
        raise InvalidTensorError(f"centroids must be floating-point, got {books.dtype}")
    if not bool(books.isfinite().all()):
        raise InvalidTensorError("centroids hold NaN or infinite values")
    bits = sizes[books.shape[-1]]
    _check(bits, block, activation_bits)
    return CodebookTensor(_encode(given, books, bits, block, activation_bits))


def lut_matmul(
    codes: AnyTensor,
    codebook: AnyTensor,
    x: Array,
    *,
    block: int | None = None,
    mode: Mode = "auto",
    activation_bits: int = 8,
) -> Array:
    """Multiply by codes and codebooks: `y = x W^T` with `W[i, j] = codebook[i, codes[i, j]]`.

    Each call packs the codes; a `CodebookTensor` packs them only once. Centroids are rounded to 16 bits relative to the
    largest of their codebook.

    Args:
        codes: uint8 codes below K, shape (R, C) or (E, R, C).
        codebook: shape (R, K) or (E, R, K), or (..., R, B, K) with blocks; K is 4, 8 or 16.
        x: as for `CodebookTensor.matmul`.
        block: columns per codebook, a multiple of 128; None for one codebook per row.
        mode: as for `CodebookTensor.matmul`.
        activation_bits: activation bits of the integer modes, 4 or 8.

    Raises:
        InvalidTensorError: codes and codebook do not match.
        ValueError: wrong shape of `x`, or unknown mode.
    """
    return encode_codebook(codes, codebook, block=block).matmul(x, mode, activation_bits)


def _check(bits: int, block: int | None, activation_bits: int) -> None:
    if bits not in (2, 3, 4):
        raise ValueError(f"bits must be 2, 3 or 4, not {bits}")
    if activation_bits not in (0, 4, 8):
        raise ValueError(f"activation_bits must be 0, 4 or 8, not {activation_bits}")
    if block is not None and (block < BLOCK_UNIT or block % BLOCK_UNIT):
        raise ValueError(f"block must be a multiple of {BLOCK_UNIT}, not {block}")


def _encode(codes: torch.Tensor, centroids: torch.Tensor, bits: int, block: int | None, activation_bits: int) -> Any:
    """Encode codes [..., R, C] and centroids [..., R, B, K] into a blob."""
    stored = fixed_point(centroids.cpu(), centroid_bits(activation_bits))
    experts = 1 if codes.ndim == 2 else codes.shape[0]

    def stacked(part: torch.Tensor) -> Any:
        return part.reshape(experts, *part.shape[codes.ndim - 2 :]).contiguous().numpy()

    try:
        return _core.encode_codebook(
            stacked(codes.cpu()), stacked(stored.centroids), stacked(stored.scales),
            bits=bits, block=block or 1 << 20, ndim=codes.ndim, activation_bits=activation_bits,
        )  # fmt: skip
    except ValueError as cause:
        raise InvalidTensorError(str(cause)) from cause

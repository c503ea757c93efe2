"""Group-wise tensors: integers of 2, 3, 4 or 8 bits with a scale (and an offset) per group of columns.

`GroupwiseTensor.quantize` quantizes any weight. `encode_groupwise` packs given codes and parameters exactly. A
`GroupwiseTensor` wraps one packed blob, a flat array of bytes that the kernels read in place, in memory or in a mapped
file.

A `GroupwiseTensor` has the invariants of `BlobTensor`.
"""

from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from moepack import _core
from moepack.arrays import AnyTensor, as_tensor
from moepack.errors import InvalidTensorError
from moepack.solvers.groupwise import GroupwiseCodes, check_grid, quantize_groupwise
from moepack.tensors import FLOATS, IntegerTensor

__all__ = ["GroupwiseTensor", "encode_groupwise", "quantize_groupwise"]

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


class GroupwiseTensor(IntegerTensor):
    """A group-wise quantized matrix of shape (R, C), or a stack of shape (E, R, C).

    Created by `GroupwiseTensor.quantize`, `encode_groupwise` and `GroupwiseTensor.load`. Two tensors are equal if they
    have the same shape, grid, codes and parameters. Instances can be pickled and copied.
    """

    kind = "groupwise"

    @classmethod
    def quantize(
        cls,
        weight: AnyTensor,
        bits: int = 4,
        group_size: int | None = 64,
        *,
        symmetric: bool = True,
        search: bool = True,
        dtype: torch.dtype = torch.float16,
    ) -> Self:
        """Quantize and pack a matrix or a stack of matrices. Arguments and errors as for `quantize_groupwise`."""
        values = as_tensor(weight, "weight")
        found = quantize_groupwise(values, bits, group_size, symmetric=symmetric, search=search, dtype=dtype)
        return cls(_encode(found, bits, group_size, dtype))

    @property
    def bits(self) -> int:
        """Bits per code: 2, 3, 4 or 8."""
        return int(self._details["bits"])

    @property
    def group_size(self) -> int:
        """Columns per scale; with one group per row, the number of columns."""
        return int(self._details["group_size"])

    @property
    def symmetric(self) -> bool:
        """Whether a weight is `scale * (code - 2^(bits - 1))`, without offsets."""
        return bool(self._details["symmetric"])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored parameters: float16 or bfloat16."""
        return {name: dtype for dtype, name in _DTYPES.items()}[self._details["dtype"]]

    @property
    def scales(self) -> torch.Tensor:
        """The scales, float32 of shape (R, G) or (E, R, G)."""
        return self._parameters("scales")

    @property
    def offsets(self) -> torch.Tensor | None:
        """The offsets, float32 of shape (R, G) or (E, R, G), or None if symmetric."""
        return None if self.symmetric else self._parameters("offsets")

    def __repr__(self) -> str:
        symmetry = "symmetric" if self.symmetric else "asymmetric"
        return (
            f"GroupwiseTensor(shape={self.shape}, bits={self.bits}, group_size={self.group_size}, {symmetry}, "
            f"nbytes={self.nbytes}, bits_per_weight={self.bits_per_weight:.4f})"
        )


def encode_groupwise(
    codes: AnyTensor,
    scales: AnyTensor,
    offsets: AnyTensor | None = None,
    *,
    bits: int,
    group_size: int | None,
    dtype: torch.dtype = torch.float16,
) -> GroupwiseTensor:
    """Pack codes and parameters exactly.

    Args:
        codes: uint8 codes below 2^bits, shape (R, C) or (E, R, C); torch or numpy.
        scales: shape (R, G) or (E, R, G), finite and exactly representable in `dtype`. Negative scales are allowed.
        offsets: as `scales`, or None for a symmetric grid.
        bits: 2, 3, 4 or 8.
        group_size: 16, 32, 64, 128 or 256 columns per group; None for one group per row.
        dtype: dtype of the stored parameters, float16 or bfloat16.

    Raises:
        InvalidTensorError: (a ValueError) invalid codes, parameters, shapes or dtypes.
        ValueError: unsupported grid.
        TypeError: an argument is neither a torch tensor nor a numpy array.
    """
    check_grid(bits, group_size)
    if dtype not in _DTYPES:
        raise ValueError(f"parameters must be float16 or bfloat16, not {dtype}")
    given = as_tensor(codes, "codes").cpu()
    if given.dtype != torch.uint8 or given.ndim not in (2, 3):
        raise InvalidTensorError(f"codes must be uint8 [R, C] or [E, R, C], got {given.dtype} {list(given.shape)}")
    width = group_size or max(given.shape[-1], 1)
    expected = [*given.shape[:-1], -(-given.shape[-1] // width)]
    found = GroupwiseCodes(
        given,
        _checked(scales, "scales", expected),
        None if offsets is None else _checked(offsets, "offsets", expected),
    )
    return GroupwiseTensor(_encode(found, bits, group_size, dtype))


def _checked(values: AnyTensor, what: str, shape: list[int]) -> torch.Tensor:
    given = as_tensor(values, what).cpu()
    if given.dtype not in FLOATS or list(given.shape) != shape:
        raise InvalidTensorError(f"{what} must be floating-point {shape}, got {given.dtype} {list(given.shape)}")
    if not bool((given.float().to(given.dtype) == given).all()):
        raise InvalidTensorError(f"the {what} are not finite or not exact in float32")
    return given.float()


def _encode(found: GroupwiseCodes, bits: int, group_size: int | None, dtype: torch.dtype) -> npt.NDArray[np.uint8]:
    """Encode codes and parameters into a blob."""
    codes, scales, offsets = (None if part is None else part.cpu() for part in found)
    assert codes is not None and scales is not None
    if codes.ndim not in (2, 3):
        raise InvalidTensorError(f"expected a matrix or a stack of matrices, got shape {list(codes.shape)}")
    experts = 1 if codes.ndim == 2 else codes.shape[0]

    def stacked(part: torch.Tensor) -> npt.NDArray[Any]:
        return part.reshape(experts, *part.shape[-2:]).contiguous().numpy()

    width = group_size or max(codes.shape[-1], 1)
    try:
        return _core.encode_groupwise(
            stacked(codes), stacked(scales), None if offsets is None else stacked(offsets),
            bits=bits, group_size=width, ndim=codes.ndim, dtype=_DTYPES[dtype],
        )  # fmt: skip
    except ValueError as cause:
        raise InvalidTensorError(str(cause)) from cause

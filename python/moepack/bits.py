"""Packing of 3-bit codes: 32 codes in three 32-bit words, without a wasted bit (MiLo, section 3.3 and figure 6).

Each byte of a word holds two whole codes, and what is left of the three words holds the last eight codes of the 32;
docs/format.md, section 6, has the picture. The words are those of a group-wise tensor before rows are interleaved.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack_int3", "unpack_int3"]


def pack_int3(codes: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Pack 3-bit codes along the last axis.

    Args:
        codes: uint8 [..., K], each 0 to 7; K is a multiple of 32.

    Returns:
        uint32 [..., 3 * K / 32].

    Raises:
        ValueError: a code is larger than 7, or K is no multiple of 32.
        TypeError: the codes are not uint8.
    """
    from moepack import _core

    columns = _last_axis(codes, np.uint8, 32)
    words = _core.pack_int3(np.ascontiguousarray(codes).reshape(-1))
    return words.reshape(*codes.shape[:-1], columns // 32 * 3)


def unpack_int3(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Undo `pack_int3`.

    Args:
        words: uint32 [..., W]; W is a multiple of 3.

    Returns:
        uint8 [..., 32 * W / 3].

    Raises:
        ValueError: W is no multiple of 3.
        TypeError: the words are not uint32.
    """
    from moepack import _core

    width = _last_axis(words, np.uint32, 3)
    codes = _core.unpack_int3(np.ascontiguousarray(words).reshape(-1))
    return codes.reshape(*words.shape[:-1], width // 3 * 32)


def _last_axis(array: NDArray[np.uint8] | NDArray[np.uint32], dtype: type, unit: int) -> int:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        raise TypeError(f"expected a NumPy array of {np.dtype(dtype)}, not {getattr(array, 'dtype', type(array))}")
    if array.ndim == 0 or array.shape[-1] % unit:
        raise ValueError(f"the last axis of {array.shape} is no multiple of {unit}")
    return int(array.shape[-1])

"""Packs 3-bit codes: 32 codes in three 32-bit words without unused bits (MiLo, section 3.3 and figure 6).

Each byte of a word holds two whole codes, and the remaining bits of the three words hold the last eight codes
(docs/format.md, section 6, has a figure). These are the words of a group-wise tensor before rows are interleaved.
"""

import torch

from moepack import _core
from moepack.arrays import Array, as_given, as_tensor

__all__ = ["pack_int3", "unpack_int3"]


def pack_int3(codes: Array) -> Array:
    """Pack 3-bit codes along the last axis.

    Args:
        codes: uint8 [..., K], each 0 to 7; K is a multiple of 32. Torch or NumPy, contiguous or not, on any device.

    Returns:
        uint32 [..., 3 * K / 32], of the same library and on the same device.

    Raises:
        ValueError: a code is larger than 7, or K is not a multiple of 32.
        TypeError: the codes are not uint8, or neither a torch tensor nor a NumPy array.
    """
    given, columns = _flat(codes, torch.uint8, 32)
    words = torch.from_numpy(_core.pack_int3(given.numpy()))
    return as_given(words.reshape(*codes.shape[:-1], columns // 32 * 3), codes)


def unpack_int3(words: Array) -> Array:
    """Undo `pack_int3`.

    Args:
        words: uint32 [..., W]; W is a multiple of 3. Torch or NumPy, contiguous or not, on any device.

    Returns:
        uint8 [..., 32 * W / 3], of the same library and on the same device.

    Raises:
        ValueError: W is not a multiple of 3.
        TypeError: the words are not uint32, or neither a torch tensor nor a NumPy array.
    """
    given, width = _flat(words, torch.uint32, 3)
    codes = torch.from_numpy(_core.unpack_int3(given.numpy()))
    return as_given(codes.reshape(*words.shape[:-1], width // 3 * 32), words)


def _flat(array: Array, dtype: torch.dtype, unit: int) -> tuple[torch.Tensor, int]:
    """Return the values as a flat tensor on the CPU, and the length of the last axis, a multiple of `unit`."""
    given = as_tensor(array, "array")
    if given.dtype != dtype:
        raise TypeError(f"expected {dtype}, not {given.dtype}")
    if given.ndim == 0 or given.shape[-1] % unit:
        raise ValueError(f"the last axis of {tuple(given.shape)} is not a multiple of {unit}")
    return given.cpu().contiguous().reshape(-1), given.shape[-1]

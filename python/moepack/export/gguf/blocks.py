"""Converts symmetric group-wise integers to llama.cpp's blocks: 4 bits to Q4_0, 8 bits to Q8_0.

Both hold 32 columns per block with one f16 scale, as `d * (q - 8)` and `d * q`. A group of 64 becomes two blocks with
the same scale, so every value is exact. Other bit widths, offsets, groups of 16, rows that are not a multiple of 32,
and bfloat16 scales outside the range of f16 are rejected.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from moepack.errors import UnsupportedModelError
from moepack.format.directory import PackedDirectory
from moepack.groupwise import GroupwiseTensor

__all__ = ["blocks", "open_tensor", "q4_0_blocks", "q8_0_blocks"]

BLOCK = 32


def open_tensor(source: PackedDirectory, name: str) -> GroupwiseTensor:
    """Open a packed tensor for GGUF blocks. Raises `UnsupportedModelError` with the reason if they cannot hold it."""
    record = source.manifest.tensors[name]
    if record.kind != GroupwiseTensor.kind:
        message = f"only group-wise integers can be exported to this format, not '{record.kind}'; use `--to bf16`"
        raise UnsupportedModelError(message, file=source.path, tensor=name)
    tensor = GroupwiseTensor(source.tensor(name), file=source.path / record.file, tensor=name)
    columns, width = tensor.shape[-1], tensor.group_size
    reason = None
    if tensor.bits not in (4, 8):
        reason = f"it has {tensor.bits} bits; Q4_0 and Q8_0 have 4 and 8"
    elif not tensor.symmetric:
        reason = "it has offsets"
    elif columns % BLOCK or (width % BLOCK and width != columns):
        reason = f"groups of {width} in {columns} columns do not form blocks of {BLOCK}"
    elif not bool((tensor.scales.half().float() == tensor.scales).all()):
        reason = "a scale is not representable in float16"
    if reason:
        raise UnsupportedModelError(f"GGUF cannot represent it: {reason}", file=source.path, tensor=name)
    return tensor


def blocks(tensor: GroupwiseTensor, order: NDArray[np.int64] | None = None) -> NDArray[np.uint8]:
    """Return all blocks of a tensor as flat bytes, with its rows reordered by `order` if given."""
    codes = tensor.decode().reshape(-1, tensor.shape[-1] // BLOCK, BLOCK).numpy()
    repeat = tensor.group_size // BLOCK
    scales = tensor.scales.repeat_interleave(repeat, dim=-1).reshape(len(codes), -1)[:, : codes.shape[1]]
    make = q4_0_blocks if tensor.bits == 4 else q8_0_blocks
    made = make(codes, scales.to(torch.float16).numpy())
    return (made if order is None else made[order]).reshape(-1)


def q4_0_blocks(codes: NDArray[np.uint8], scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Return blocks (N, B, 18) of codes (N, B, 32), scales (N, B): the scale, then columns i and i + 16 in byte i."""
    nibbles = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([_bytes(scales), nibbles], axis=-1)


def q8_0_blocks(codes: NDArray[np.uint8], scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Return blocks (N, B, 34) of codes (N, B, 32) and scales (N, B): the scale, then signed bytes."""
    return np.concatenate([_bytes(scales), codes ^ 0x80], axis=-1)


def _bytes(scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(scales).view(np.uint8).reshape(*scales.shape, 2)

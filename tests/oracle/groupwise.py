"""Group-wise tensors written only from docs/format.md, section 6, and their products in float64.

Slow and simple: codes are placed bit by bit.
"""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ROWS, UNIT = 16, 32


@dataclass
class Tensor:
    """The content of a blob; offsets are None for a symmetric tensor."""

    bits: int
    group: int
    dtype: str
    rank: int
    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32] | None

    def weights(self) -> NDArray[np.float32]:
        """Dequantize, each operation rounded to float32."""
        columns = self.codes.shape[2]
        index = np.arange(columns) // (self.group or max(columns, 1))
        codes = self.codes.astype(np.float32)
        if self.offsets is None:
            return self.scales[..., index] * (codes - np.float32(2 ** (self.bits - 1)))
        return self.scales[..., index] * codes + self.offsets[..., index]


def places(bits: int, column: int) -> list[tuple[int, int]]:
    """For each bit of the code of a column of a unit, low first: the word and the bit in it."""
    quad, byte = divmod(column, 4)
    if bits == 3 and quad >= 6:
        low = quad - 6
        return [(low, 8 * byte + 6), (low, 8 * byte + 7), (2, 8 * byte + quad)]
    a_word = 2 if bits == 3 else 8 // bits
    word, position = divmod(quad, a_word)
    return [(word, 8 * byte + bits * position + i) for i in range(bits)]


def pack_words(bits: int, codes: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Pack codes [..., K], K a multiple of 32, to [..., bits * K / 32]."""
    units = codes.reshape(*codes.shape[:-1], codes.shape[-1] // UNIT, UNIT).astype(np.uint32)
    words = np.zeros((*units.shape[:-1], bits), np.uint32)
    for column in range(UNIT):
        for bit, (word, position) in enumerate(places(bits, column)):
            words[..., word] |= (units[..., column] >> np.uint32(bit) & np.uint32(1)) << np.uint32(position)
    return words.reshape(*codes.shape[:-1], codes.shape[-1] // UNIT * bits)


def unpack_words(bits: int, words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Undo `pack_words`."""
    units = words.reshape(*words.shape[:-1], words.shape[-1] // bits, bits)
    codes = np.zeros((*units.shape[:-1], UNIT), np.uint8)
    for column in range(UNIT):
        for bit, (word, position) in enumerate(places(bits, column)):
            codes[..., column] |= ((units[..., word] >> np.uint32(position) & np.uint32(1)) << np.uint32(bit)).astype(
                np.uint8
            )
    return codes.reshape(*words.shape[:-1], words.shape[-1] // bits * UNIT)


def _bits_of(values: NDArray[np.float32], dtype: str) -> NDArray[np.uint16]:
    return torch.from_numpy(values).to(getattr(torch, dtype)).view(torch.uint16).numpy()


def _values_of(bits: NDArray[np.uint16], dtype: str) -> NDArray[np.float32]:
    return torch.from_numpy(bits.copy()).view(getattr(torch, dtype)).float().numpy()


def write(tensor: Tensor) -> bytes:
    """Write a blob."""
    experts, rows, columns = tensor.codes.shape
    blocks, units = -(-rows // ROWS), -(-columns // UNIT)
    codes = np.zeros((experts, blocks * ROWS, units * UNIT), np.uint8)
    codes[:, :rows, :columns] = tensor.codes
    words = pack_words(tensor.bits, codes).reshape(experts, blocks, ROWS, units * tensor.bits)
    words = words.transpose(0, 1, 3, 2)
    kinds = [values for values in (tensor.scales, tensor.offsets) if values is not None]
    padded = np.zeros((len(kinds), experts, blocks * ROWS, tensor.scales.shape[2]), np.float32)
    for kind, values in enumerate(kinds):
        padded[kind, :, :rows] = values
    stored = _bits_of(padded, tensor.dtype).reshape(len(kinds), experts, blocks, ROWS, padded.shape[3])
    stored = stored.transpose(1, 2, 4, 0, 3)
    out = bytearray(struct.pack("<8sHBBBB2x", b"MOEPGRPW", 1, tensor.bits, tensor.dtype == "float16", tensor.rank,
                                tensor.offsets is None))  # fmt: skip
    out += struct.pack("<4Q80x", experts, rows, columns, tensor.group)
    groups, count, size = record(tensor.group, tensor.bits, columns, len(kinds))
    for expert in range(experts):
        for block in range(blocks):
            for first in range(count):
                parameters = stored[expert, block, first * groups : (first + 1) * groups].tobytes()
                out += parameters.ljust(-(-groups * len(kinds) * 2 * ROWS // 64) * 64, b"\0")
                out += words[expert, block, first * size : (first + 1) * size].tobytes()
    return bytes(out)


def record(group: int, bits: int, columns: int, kinds: int) -> tuple[int, int, int]:
    """Groups of a record, records of a block, and registers of a record's codes."""
    units = -(-columns // UNIT)
    if group == 0:
        return 1, min(units, 1), units * bits
    groups = 2 if kinds == 1 or group < UNIT else 1
    return groups, -(-columns // (groups * group)), groups * group // UNIT * bits


def read(data: bytes) -> Tensor:
    """Read a valid blob."""
    _, _, bits, kind, rank, symmetric = struct.unpack_from("<8sHBBBB", data)
    experts, rows, columns, group = struct.unpack_from("<4Q", data, 16)
    dtype = ("bfloat16", "float16")[kind]
    groups = min(columns, 1) if group == 0 else -(-columns // group)
    kinds, blocks, units = 2 - symmetric, -(-rows // ROWS), -(-columns // UNIT)
    parameters, codes = [], []
    at = 128
    together, count, size = record(group, bits, columns, kinds)
    for _ in range(experts * blocks):
        stored, words = np.zeros(0, np.uint16), np.zeros(0, np.uint32)
        for first in range(count):
            there = min(together, groups - first * together)
            stored = np.append(stored, np.frombuffer(data, np.uint16, there * kinds * ROWS, at))
            at += -(-together * kinds * 2 * ROWS // 64) * 64
            registers = min(size, units * bits - first * size)
            words = np.append(words, np.frombuffer(data, np.uint32, registers * ROWS, at))
            at += 4 * registers * ROWS
        parameters.append(_values_of(stored, dtype).reshape(groups, kinds, ROWS).transpose(1, 2, 0))
        codes.append(unpack_words(bits, words.reshape(units * bits, ROWS).T))
    assert at == len(data)

    def rows_of(parts: list[Any], width: int) -> Any:
        whole = np.array(parts) if parts else np.zeros(0)
        whole = whole.reshape(experts, blocks * ROWS, whole.shape[-1] if parts else width)
        return np.ascontiguousarray(whole[:, :rows, :width])

    scales = rows_of([part[0] for part in parameters], groups).astype(np.float32)
    offsets = None if symmetric else rows_of([part[1] for part in parameters], groups).astype(np.float32)
    return Tensor(bits, group, dtype, rank, rows_of(codes, columns).astype(np.uint8), scales, offsets)


def quantize_activations(x: NDArray[np.float32], group: int) -> NDArray[np.float64]:
    """The activations of int8 products: 255 levels for each token and `group` (or 256) columns."""
    out = np.zeros(x.shape)
    for first in range(0, x.shape[1], group or 256):
        part = x[:, first : first + (group or 256)]
        largest = np.abs(part).max(axis=1, keepdims=True)
        factor = np.float32(127) / np.where(largest > 0, largest, np.float32(1))
        out[:, first : first + part.shape[1]] = np.rint(part * factor) * (largest / np.float32(127)).astype(np.float64)
    return out


def product(tensor: Tensor, x: NDArray[np.float32], mode: str) -> NDArray[np.float64]:
    """W x for the first expert: [tokens, rows]."""
    columns = tensor.codes.shape[2]
    index = np.arange(columns) // (tensor.group or max(columns, 1))
    middle = 2 ** (tensor.bits - 1)
    scales = tensor.scales[0].astype(np.float64)
    offsets = -middle * scales if tensor.offsets is None else tensor.offsets[0].astype(np.float64)
    weights = scales[:, index] * tensor.codes[0] + offsets[:, index]
    values = x.astype(np.float64) if mode == "exact" else quantize_activations(x, tensor.group)
    return values @ weights.T

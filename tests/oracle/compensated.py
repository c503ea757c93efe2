"""Compensated tensors, written and read only from docs/format.md, section 8.

Slow and simple: codes are placed bit by bit.
"""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oracle import groupwise

CHUNK, LANES = 64, 8


@dataclass
class Factor:
    """The rows of one factor of all experts: codes [T, n] and scales [T, chunks], or at 16 bits values [T, n]."""

    codes: NDArray[np.uint8] | None
    scales: NDArray[np.float32] | None
    values: NDArray[np.float32] | None

    def dequantize(self, bits: int) -> NDArray[np.float32]:
        """The rows as values."""
        if self.codes is None or self.scales is None:
            assert self.values is not None
            return self.values
        index = np.arange(self.codes.shape[1]) // CHUNK
        return self.scales[:, index] * (self.codes.astype(np.float32) - np.float32(2 ** (bits - 1)))


@dataclass
class Tensor:
    """The content of a blob."""

    base: groupwise.Tensor
    bits: int
    ranks: list[int]
    right: Factor
    left: Factor

    def weights(self) -> NDArray[np.float64]:
        """Wq + U V of each expert, in float64."""
        values = self.base.weights().astype(np.float64)
        right, left = (factor.dequantize(self.bits).astype(np.float64) for factor in (self.right, self.left))
        first = 0
        for expert, rank in enumerate(self.ranks):
            rows = slice(first, first + rank)
            values[expert] += left[rows].T @ right[rows]
            first += rank
        return values


def places(value: int) -> list[tuple[int, int]]:
    """For each bit of the three-bit code of a value of a chunk, low first: the byte and the bit in it."""
    plane, lane = divmod(value, LANES)
    if plane < 6:
        return [(LANES * (plane // 2) + lane, 3 * (plane % 2) + bit) for bit in range(3)]
    low = LANES * (plane - 6) + lane
    return [(low, 6), (low, 7), (2 * LANES + lane, plane)]


def _rows(factor: Factor, bits: int) -> tuple[bytes, bytes]:
    """The scales and the chunks."""
    if bits == 16:
        assert factor.values is not None
        padded = _padded(factor.values, 0).astype("<f2")
        return b"", padded.tobytes()
    assert factor.codes is not None and factor.scales is not None
    codes = _padded(factor.codes, 2 ** (bits - 1))
    scales = factor.scales.astype("<f2").tobytes()
    if bits == 8:
        return scales, codes.tobytes()
    chunks = codes.reshape(-1, CHUNK)
    packed = np.zeros((len(chunks), 24), np.uint8)
    for value in range(CHUNK):
        for bit, (byte, position) in enumerate(places(value)):
            packed[:, byte] |= (chunks[:, value] >> np.uint8(bit) & np.uint8(1)) << np.uint8(position)
    return scales, packed.tobytes()


def _padded(rows: NDArray[np.generic], fill: int) -> NDArray[np.generic]:
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % CHUNK)), constant_values=fill)


def write(tensor: Tensor) -> bytes:
    """Write a blob."""
    base = groupwise.write(tensor.base)
    out = bytearray(struct.pack("<8sHB5xQQ96x", b"MOEPCOMP", 1, tensor.bits, len(base), sum(tensor.ranks)))
    sections = [base, np.array(tensor.ranks, "<u4").tobytes()]
    for factor in (tensor.right, tensor.left):
        sections += _rows(factor, tensor.bits)
    for section in sections:
        out += bytes(-len(out) % 64) + section
    return bytes(out + bytes(-len(out) % 64))


def read(data: bytes) -> Tensor:
    """Read a valid blob."""
    _, _, bits, nbytes, total = struct.unpack_from("<8sHB5xQQ", data)
    base = groupwise.read(data[128 : 128 + nbytes])
    experts, rows, columns = base.codes.shape
    at = 128 + nbytes

    def section(size: int) -> bytes:
        nonlocal at
        first = -(-at // 64) * 64
        at = first + size
        return data[first:at]

    ranks = np.frombuffer(section(4 * experts), "<u4").tolist()
    factors = []
    for length in (columns, rows):
        cells = total * -(-length // CHUNK)
        scales = section(0 if bits == 16 else 2 * cells)
        chunks = section(cells * CHUNK * bits // 8)
        factors.append(_factor(scales, chunks, bits, total, length))
    assert -(-at // 64) * 64 == len(data)
    return Tensor(base, bits, ranks, *factors)


def _factor(scales: bytes, chunks: bytes, bits: int, total: int, length: int) -> Factor:
    width = -(-length // CHUNK) * CHUNK
    if bits == 16:
        values = np.frombuffer(chunks, "<f2").reshape(total, width)[:, :length]
        return Factor(None, None, values.astype(np.float32))
    stored = np.frombuffer(chunks, np.uint8)
    if bits == 3:
        packed = stored.reshape(-1, 24)
        stored = np.zeros((len(packed), CHUNK), np.uint8)
        for value in range(CHUNK):
            for bit, (byte, position) in enumerate(places(value)):
                stored[:, value] |= (packed[:, byte] >> np.uint8(position) & np.uint8(1)) << np.uint8(bit)
    codes = np.ascontiguousarray(stored.reshape(total, width)[:, :length])
    return Factor(codes, np.frombuffer(scales, "<f2").reshape(total, width // CHUNK).astype(np.float32), None)

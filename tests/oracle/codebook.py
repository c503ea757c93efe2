"""Codebook tensors written only from docs/format.md, section 7. Slow and simple: bit by bit."""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PANEL, QUAD, GROUP, REGISTER = 16, 4, 16, 64
STEP = {2: 64, 3: 128, 4: 32}


@dataclass
class Tensor:
    """The content of a blob: codes [E, R, C] below 2^bits, centroids [E, R, B, K] int16, scales [E, R, B] float32."""

    bits: int
    block: int
    rank: int
    activation_bits: int
    codes: NDArray[np.uint8]
    centroids: NDArray[np.int16]
    scales: NDArray[np.float32]
    hadamard: int = 1

    def weights(self) -> NDArray[np.float32]:
        """Dequantize: one product, rounded once, and rotated back if products rotate activations."""
        block = np.arange(self.codes.shape[2]) // self.block
        found = np.take_along_axis(
            self.centroids[:, :, block].astype(np.float32), self.codes[..., None].astype(np.int64), -1
        )
        values = self.scales[..., block] * found[..., 0]
        if self.hadamard == 1:
            return values
        signs = np.array([[(-1) ** (i & j).bit_count() for j in range(self.hadamard)] for i in range(self.hadamard)])
        blocks = values.reshape(*values.shape[:2], -1, self.hadamard).astype(np.float64)
        return (blocks @ signs / self.hadamard**0.5).reshape(values.shape).astype(np.float32)


def places(bits: int, column: int) -> list[tuple[int, int]]:
    """For each bit of the code of a column of a step, low first: the register and the bit in the column's byte."""
    group = column // GROUP
    if bits == 3 and group >= 6:
        return [(group - 6, 6), (group - 6, 7), (2, group)]
    register, position = divmod(group, 2) if bits == 3 else (0, group)
    return [(register, bits * position + i) for i in range(bits)]


def write(tensor: Tensor) -> bytes:
    """The bytes of a tensor."""
    experts, rows, columns = tensor.codes.shape
    header = struct.pack("<8sHBBBB2x4Q80x", b"MOEPCODE", 1, tensor.bits, tensor.activation_bits, tensor.rank,
                         tensor.hadamard.bit_length() - 1, experts, rows, columns, tensor.block)  # fmt: skip
    panels = [panel(tensor, expert, first) for expert in range(experts) for first in range(0, rows, PANEL)]
    return header + b"".join(panels)


def panel(tensor: Tensor, expert: int, first: int) -> bytes:
    """The bytes of 16 rows, beginning at `first`."""
    clusters, columns = 1 << tensor.bits, tensor.codes.shape[2]
    out = b""
    for index, start in enumerate(range(0, columns, tensor.block)):
        codes = np.zeros(
            (PANEL, -(-(min(tensor.block, columns - start)) // STEP[tensor.bits]) * STEP[tensor.bits]), int
        )
        books, scales = np.zeros((PANEL, clusters), np.int64), np.zeros(PANEL, np.float32)
        sums = np.zeros((2, PANEL), np.int32)
        for row in range(min(PANEL, tensor.codes.shape[1] - first)):
            mine = tensor.codes[expert, first + row, start : start + tensor.block]
            codes[row, : len(mine)] = mine
            books[row] = tensor.centroids[expert, first + row, index]
            scales[row] = tensor.scales[expert, first + row, index]
            sums[0, row] = ((books[row] + 128) // 256)[mine].sum()
            sums[1, row] = books[row][mine].sum()
        high = (books + 128) // 256
        low = books - 256 * high
        planes = 1 if tensor.activation_bits else 2
        assert planes == 2 or not low.any()
        out += b"".join(plane.astype(np.int8).tobytes() for plane in (high, low)[:planes])
        out += scales.tobytes() + sums[:planes].tobytes()
        for step in range(0, codes.shape[1], STEP[tensor.bits]):
            rows = codes[:, step : step + STEP[tensor.bits]]
            if tensor.bits == 2:
                out += b"".join(line(rows[:, at : at + GROUP]) for at in range(0, rows.shape[1], GROUP))
            else:
                out += b"".join(quad(tensor.bits, rows[QUAD * q : QUAD * q + QUAD]) for q in range(PANEL // QUAD))
    return out


def line(codes: NDArray[np.int64]) -> bytes:
    """The 64 bytes of codes [16, 16] of 2 bits."""
    out = np.zeros((4, PANEL), np.uint8)
    for row in range(PANEL):
        for column in range(GROUP):
            for bit in range(2):
                out[column % 4, row] |= (codes[row, column] >> bit & 1) << 4 * bit + column // 4
    return out.tobytes()


def quad(bits: int, codes: NDArray[np.int64]) -> bytes:
    """The registers of four rows in a step, codes [4, columns of a step]."""
    registers = np.zeros((3 if bits == 3 else 1, REGISTER), np.uint8)
    for row in range(QUAD):
        for column in range(STEP[bits]):
            for bit, (register, position) in enumerate(places(bits, column)):
                value = codes[row, column] >> bit & 1
                registers[register, GROUP * row + column % GROUP] |= value << position
    return registers.tobytes()

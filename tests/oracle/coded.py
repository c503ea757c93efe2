"""A reader of coded tensors written only from docs/format.md, section 9. Slow and simple."""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK, QUAD, LANES = 16, 4, 64


@dataclass
class Tensor:
    """The content of a tensor: codes [E, R, C], scales [E, R] or [1, 1], column scales [E, C], [1, C] or None."""

    ndim: int
    codes: NDArray[np.int64]
    scales: NDArray[np.float32]
    columns: NDArray[np.float32] | None

    def weights(self) -> NDArray[np.float32]:
        """Dequantize, each product rounded to float32."""
        values = self.codes.astype(np.float32) * self.scales[..., None]
        return values if self.columns is None else values * self.columns[:, None]


class Sections:
    """Takes sections one after the other, each from the next multiple of 64."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 64

    def take(self, length: int) -> bytes:
        """The next section."""
        end = -(-(self.at + length) // 64) * 64
        section, padding = self.data[self.at : self.at + length], self.data[self.at + length : end]
        assert len(section) == length and not any(padding)
        self.at = end
        return section


@dataclass
class Table:
    """The integer of symbol 0 and the slots of each symbol."""

    lowest: int
    frequencies: bytes


def decode(table: Table, stream: bytes, rows: list[int], registers: int) -> list[list[int]]:
    """The decoded integers of a stream, register by register, without lanes of missing rows."""
    frequencies = table.frequencies
    symbols = [symbol for symbol, frequency in enumerate(frequencies) for _ in range(frequency)]
    starts = [sum(frequencies[:symbol]) for symbol in range(len(frequencies))]
    assert len(symbols) == 256
    states = [256 * high + low for high, low in zip(stream[:LANES], stream[LANES : 2 * LANES], strict=True)]
    at, out = 2 * LANES, []
    assert not any(states[QUAD * rows[0] :])
    for block, count in enumerate(rows):
        for _ in range(registers):
            register = []
            for lane in range(QUAD * count):
                slot = states[lane] % 256
                symbol = symbols[slot]
                register.append(table.lowest + symbol)
                states[lane] = frequencies[symbol] * (states[lane] // 256) + slot - starts[symbol]
                if states[lane] < 256:
                    states[lane] = 256 * states[lane] + stream[at]
                    at += 1
            out.append(register)
        following = rows[block + 1] if block + 1 < len(rows) else 0
        assert all(state == 256 for state in states[QUAD * following : QUAD * count])
    assert at == len(stream)
    return out


NEXT = [(0, 2), (5, 7), (1, 3), (6, 4), (2, 0), (4, 6), (3, 1), (7, 5)]


def dependent(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """The codes [E, R, C] of indices."""
    codes, states = np.zeros_like(indices), np.zeros((*indices.shape[:2], QUAD), np.int64)
    for column in range(indices.shape[2]):
        index, state = indices[..., column], states[..., column % QUAD]
        codes[..., column] = np.where(state % 2 == 0, 4 * index + 1, -4 * index - 1)
        states[..., column % QUAD] = np.array(NEXT)[state, index % 2]
    return codes


def floats(section: bytes, wide: int) -> NDArray[np.float32]:
    """Read scales, bfloat16 or float32."""
    words = np.frombuffer(section, np.uint32 if wide else np.uint16)
    values = (words if wide else words.astype(np.uint32) << 16).view(np.float32)
    assert np.isfinite(values).all()
    return values


def read(data: bytes) -> Tensor:
    """Read a tensor, checking everything."""
    magic, version, ndim, blocks, row_scales, wide, count, symbols = struct.unpack_from("<8sH6B", data)
    experts, rows, columns, payload, exceptions, entry, size = struct.unpack_from("<5Q2B", data, 16)
    low_bits, paths, kind = data[58:61]
    assert (magic, version) == (b"MOEPRANS", 1)
    assert (low_bits, paths) in [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]
    assert not any(data[61:64])
    sections, quads = Sections(data), -(-columns // QUAD)
    tables = sections.take(count * (1 + symbols))
    parts = [tables[i : i + 1 + symbols] for i in range(0, len(tables), 1 + symbols)]
    found = [Table(struct.unpack("b", part[:1])[0], part[1:]) for part in parts]
    trimmed = [(table.lowest, table.frequencies.rstrip(b"\0")) for table in found]
    values = floats(sections.take((experts * rows if row_scales else 1) * (4 if wide else 2)), wide)
    sets = {0: None, 1: 1, 2: experts}[kind]
    of_columns = floats(sections.take((sets or 0) * columns * (4 if wide else 2)), wide)
    streams = -(-rows // (BLOCK * blocks)) if columns else 0
    index, listed = sections.take(experts * streams * entry), sections.take(exceptions * size)
    assert not paths or all(lowest >= -32 and lowest % 2 == 0 and lowest + len(each) <= 32 for lowest, each in trimmed)
    stored, codes = sections.take(payload), np.zeros((experts, rows, columns), np.int64)
    changes = np.zeros_like(codes)
    at = exception = 0
    for number in range(experts * streams):
        expert, stream = divmod(number, streams)
        word = int.from_bytes(index[entry * number : entry * (number + 1)], "little")
        length, table, several = word % 2 ** (4 * entry), word >> 4 * entry & 255, word >> 4 * entry + 8
        first = stream * blocks * BLOCK
        heights = [min(max(rows - first - BLOCK * block, 0), BLOCK) for block in range(blocks)]
        end = at + 2 * LANES + length
        registers = decode(found[table], stored[at:end], heights, quads)
        size_of_planes = 8 * low_bits * quads * sum(height > 0 for height in heights)
        planes = [int.from_bytes(stored[end + i : end + i + 8], "little") for i in range(0, size_of_planes, 8)]
        end += size_of_planes
        differences = {}
        for place in range(exception, exception + several):
            record = int.from_bytes(listed[size * place : size * (place + 1)], "little")
            bits = {4: 8, 8: 32}[size]
            differences[record >> bits] = (record + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
        for number_of_register, register in enumerate(registers):
            block, quad = divmod(number_of_register, quads)
            own = planes[low_bits * number_of_register : low_bits * (number_of_register + 1)]
            for lane, code in enumerate(register):
                row, column = first + BLOCK * block + lane // QUAD, QUAD * quad + lane % QUAD
                low = sum((plane >> lane & 1) << bit for bit, plane in enumerate(own))
                if column < columns:
                    codes[expert, row, column] = 2**low_bits * code + low
                    changes[expert, row, column] = differences.pop(LANES * number_of_register + lane, 0)
                else:
                    assert not low
            assert not any(plane >> len(register) for plane in own)
        assert not differences
        at, exception = end, exception + several
    assert (at, exception) == (payload, exceptions)
    end = sections.at - -(-payload // 64) * 64 + payload
    assert not any(data[end:]) and len(data) == -(-(end + 64) // 64) * 64
    codes = dependent(codes) + 4 * changes if paths else codes + changes
    scales = values.reshape((experts, rows) if row_scales else (1, 1))
    return Tensor(ndim, codes, scales, None if sets is None else of_columns.reshape(sets, columns))

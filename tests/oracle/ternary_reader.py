"""A reader of ternary tensors written only from docs/format.md, section 5. Slow and simple."""

import heapq
import itertools
import struct
from functools import cache
from pathlib import Path

import numpy as np

DICTIONARIES = Path(__file__).parents[2] / "rust/core/src/formats/ternary/fsv8/dictionaries.bin"

Words = dict[tuple[int, int], list[int]]


@cache
def fsv8_dictionaries() -> list[tuple[list[int], Words]]:
    """The embedded dictionaries: the class of each code, and the string of each (state, code)."""
    data, at, found = DICTIONARIES.read_bytes(), 0, []

    def take(form: str) -> tuple[int, ...]:
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values

    while at < len(data):
        *_, states, _zero = take("HHIBBBB")
        take(f"{states}B")
        sizes = take(f"{states}H")
        classes = [state for state, size in enumerate(sizes) for _ in range(size)]
        words: Words = {}
        for state, code in itertools.product(range(states), range(256)):
            (length,) = take("B")
            if length:
                (shape,) = take("B")
                words[state, code] = [0] * length
                for i, position in enumerate(take(f"{shape >> 6}B")):
                    words[state, code][position] = shape >> 2 * i & 3
        found.append((classes, words))
    return found


@cache
def dict16_words() -> list[list[int]]:
    """The strings of the 65,536 codes."""
    symbol = [0.885, (1 - 0.885) / 2, (1 - 0.885) / 2]
    pair = [symbol[p % 3] * symbol[p // 3] for p in range(9)]
    queue = [(-pair[p], (p,)) for p in range(9)]
    heapq.heapify(queue)
    words = []
    while len(words) < 65536:
        probability, pairs = heapq.heappop(queue)
        words.append([weight for p in pairs for weight in (p % 3, p // 3)])
        if len(pairs) < 14:
            for p in range(9):
                heapq.heappush(queue, (probability * pair[p], (*pairs, p)))
    return words


def read(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Decode a tensor: codes [E, R, C] and levels [E, R, 2]."""
    magic, version, code, level_type, _, count = struct.unpack_from("<8sHBBBB", data)
    assert (magic, version) == (b"MOEPTERN", 1)
    experts, rows, columns, payload_bytes, nonzeros = struct.unpack_from("<5Q", data, 24)
    symmetric = data[22]
    wide = -(-columns // 4) > 4095 or code == 1
    groups = -(-rows // 64)
    start_count = experts * groups + 1 if code == 0 else experts + 1
    sizes = [
        experts * rows * (4, 4, 8)[level_type] // (1 + symmetric),
        experts * rows * (4 if wide else 2),
        8 * start_count,
        payload_bytes,
    ]
    sections, at = [], 128
    for size in sizes:
        at = -(-at // 64) * 64
        sections.append(data[at : at + size])
        at += size
    assert len(data) == -(-(at + 64) // 64) * 64
    levels, index, starts, payload = sections
    entries = np.frombuffer(index, "<u4" if wide else "<u2").astype(int)
    offsets = np.frombuffer(starts, "<u8").astype(int)
    codes = np.zeros((experts, rows, columns), np.int8)
    if code == 0:
        ids = data[14 : 14 + count]
        _read_fsv8(codes, entries, 28 if wide else 12, offsets, payload, ids)
    else:
        _read_dict16(codes, entries, offsets, np.frombuffer(payload, "<u2"))
    assert np.count_nonzero(codes) == nonzeros
    stored = _levels(levels, level_type)
    pairs = np.stack([0 - stored, stored], axis=-1) if symmetric else stored
    return codes, pairs.reshape(experts, rows, 2)


def _levels(section: bytes, level_type: int) -> np.ndarray:
    if level_type == 0:
        return (np.frombuffer(section, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(section, "<f2" if level_type == 1 else "<f4").astype(np.float32)


def _read_fsv8(
    codes: np.ndarray, tails: np.ndarray, shift: int, starts: np.ndarray, payload: bytes, ids: bytes
) -> None:
    experts, rows, columns = codes.shape
    at, groups = 0, -(-rows // 64)
    for expert, row in itertools.product(range(experts), range(rows)):
        if row % 64 == 0:
            assert starts[expert * groups + row // 64] == at
        tail = int(tails[expert * rows + row])
        length, field = tail & (1 << shift) - 1, tail >> shift
        stored = payload[at : at + length]
        at += length
        if length == -(-columns // 4):
            symbols = [byte >> 2 * i & 3 for byte in stored for i in range(4)]
        else:
            symbols, state = [], 0
            classes, words = fsv8_dictionaries()[ids[field & 7]]
            for byte in stored:
                assert len(symbols) < columns
                symbols += words[state, byte]
                state = classes[byte]
            assert state == 0
        assert length == 0 or len(symbols) >= columns
        assert not any(symbols[columns:])
        meaning = [0, 1, -1] if field >> 3 else [0, -1, 1]
        codes[expert, row, : len(symbols)] = [meaning[symbol] for symbol in symbols[:columns]]
    assert starts[-1] == at == len(payload)


def _read_dict16(codes: np.ndarray, begins: np.ndarray, starts: np.ndarray, payload: np.ndarray) -> None:
    experts, rows, columns = codes.shape
    for expert, row in itertools.product(range(experts), range(rows)):
        place = expert * rows + row
        begin = starts[expert] + begins[place]
        end = starts[expert] + begins[place + 1] if row + 1 < rows else starts[expert + 1]
        symbols = [weight for word in payload[begin:end] for weight in dict16_words()[word]]
        assert len(symbols) == columns + columns % 2 and not any(symbols[columns:])
        codes[expert, row] = [(0, -1, 1)[symbol] for symbol in symbols[:columns]]

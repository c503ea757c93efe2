"""Packed ternary tensors in plain Python: slow, readable, and written only from the format.

Tests compare the Rust codec with this. It is neither fast nor tolerant: assertions are the only errors.
"""

import heapq
import itertools
import pathlib
import struct
from dataclasses import dataclass
from functools import cache

DATA = pathlib.Path(__file__).parents[2] / "rust" / "core" / "src" / "formats" / "ternary" / "fsv8" / "dictionaries.bin"


@dataclass(frozen=True)
class Dictionary:
    """An FSV8 dictionary: the string of every code in every state, and the promise of each state."""

    promises: tuple[int, ...]
    classes: tuple[int, ...]
    words: tuple[dict[int, str], ...]

    def state_after(self, code: int) -> int:
        """Return the state that a code leads to: its class, one of consecutive ranges of codes."""
        ends = itertools.accumulate(self.classes)
        return next(state for state, end in enumerate(ends) if code < end)


@cache
def dictionaries() -> tuple[Dictionary, ...]:
    """Read the dictionaries that the Rust core embeds."""
    data = iter(DATA.read_bytes())

    def take(count: int) -> bytes:
        return bytes(itertools.islice(data, count))

    def word(length: int) -> str:
        (shape,) = take(1)
        text = ["0"] * length
        for i, position in enumerate(take(shape >> 6)):
            text[position] = str(shape >> (2 * i) & 3)
        return "".join(text)

    found = []
    while head := take(8):
        assert len(head) == 8
        _, _, states, _ = take(4)
        promises = tuple(take(states))
        classes = struct.unpack(f"<{states}H", take(2 * states))
        lengths = ((code, take(1)[0]) for _ in range(states) for code in range(256))
        words: list[dict[int, str]] = []
        for code, length in lengths:
            if code == 0:
                words.append({})
            if length:
                words[-1][code] = word(length)
        found.append(Dictionary(promises, classes, tuple(words)))
    return tuple(found)


def fsv8_decode(codes: bytes, dictionary: Dictionary) -> str:
    """Return the symbols of a row's codes, including those past its end."""
    text, state = "", 0
    for code in codes:
        text += dictionary.words[state][code]
        state = dictionary.state_after(code)
    assert state == 0, "a row ends in the state without a promise"
    return text


def fsv8_encode(symbols: str, dictionary: Dictionary) -> bytes:
    """Return the codes of a row. Exactly one word fits at every position."""
    endless = symbols + "0" * 512
    codes, at, state = bytearray(), 0, 0
    while at < len(symbols):
        fitting = [
            code
            for code, word in dictionary.words[state].items()
            if endless.startswith(word, at) and keeps_promise(endless, at + len(word), code, dictionary)
        ]
        # A string without a promise fits everything; a longer word is better.
        codes.append(max(fitting, key=lambda code: len(dictionary.words[state][code])))
        at += len(dictionary.words[state][codes[-1]])
        state = dictionary.state_after(codes[-1])
    return bytes(codes)


def keeps_promise(endless: str, at: int, code: int, dictionary: Dictionary) -> bool:
    """Whether the weights from `at` on agree with the code's promise."""
    promise = dictionary.promises[dictionary.state_after(code)]
    return promise == 0 or endless[at : at + promise].strip("0") != ""


@cache
def dict16() -> tuple[str, ...]:
    """Generate the 65,536 words of the QMoE paper (algorithm 1)."""
    single = [0.885, (1 - 0.885) / 2, (1 - 0.885) / 2]
    pairs = [single[pair % 3] * single[pair // 3] for pair in range(9)]
    queue = [(-probability, (pair,)) for pair, probability in enumerate(pairs)]
    heapq.heapify(queue)
    words = []
    while len(words) < 1 << 16:
        negated, word = heapq.heappop(queue)
        words.append("".join(f"{pair % 3}{pair // 3}" for pair in word))
        if len(word) < 14:
            for pair, probability in enumerate(pairs):
                heapq.heappush(queue, (negated * probability, (*word, pair)))
    return tuple(words)


def dict16_encode(symbols: str) -> list[int]:
    """Return the codes of a row by repeated longest matches."""
    index = {word: code for code, word in enumerate(dict16())}
    padded, codes, at = symbols + "0" * (len(symbols) % 2), [], 0
    while at < len(padded):
        length = next(n for n in range(28, 0, -2) if at + n <= len(padded) and padded[at : at + n] in index)
        codes.append(index[padded[at : at + length]])
        at += length
    return codes


@dataclass(frozen=True)
class Blob:
    """A packed tensor, taken apart."""

    code: str
    shape: tuple[int, int, int]
    rank: int
    dictionaries: tuple[int, ...]
    nonzeros: int
    levels: list[tuple[float, float]]
    #: Every row's stored bytes and the dictionary field of its tail.
    rows: list[tuple[bytes, int]]

    def symbols(self, row: int) -> str:
        """Return a row's symbols: 0, 1 for negative, 2 for positive."""
        stored, field = self.rows[row]
        columns = self.shape[2]
        if self.code == "dict16":
            text = "".join(dict16()[code] for (code,) in struct.iter_unpack("<H", stored))
            assert len(text) == columns + columns % 2
        elif not stored:
            text = "0" * columns
        elif len(stored) == -(-columns // 4):
            text = "".join(str(byte >> shift & 3) for byte in stored for shift in (0, 2, 4, 6))
        else:
            text = fsv8_decode(stored, dictionaries()[self.dictionaries[field & 7]])
            text = text.translate(str.maketrans("12", "21")) if field & 8 else text
        assert len(text) >= columns and not text[columns:].strip("0")
        return text[:columns]


def read(data: bytes) -> Blob:
    """Take a packed tensor apart."""
    magic, version, code, level, rank, count, ids, symmetric, zero = struct.unpack_from("<8sHBBBB8sBB", data)
    experts, rows, columns, payload_bytes, nonzeros = struct.unpack_from("<5Q", data, 24)
    assert (magic, version, zero, data[64:128]) == (b"MOEPTERN", 1, 0, bytes(64)) and symmetric in (0, 1)
    at = 128

    def section(size: int) -> bytes:
        nonlocal at
        start = -(-at // 64) * 64
        assert not any(data[at:start])
        at = start + size
        return data[start:at]

    level_format = {0: "H", 1: "e", 2: "f"}[level]
    count_levels = (2 - symmetric) * experts * rows
    stored = struct.unpack(f"<{count_levels}{level_format}", section(count_levels * (2, 2, 4)[level]))
    if level == 0:
        stored = [struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in stored]
    wide = code == 1 or -(-columns // 4) > 4095
    tails = struct.unpack(f"<{experts * rows}{'I' if wide else 'H'}", section(experts * rows * (4 if wide else 2)))
    groups = -(-rows // 64)
    start_count = (experts if code else experts * groups) + 1
    starts = struct.unpack(f"<{start_count}Q", section(8 * start_count))
    payload = section(payload_bytes)
    assert not any(data[at:]) and len(data) % 64 == 0 and 64 <= len(data) - at < 128
    cut = cut_dict16 if code else cut_fsv8
    return Blob(
        code=("fsv8", "dict16")[code],
        shape=(experts, rows, columns),
        rank=rank,
        dictionaries=tuple(ids[:count]),
        nonzeros=nonzeros,
        levels=[(0 - x, x) for x in stored] if symmetric else list(zip(stored[::2], stored[1::2], strict=True)),
        rows=cut(payload, tails, starts, (experts, rows), 28 if wide else 12),
    )


def cut_fsv8(payload: bytes, tails: tuple, starts: tuple, shape: tuple[int, int], shift: int) -> list:
    """Cut the payload into rows by their lengths; every group of 64 starts where the section says."""
    experts, rows = shape
    found, at, group_starts = [], 0, []
    for expert, row in itertools.product(range(experts), range(rows)):
        if row % 64 == 0:
            group_starts.append(at)
        tail = tails[expert * rows + row]
        length = tail & ((1 << shift) - 1)
        found.append((payload[at : at + length], tail >> shift))
        at += length
    assert (*group_starts, at) == starts and at == len(payload)
    return found


def cut_dict16(payload: bytes, tails: tuple, starts: tuple, shape: tuple[int, int], _: int) -> list:
    """Cut the payload into rows by their starts."""
    experts, rows = shape
    places = [starts[expert] + tails[expert * rows + row] for expert in range(experts) for row in range(rows)]
    ends = [*places[1:], starts[-1]][: len(places)]
    assert 2 * starts[-1] == len(payload) and places == sorted(places)
    return [(payload[2 * start : 2 * end], 0) for start, end in zip(places, ends, strict=True)]

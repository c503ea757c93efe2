"""The Rust codec and the plain-Python oracle agree byte by byte."""

import numpy as np
import pytest

from moepack import _core
from oracle import ternary as oracle


def random_codes(shape: tuple[int, int, int], seed: int) -> np.ndarray:
    """Rows of all kinds: any share of zeros, unequal signs, one sign, all equal."""
    rng = np.random.default_rng(seed)
    codes = np.zeros(shape, np.int8)
    for row in codes.reshape(shape[0] * shape[1], shape[2]):
        p0 = rng.choice([0, 0.3, 0.5, 0.7, 0.8, 0.885, 0.95, 0.99, 1])
        share = rng.choice([0, 0.2, 0.5, 0.65, 1])
        row[:] = rng.choice([0, -1, 1], shape[2], p=[p0, (1 - p0) * share, (1 - p0) * (1 - share)])
    return codes


def symbols_of(codes: np.ndarray) -> str:
    return "".join("102"[code + 1] for code in codes)


@pytest.mark.parametrize("code", ["fsv8", "dict16"])
@pytest.mark.parametrize(
    "shape", [(1, 130, 200), (2, 65, 33), (3, 7, 1), (1, 3, 16_380), (1, 3, 16_381), (2, 0, 9), (1, 5, 0)]
)
def test_the_oracle_reads_rust_s_output(code: str, shape: tuple[int, int, int]) -> None:
    codes = random_codes(shape, seed=shape[2])
    levels = np.tile(np.array([-0.25, 1 + 2**-9], np.float32), (*shape[:2], 1))
    data = _core.encode_ternary(codes, levels, ndim=3, code=code)
    blob = oracle.read(data.tobytes())
    assert (blob.code, blob.shape, blob.nonzeros) == (code, shape, np.count_nonzero(codes))
    assert blob.levels == [(-0.25, 1 + 2**-9)] * (shape[0] * shape[1])
    for row, expected in enumerate(codes.reshape(shape[0] * shape[1], shape[2])):
        assert blob.symbols(row) == symbols_of(expected)


def test_rust_writes_the_codes_that_the_oracle_finds() -> None:
    codes = random_codes((1, 120, 300), seed=7)
    levels = np.tile(np.array([-1, 1], np.float32), (1, 120, 1))
    blob = oracle.read(_core.encode_ternary(codes, levels, ndim=2).tobytes())
    coded = 0
    for row, (stored, field) in zip(codes[0], blob.rows, strict=True):
        if 0 < len(stored) < 75:
            symbols = symbols_of(-row if field & 8 else row)
            assert stored == oracle.fsv8_encode(symbols, oracle.dictionaries()[blob.dictionaries[field & 7]])
            coded += 1
    assert coded > 60 and len(blob.dictionaries) > 3


def test_rust_and_oracle_generate_the_same_dictionary_of_the_paper() -> None:
    codes = random_codes((1, 60, 301), seed=3)
    levels = np.tile(np.array([-1, 1], np.float32), (1, 60, 1))
    blob = oracle.read(_core.encode_ternary(codes, levels, ndim=2, code="dict16").tobytes())
    for row, (stored, _) in zip(codes[0], blob.rows, strict=True):
        assert np.frombuffer(stored, "<u2").tolist() == oracle.dict16_encode(symbols_of(row))


def test_there_is_a_word_for_everything() -> None:
    assert len(oracle.dictionaries()) == 36
    for dictionary in oracle.dictionaries():
        assert sum(dictionary.classes) == 256
        for word in ("1", "2", "0" * 300 + "1", "12" * 20, "0"):
            assert oracle.fsv8_decode(oracle.fsv8_encode(word, dictionary), dictionary).startswith(word)

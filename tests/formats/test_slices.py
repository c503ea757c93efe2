"""Slices of packed tensors hold the values of the selected experts, rows and columns, in every format."""

import numpy as np
import pytest
from numpy.typing import NDArray

from moepack import _core
from moepack.errors import LoadError
from moepack.slices import Selection, cut, enclosing, grain_of

EXPERTS, ROWS, COLUMNS = 5, 150, 520
Bytes = NDArray[np.uint8]


def groupwise(rng, bits=4, group=64, symmetric=False, shape=(EXPERTS, ROWS, COLUMNS), ndim=3) -> Bytes:
    experts, rows, columns = shape
    groups = -(-columns // group)
    scales = rng.normal(size=(experts, rows, groups)).astype(np.float16).astype(np.float32)
    codes = rng.integers(0, 1 << bits, shape, dtype=np.uint8)
    offsets = None if symmetric else -scales
    return _core.encode_groupwise(codes, scales, offsets, bits=bits, group_size=group, ndim=ndim)


def codebook(rng, bits=4, block=1024, activation_bits=0, hadamard=1) -> Bytes:
    codes = rng.integers(0, 1 << bits, (EXPERTS, ROWS, COLUMNS), dtype=np.uint8)
    blocks = -(-COLUMNS // block)
    step = 256 if activation_bits else 1
    centroids = rng.integers(-32000 // step, 32000 // step, (EXPERTS, ROWS, blocks, 1 << bits)) * step
    scales = rng.random((EXPERTS, ROWS, blocks), dtype=np.float32)
    return _core.encode_codebook(
        codes, centroids.astype(np.int16), scales, bits=bits, block=block, ndim=3, activation_bits=activation_bits,
        hadamard=hadamard,
    )  # fmt: skip


def coded(rng, spread=3, stream_rows=64, columns=None, symbols="plain", rows=True) -> Bytes:
    codes = np.rint(rng.normal(size=(EXPERTS, ROWS, COLUMNS)) * spread).astype(np.int32)
    codes[rng.random(codes.shape) < 0.001] = 300
    scales = rng.random((EXPERTS, ROWS) if rows else (1, 1), dtype=np.float32)
    return _core.encode_coded(codes, scales, ndim=3, columns=columns, stream_rows=stream_rows, symbols=symbols)


def ternary(rng, code="fsv8", symmetric=False) -> Bytes:
    codes = rng.choice(np.array([-1, 0, 1], np.int8), (EXPERTS, ROWS, COLUMNS), p=[0.05, 0.9, 0.05])
    high = rng.random((EXPERTS, ROWS), dtype=np.float32)
    levels = np.stack([-high if symmetric else -2 * high, high], -1)
    return _core.encode_ternary(codes, levels, ndim=3, code=code)


def compensated(rng, bits=3, ranks=(3, 0, 8, 1, 2)) -> Bytes:
    total, scale = sum(ranks), lambda n: rng.random((sum(ranks), -(-n // 64))).astype(np.float16).astype(np.float32)

    def side(length: int):
        if bits == 16:
            return rng.normal(size=(total, length)).astype(np.float16).astype(np.float32)
        return rng.integers(0, 1 << bits, (total, length), dtype=np.uint8), scale(length)

    return _core.encode_compensated(
        groupwise(rng), np.array(ranks, np.int64), side(COLUMNS), side(ROWS), bits=bits
    )  # fmt: skip


TENSORS = {
    **{f"groupwise {bits} bits": lambda rng, bits=bits: groupwise(rng, bits) for bits in (2, 3, 4, 8)},
    "groupwise, symmetric": lambda rng: groupwise(rng, 4, 32, symmetric=True),
    "groupwise, groups of 16": lambda rng: groupwise(rng, 3, 16),
    "groupwise, whole rows": lambda rng: groupwise(rng, 4, COLUMNS),
    **{f"codebook {bits} bits": lambda rng, bits=bits: codebook(rng, bits) for bits in (2, 3, 4)},
    "codebook, blocks": lambda rng: codebook(rng, 4, 128),
    "codebook, rounded activations": lambda rng: codebook(rng, 3, 128, 8),
    "codebook, whole rows, rounded activations": lambda rng: codebook(rng, 4, 1024, 8),
    "codebook, rotated": lambda rng: codebook(rng, 4, hadamard=8),
    "coded": coded,
    "coded, 16 rows": lambda rng: coded(rng, stream_rows=16),
    "coded, low bits": lambda rng: coded(rng, 60, symbols="plain+2"),
    "coded, one scale": lambda rng: coded(rng, rows=False),
    "coded, column scales": lambda rng: coded(rng, columns=rng.random((EXPERTS, COLUMNS), dtype=np.float32)),
    "coded, shared column scales": lambda rng: coded(rng, columns=rng.random((1, COLUMNS), dtype=np.float32)),
    "fsv8": ternary,
    "fsv8, symmetric": lambda rng: ternary(rng, symmetric=True),
    "dict16": lambda rng: ternary(rng, "dict16"),
    **{f"compensated {bits} bits": lambda rng, bits=bits: compensated(rng, bits) for bits in (3, 8, 16)},
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_slice_has_the_values_of_its_part(kind: str) -> None:
    rng = np.random.default_rng(1)
    data = TENSORS[kind](rng)
    whole, grain = _core.PackedTensor(data), grain_of(data)
    values = whole.dequantize()
    chosen = [(range(EXPERTS), range(ROWS), range(COLUMNS)), ([3, 1], range(ROWS), range(COLUMNS))]
    for spans in [(range(40, 90), range(130, 300)), (range(64, 150), range(0, 256)), (range(16), range(384, 520))]:
        rows, columns = spans
        chosen.append((range(1, 4), rows, range(COLUMNS)))
        chosen.append(([4], range(ROWS), columns))
        chosen.append(([2, 0], rows, columns))
    for experts, rows, columns in chosen:
        rows = enclosing(rows, ROWS, grain.rows, grain.least)
        columns = enclosing(columns, COLUMNS, grain.columns, grain.least)
        part = cut(data, Selection(experts, rows, columns))
        tensor = _core.PackedTensor(part)
        expected = values[list(experts)][:, rows.start : rows.stop, columns.start : columns.stop]
        assert np.array_equal(tensor.dequantize(), expected), (experts, rows, columns)
        if whole.kind != "ternary":
            tensor.verify()
        x = rng.normal(size=(3, len(columns))).astype(np.float32)
        if "rounded" not in kind:
            reference = np.einsum("tc,rc->tr", x, expected[0])
            np.testing.assert_allclose(tensor.matmul(x, 0), reference, rtol=0.02, atol=0.02 * abs(reference).max())


@pytest.mark.parametrize("kind", TENSORS)
def test_a_slice_takes_its_share_of_the_bytes(kind: str) -> None:
    data = TENSORS[kind](np.random.default_rng(1))
    half = cut(data, Selection([0, 1], range(ROWS), range(COLUMNS)))
    assert half.size < 0.44 * data.size + 4096


def test_cuts_elsewhere_are_refused_by_name() -> None:
    rng = np.random.default_rng(1)
    everything = range(COLUMNS)
    with pytest.raises(LoadError, match=r"'mlp\.up': has 150 rows, cut at multiples of 64; 16 to 64 were requested"):
        cut(coded(rng), Selection([0], range(16, 64), everything), file="f", tensor="mlp.up")
    with pytest.raises(LoadError, match="has 520 columns, cut nowhere; 0 to 64 were requested"):
        cut(ternary(rng), Selection([0], range(ROWS), range(64)))
    with pytest.raises(LoadError, match=r"has experts 0 to 4, but \[5\] were requested"):
        cut(groupwise(rng), Selection([5], range(ROWS), everything))


def test_the_enclosing_range_is_the_smallest_that_can_be_cut() -> None:
    assert enclosing(range(17, 40), 50, 16) == range(16, 48)
    assert enclosing(range(17, 49), 50, 16) == range(16, 50)
    assert enclosing(range(17, 40), 50, 0) == range(50)
    assert enclosing(range(0, 16), 50, 16, least=20) == range(50)

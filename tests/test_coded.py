"""Coded tensors: the core beside an independent reader, their size, their products, and damage."""

import json
import math
import pathlib

import numpy as np
import pytest

from moepack import CorruptionError, _core
from moepack.registry import open_tensor
from oracle import coded as oracle

GOLDEN = pathlib.Path(__file__).parent / "golden" / "coded"
CASES = json.loads((GOLDEN / "cases.json").read_text())


def drawn(shape, deviation=1.5, seed=0):
    """Gaussian codes whose deviation differs from row to row."""
    rng = np.random.default_rng(seed)
    return np.rint(rng.standard_normal(shape) * deviation * rng.uniform(0.5, 1.5, (*shape[:2], 1))).astype(np.int32)


def paths(indices):
    """Dependent codes of indices."""
    return oracle.dependent(indices.astype(np.int64)).astype(np.int32)


def scales(shape):
    """A scale a row."""
    return np.random.default_rng(1).uniform(0.5, 1.5, shape[:2]).astype(np.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_file(case):
    data = np.fromfile(GOLDEN / f"{case['name']}.bin", np.uint8)
    codes = np.array(case["codes"], np.int32).reshape(case["shape"])
    blob = _core.PackedTensor(data)
    blob.verify()
    assert (list(blob.shape), blob.ndim, blob.nbytes) == (case["shape"], case["ndim"], len(data))
    assert blob.details()["stream_rows"] == case["stream_rows"]
    np.testing.assert_array_equal(_core.decode_coded(data), codes)
    assert blob.parameters("scales").ravel().tolist() == np.float32(case["scales"]).tolist()
    read = oracle.read(data.tobytes())
    assert read.ndim == case["ndim"]
    np.testing.assert_array_equal(read.codes, codes)
    np.testing.assert_array_equal(blob.dequantize(), read.weights())


def test_every_file_is_a_case():
    assert sorted(f"{case['name']}.bin" for case in CASES) == sorted(path.name for path in GOLDEN.glob("*.bin"))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 35, 50), (3, 70, 9), (0, 3, 3), (2, 0, 3), (2, 3, 0)])
@pytest.mark.parametrize("deviation", [0.2, 1.5, 40, 120])
def test_an_independent_reader_gets_codes_and_scales(shape, deviation):
    codes = drawn(shape, deviation)
    for dtype, low_bits in ((np.int16, 0), (np.int32, 3)):
        data = _core.encode_coded(codes.astype(dtype), scales(shape), ndim=3, low_bits=low_bits)
        read = oracle.read(data.tobytes())
        np.testing.assert_array_equal(read.codes, codes)
        np.testing.assert_array_equal(_core.decode_coded(data), codes)
        np.testing.assert_array_equal(_core.PackedTensor(data).dequantize(), read.weights())
    data = _core.encode_coded(codes, scales(shape), ndim=3, pairs=math.inf)
    assert data[8] == 4 and _core.PackedTensor(data).details()["pairs"]
    np.testing.assert_array_equal(oracle.read(data.tobytes()).codes, codes)
    np.testing.assert_array_equal(_core.decode_coded(data), codes)
    data = _core.encode_coded(paths(codes), scales(shape), ndim=3, dependent=True)
    assert data[8] == 3 and _core.PackedTensor(data).details()["dependent"]
    np.testing.assert_array_equal(oracle.read(data.tobytes()).codes, paths(codes))
    np.testing.assert_array_equal(_core.decode_coded(data), paths(codes))


@pytest.mark.parametrize(("deviation", "version"), [(3, 1), (60, 2)])
def test_low_bits_are_kept_apart_where_a_table_lists_too_few_integers(deviation, version):
    """And what has none is a tensor of version 1, as ever."""
    data = _core.encode_coded(drawn((1, 128, 512), deviation), np.ones((1, 1), np.float32), ndim=2, low_bits=3)
    details = _core.PackedTensor(data).details()
    assert data[8] == version and (details.get("low_bits", 0) > 0) is (version == 2)
    assert details["exceptions"] < 0.003 * 128 * 512


@pytest.mark.parametrize(("deviation", "version"), [(0.35, 4), (0.4, 4), (2, 1)])
def test_pairs_are_coded_where_they_take_no_more(deviation, version):
    codes, one = np.random.default_rng(0).standard_normal((1, 1024, 1024)) * deviation, np.ones((1, 1), np.float32)
    codes = np.rint(codes).astype(np.int8)
    data, plain = _core.encode_coded(codes, one, ndim=2, pairs=0.002), _core.encode_coded(codes, one, ndim=2)
    assert data[8] == version and len(data) <= 1.003 * len(plain)
    assert version == 4 or data.tobytes() == plain.tobytes()


def test_gpus_get_symbols_of_one_weight():
    codes = drawn((2, 35, 50), 0.7)
    data = _core.encode_coded(codes, scales(codes.shape), ndim=3, pairs=math.inf)
    single = _core.coded_without_pairs(data)
    assert single[8] == 1
    np.testing.assert_array_equal(_core.PackedTensor(single).dequantize(), _core.PackedTensor(data).dequantize())
    assert _core.coded_to_device(data).tobytes() == _core.coded_to_device(single).tobytes()
    with pytest.raises(ValueError, match="symbols of one weight"):
        _core.coded_frame(data)


def test_gpus_refuse_low_bits():
    data = _core.encode_coded(drawn((1, 128, 512), 60), np.ones((1, 1), np.float32), ndim=2, low_bits=3)
    with pytest.raises(ValueError, match="low bits"):
        _core.coded_to_device(data)


def test_bytes_hold_small_codes_only():
    codes = drawn((1, 20, 30))
    blob = _core.PackedTensor(_core.encode_coded(codes.astype(np.int8), np.ones((1, 1), np.float32), ndim=2))
    np.testing.assert_array_equal(blob.decode(), codes.astype(np.int8))
    assert blob.decode().dtype == np.int8
    codes[0, 3, 3] = 128
    blob = _core.PackedTensor(_core.encode_coded(codes, np.ones((1, 1), np.float32), ndim=2))
    with pytest.raises(ValueError, match="code 128 in row 3"):
        blob.decode()


def test_wrong_arguments_are_refused():
    codes, one = drawn((1, 4, 4)), np.ones((1, 1), np.float32)
    for bad, message in [(np.ones((1, 3), np.float32), "shape"), (one * np.inf, "finite")]:
        with pytest.raises(ValueError, match=message):
            _core.encode_coded(codes, bad, ndim=2)
    with pytest.raises(ValueError, match="16 or 64"):
        _core.encode_coded(codes, one, ndim=2, stream_rows=32)
    with pytest.raises(ValueError, match="too large"):
        _core.encode_coded(np.full((1, 4, 4), -(2**31), np.int32), one, ndim=2)
    for bad in (codes, 2 * codes, np.full((1, 4, 4), 3, np.int32)):
        with pytest.raises(ValueError, match="no path of states in row 0"):
            _core.encode_coded(bad, one, ndim=2, dependent=True)
    with pytest.raises(ValueError, match="no low bits"):
        _core.encode_coded(paths(codes), one, ndim=2, dependent=True, low_bits=1)
    for other in ({"low_bits": 1}, {"dependent": True}):
        with pytest.raises(ValueError, match="neither"):
            _core.encode_coded(paths(codes), one, ndim=2, pairs=0.0, **other)
    with pytest.raises(TypeError):
        _core.encode_coded(codes.astype(np.float32), one, ndim=2)


@pytest.mark.parametrize("columns", [256, 2048])
@pytest.mark.parametrize("deviation", [0.5, 1.0, 2.0, 4.0])
def test_sizes_are_near_the_entropy(columns, deviation):
    codes = np.rint(np.random.default_rng(2).standard_normal((4, 256, columns)) * deviation).astype(np.int16)
    data = _core.encode_coded(codes, np.ones((1, 1), np.float32), ndim=3)
    shares = np.unique(codes, return_counts=True)[1] / codes.size
    entropy = -(shares * np.log2(shares)).sum()
    allowed = 0.015 if columns == 2048 else 0.04
    if entropy >= 2:
        assert 8 * data.nbytes / codes.size < entropy * (1 + allowed)


@pytest.mark.parametrize("mode", ["auto", "exact", "bf16", "int8"])
@pytest.mark.parametrize(
    ("deviation", "form"),
    [(1.5, {"low_bits": 3}), (80, {"low_bits": 3}), (3, {"dependent": True}), (0.7, {"pairs": math.inf})],
)
def test_products_are_those_of_the_weights(mode, deviation, form):
    shape = (3, 130, 300)
    codes = paths(drawn(shape, deviation)) if "dependent" in form else drawn(shape, deviation)
    blob = _core.PackedTensor(_core.encode_coded(codes, scales(shape), ndim=3, **form))
    x = np.random.default_rng(4).standard_normal((33, 300)).astype(np.float32)
    offsets = np.array([0, 2, 2, 33])
    for isa in _core.available_isas():
        found = blob.matmul_grouped(x, offsets, mode, isa)
        for expert in range(3):
            tokens = slice(offsets[expert], offsets[expert + 1])
            weights = blob.dequantize()[expert].astype(np.float64)
            error = found[tokens] - x[tokens] @ weights.T
            size = np.abs(x[tokens]) @ np.abs(weights).T
            assert (np.abs(error) <= size * (1e-5 if mode == "exact" else 2**-7)).all()


def test_threads_do_not_change_bytes_or_products():
    shape, threads = (2, 200, 128), _core.threads()
    codes, x = drawn(shape), np.random.default_rng(4).standard_normal((20, 128)).astype(np.float32)
    found = []
    try:
        for count in (1, 2, 3):
            _core.set_threads(count)
            data = _core.encode_coded(codes, scales(shape), ndim=3)
            products = [_core.PackedTensor(data).matmul(x, mode=mode) for mode in ("auto", "exact", "int8")]
            found.append((data.tobytes(), *(product.tobytes() for product in products)))
    finally:
        _core.set_threads(threads)
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("deviation", "form"), [(1.5, {"low_bits": 3}), (80, {"low_bits": 3}), (0.7, {"pairs": math.inf})]
)
def test_damage_is_found_or_harmless(deviation, form):
    data = _core.encode_coded(drawn((1, 40, 64), deviation), scales((1, 40)), ndim=2, **form)
    rng, x = np.random.default_rng(2), np.ones((1, 64), np.float32)
    for place in rng.integers(0, len(data), 300):
        bad = data.copy()
        bad[place] ^= 1 << int(rng.integers(8))
        try:
            blob = _core.PackedTensor(bad)
            assert blob.dequantize().shape == blob.shape
            if blob.shape[2] == 64:
                assert blob.matmul(x).shape == (1, blob.shape[1])
        except _core.CorruptionError:
            continue
    for length in (0, 7, 63, len(data) - 64):
        with pytest.raises(_core.CorruptionError):
            _core.PackedTensor(data[:length].copy())
    with pytest.raises(CorruptionError):
        open_tensor(data[:-64].copy())

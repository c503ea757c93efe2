"""Coded tensors: the core against an independent reader, size, products, and damage."""

import json

import numpy as np
import pytest
import torch

from moepack import CorruptionError, _core
from moepack.registry import open_tensor
from oracle import coded as oracle
from places import GOLDEN

FOLDER = GOLDEN / "coded"
CASES = json.loads((FOLDER / "cases.json").read_text())


def drawn(shape, deviation=1.5, seed=0):
    """Gaussian codes whose deviation differs from row to row."""
    rng = np.random.default_rng(seed)
    return np.rint(rng.standard_normal(shape) * deviation * rng.uniform(0.5, 1.5, (*shape[:2], 1))).astype(np.int32)


def paths(indices):
    """Dependent codes of indices."""
    return oracle.dependent(indices.astype(np.int64)).astype(np.int32)


def columns_of(shape, own=True):
    """Scales of columns that differ by orders of magnitude, a row of them for each expert or one for all."""
    rng = np.random.default_rng(5)
    rows = (shape[0] if own and shape[2] else 1, shape[2])
    return (np.exp2(rng.normal(0, 2, rows)) * rng.choice([-1, 1], rows)).astype(np.float32)


def scales(shape):
    """One scale per row."""
    return np.random.default_rng(1).uniform(0.5, 1.5, shape[:2]).astype(np.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_file(case):
    data = np.fromfile(FOLDER / f"{case['name']}.bin", np.uint8)
    codes = np.array(case["codes"], np.int32).reshape(case["shape"])
    blob = _core.PackedTensor(data)
    blob.verify()
    assert (list(blob.shape), blob.ndim, blob.nbytes) == (case["shape"], case["ndim"], len(data))
    assert [blob.details()[name] for name in ("stream_rows", "symbols")] == [case["stream_rows"], case["symbols"]]
    np.testing.assert_array_equal(_core.decode_coded(data), codes)
    assert blob.parameters("scales").ravel().tolist() == np.float32(case["scales"]).tolist()
    assert blob.details().get("column_scales", False) is ("columns" in case)
    if "columns" in case:
        assert blob.parameters("columns").ravel().tolist() == np.float32(case["columns"]).tolist()
    read = oracle.read(data.tobytes())
    assert read.ndim == case["ndim"]
    np.testing.assert_array_equal(read.codes, codes)
    np.testing.assert_array_equal(blob.dequantize(), read.weights())


def test_every_file_is_a_case():
    assert sorted(f"{case['name']}.bin" for case in CASES) == sorted(path.name for path in FOLDER.glob("*.bin"))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 35, 50), (3, 70, 9), (0, 3, 3), (2, 0, 3), (2, 3, 0)])
@pytest.mark.parametrize("deviation", [0.2, 1.5, 40, 120])
def test_an_independent_reader_gets_codes_and_scales(shape, deviation):
    codes = drawn(shape, deviation)
    for dtype, symbols in ((np.int16, "plain"), (np.int32, "plain+3")):
        data = _core.encode_coded(codes.astype(dtype), scales(shape), ndim=3, symbols=symbols)
        read = oracle.read(data.tobytes())
        np.testing.assert_array_equal(read.codes, codes)
        np.testing.assert_array_equal(_core.decode_coded(data), codes)
        np.testing.assert_array_equal(_core.PackedTensor(data).dequantize(), read.weights())
    data = _core.encode_coded(paths(codes), scales(shape), ndim=3, symbols="dependent")
    assert _core.PackedTensor(data).details()["symbols"] == "dependent"
    np.testing.assert_array_equal(oracle.read(data.tobytes()).codes, paths(codes))
    np.testing.assert_array_equal(_core.decode_coded(data), paths(codes))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 35, 50), (3, 70, 9), (0, 3, 3), (2, 0, 3), (2, 3, 0)])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("deviation", "symbols", "stream_rows"),
    [(1.5, "plain", None), (60, "plain+3", None), (2, "dependent", None), (0, "plain", 64)],
)
def test_an_independent_reader_gets_scales_of_columns(shape, own, deviation, symbols, stream_rows):
    codes = paths(drawn(shape, deviation)) if symbols == "dependent" else drawn(shape, deviation)
    form = {"symbols": symbols, "stream_rows": stream_rows}
    exact = columns_of(shape, own)
    for columns, given in [(exact, scales(shape)), (np.exp2(np.rint(exact % 3)), np.full((1, 1), 0.5, np.float32))]:
        data = _core.encode_coded(codes, given, columns=columns, ndim=3, **form)
        read, blob = oracle.read(data.tobytes()), _core.PackedTensor(data)
        blob.verify()
        np.testing.assert_array_equal(read.codes, codes)
        np.testing.assert_array_equal(_core.decode_coded(data), codes)
        for found in (read.columns, blob.parameters("columns")):
            np.testing.assert_array_equal(found, columns)
        np.testing.assert_array_equal(blob.parameters("scales"), given)
        weights = read.weights()
        np.testing.assert_array_equal(weights, (given[..., None] * codes.astype(np.float32)) * columns[:, None])
        np.testing.assert_array_equal(blob.dequantize(), weights)
        rounded = torch.from_numpy(weights).bfloat16().view(torch.uint16).numpy()
        np.testing.assert_array_equal(blob.dequantize("bfloat16"), rounded)
        if codes.size:
            rows = np.array([0, shape[0] * shape[1] - 1, 0])
            np.testing.assert_array_equal(blob.look_up(rows), weights.reshape(-1, shape[2])[rows])
            np.testing.assert_array_equal(blob.look_up(rows, "bfloat16"), rounded.reshape(-1, shape[2])[rows])


def test_files_without_scales_of_columns_have_no_trace_of_them():
    codes, one = drawn((2, 20, 30)), np.ones((1, 1), np.float32)
    data = _core.encode_coded(codes, one, ndim=3)
    assert not data[60:64].any() and "column_scales" not in _core.PackedTensor(data).details()
    with pytest.raises(ValueError, match="columns"):
        _core.PackedTensor(data).parameters("columns")
    # The row of a single expert counts as one row for all.
    scaled = [_core.encode_coded(codes[:1], one, ndim=2, columns=columns_of((1, 20, 30), own)) for own in (False, True)]
    assert scaled[0].tobytes() == scaled[1].tobytes() and scaled[0][60] == 1


@pytest.mark.parametrize(
    ("row", "column", "dtype"), [(0.5, 0.5, "bfloat16"), (0.1, 0.5, "float32"), (0.5, 0.1, "float32")]
)
def test_bfloat16_holds_all_scales_or_none(row, column, dtype):
    columns = np.full((1, 30), column, np.float32)
    data = _core.encode_coded(drawn((1, 20, 30)), np.full((1, 1), row, np.float32), ndim=2, columns=columns)
    assert _core.PackedTensor(data).details()["dtype"] == dtype


@pytest.mark.parametrize(("deviation", "symbols"), [(3, "plain"), (15, "plain+3"), (60, "plain+3")])
def test_low_bits_are_used_where_a_table_lists_too_few_integers(deviation, symbols):
    codes, one, sizes = drawn((1, 128, 512), deviation), np.ones((1, 1), np.float32), []
    for given in ("plain", "plain+1", "plain+2", "plain+3"):
        data = _core.encode_coded(codes, one, ndim=2, symbols=given)
        details = _core.PackedTensor(data).details()
        assert details["symbols"] == min(given, symbols)
        sizes.append(len(data))
    assert sizes == sorted(sizes, reverse=True)
    assert details["exceptions"] < 0.003 * 128 * 512


@pytest.mark.parametrize("version", [0, 2, 3, 4])
def test_other_versions_are_refused_by_number(version):
    data = _core.encode_coded(drawn((1, 20, 30)), np.ones((1, 1), np.float32), ndim=2)
    data[8] = version
    with pytest.raises(_core.CorruptionError, match=f"version {version}; this library reads 1"):
        _core.PackedTensor(data)


def test_headers_with_other_symbols_are_refused():
    """The bytes that are valid are those of the table in docs/format.md."""
    codes = drawn((1, 20, 30))
    data = _core.encode_coded(paths(codes), np.ones((1, 1), np.float32), ndim=2, symbols="dependent")
    for low_bits, kind in ((0, 2), (1, 1), (3, 1), (4, 0), (255, 255)):
        data[58:60] = low_bits, kind
        with pytest.raises(_core.CorruptionError, match=f"kind {kind} with {low_bits} low bits"):
            _core.PackedTensor(data)


def test_gpus_refuse_low_bits():
    data = _core.encode_coded(drawn((1, 128, 512), 60), np.ones((1, 1), np.float32), ndim=2, symbols="plain+3")
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
    for bad, message in [
        (np.ones((1, 3), np.float32), "columns have shape"),
        (np.ones((2, 4), np.float32), "columns have shape"),
        (np.ones((0, 4), np.float32), "columns have shape"),
        (np.array([[1, 1, np.nan, 1]], np.float32), "scale NaN of column 2 is not finite"),
        (np.array([[1, -np.inf, 1, 1]], np.float32), "scale -inf of column 1 is not finite"),
    ]:
        with pytest.raises(ValueError, match=message):
            _core.encode_coded(codes, one, ndim=2, columns=bad)
    with pytest.raises(ValueError, match="16 or 64"):
        _core.encode_coded(codes, one, ndim=2, stream_rows=32)
    with pytest.raises(ValueError, match="too large"):
        _core.encode_coded(np.full((1, 4, 4), -(2**31), np.int32), one, ndim=2)
    for bad in (codes, 2 * codes, np.full((1, 4, 4), 3, np.int32)):
        with pytest.raises(ValueError, match="no path of states in row 0"):
            _core.encode_coded(bad, one, ndim=2, symbols="dependent")
    for symbols in ("", "plain+0", "plain+4", "dependent+1", "pairs"):
        with pytest.raises(ValueError, match="symbols are plain"):
            _core.encode_coded(codes, one, ndim=2, symbols=symbols)
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
    ("deviation", "symbols"), [(0.7, "plain"), (1.5, "plain+3"), (80, "plain+3"), (3, "dependent")]
)
@pytest.mark.parametrize("own", [None, False, True])
def test_products_match_the_weights(mode, deviation, symbols, own):
    shape = (3, 130, 300)
    codes = paths(drawn(shape, deviation)) if symbols == "dependent" else drawn(shape, deviation)
    columns = None if own is None else columns_of(shape, own)
    blob = _core.PackedTensor(_core.encode_coded(codes, scales(shape), ndim=3, columns=columns, symbols=symbols))
    x = np.random.default_rng(4).standard_normal((33, 300)).astype(np.float32)
    offsets = np.array([0, 2, 2, 33])
    for isa in _core.available_isas():
        found = blob.matmul_grouped(x, offsets, mode, isa)
        for expert in range(3):
            tokens = slice(offsets[expert], offsets[expert + 1])
            weights = blob.dequantize()[expert].astype(np.float64)
            error = found[tokens] - x[tokens] @ weights.T
            size = np.abs(x[tokens]) @ np.abs(weights).T
            if mode == "int8" and columns is not None:
                # Activations times scales of columns are off by a share of the largest.
                column = columns[expert % len(columns)]
                largest = np.abs(x[tokens] * column).max(1, keepdims=True)
                size += largest * np.abs(weights / column).sum(1)
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
    ("deviation", "form"),
    [
        (1.5, {"symbols": "plain+3"}),
        (80, {"symbols": "plain+3"}),
        (1.5, {"columns": columns_of((1, 40, 64))}),
    ],
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

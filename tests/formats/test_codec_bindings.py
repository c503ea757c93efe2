"""The extension module: accepted arguments, results and errors."""

import numpy as np
import pytest

from moepack import _core


def ternary(shape: tuple[int, int, int], p0: float = 0.885, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    codes = rng.choice(np.array([-1, 0, 1], np.int8), shape, p=[(1 - p0) / 2, p0, (1 - p0) / 2])
    levels = rng.uniform(0.01, 1, (*shape[:2], 2)).astype(np.float32) * np.array([-1, 1], np.float32)
    return codes, levels


@pytest.mark.parametrize("code", ["fsv8", "dict16"])
@pytest.mark.parametrize(
    "shape", [(1, 70, 301), (3, 65, 64), (0, 4, 5), (2, 0, 5), (2, 3, 0), (1, 1, 1), (1, 2, 20001)]
)
def test_round_trip(code: str, shape: tuple[int, int, int]) -> None:
    codes, levels = ternary(shape)
    data = _core.encode_ternary(codes, levels, ndim=3, code=code)
    assert data.dtype == np.uint8 and data.nbytes % 64 == 0
    blob = _core.PackedTensor(data)
    blob.verify()
    assert blob.shape == shape
    assert (blob.details()["code"], blob.ndim, blob.nbytes) == (code, 3, data.nbytes)
    assert blob.details()["nonzeros"] == np.count_nonzero(codes)
    np.testing.assert_array_equal(blob.decode(), codes)
    np.testing.assert_array_equal(blob.parameters("levels"), levels)
    values = np.where(codes < 0, levels[..., :1], np.where(codes > 0, levels[..., 1:], 0)).astype(np.float32)
    np.testing.assert_array_equal(blob.dequantize("float32"), values)


def test_bfloat16_values_are_returned_as_bits() -> None:
    codes, _ = ternary((1, 5, 100))
    levels = np.tile(np.array([-0.5, 1.0], np.float32), (1, 5, 1))
    blob = _core.PackedTensor(_core.encode_ternary(codes, levels, ndim=2))
    assert blob.details()["level_dtype"] == "bfloat16"
    bits = blob.dequantize("bfloat16")
    assert bits.dtype == np.uint16
    widened = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(widened, blob.dequantize("float32"))


@pytest.mark.parametrize(
    ("level", "dtype"), [(1.0, "bfloat16"), (1 + 2**-10, "float16"), (1 + 2**-20, "float32"), (2.0**-130, "bfloat16")]
)
def test_levels_are_stored_in_the_narrowest_exact_type(level: float, dtype: str) -> None:
    levels = np.array([[[-level, level]]], np.float32)
    blob = _core.PackedTensor(_core.encode_ternary(np.ones((1, 1, 9), np.int8), levels, ndim=2))
    assert blob.details()["level_dtype"] == dtype
    np.testing.assert_array_equal(blob.parameters("levels"), levels)


def test_a_read_only_memory_map_is_read_in_place(tmp_path) -> None:
    codes, levels = ternary((1, 100, 500))
    data = _core.encode_ternary(codes, levels, ndim=2)
    path = tmp_path / "blob"
    data.tofile(path)
    mapped = np.memmap(path, np.uint8, mode="r")
    np.testing.assert_array_equal(_core.PackedTensor(mapped).decode(), codes)
    # At an offset of one byte nothing is aligned, which is valid.
    shifted = np.concatenate([np.zeros(1, np.uint8), data])[1:]
    np.testing.assert_array_equal(_core.PackedTensor(shifted).decode(), codes)


def test_threads_do_not_change_the_bytes() -> None:
    codes, levels = ternary((3, 200, 400), p0=0.6)
    before = _core.threads()
    try:
        blobs = []
        for threads in (1, 2, 5):
            _core.set_threads(threads)
            assert _core.threads() == threads
            blobs.append(_core.encode_ternary(codes, levels, ndim=3).tobytes())
    finally:
        _core.set_threads(before)
    assert len(set(blobs)) == 1


@pytest.mark.parametrize("code", ["fsv8", "dict16"])
@pytest.mark.parametrize("isa", _core.available_isas())
def test_products_match_the_decoded_weights(code: str, isa: str) -> None:
    codes, levels = ternary((3, 70, 301))
    blob = _core.PackedTensor(_core.encode_ternary(codes, levels, ndim=3, code=code))
    weights = blob.dequantize("float32").astype(np.float64)
    x = np.random.default_rng(1).standard_normal((5, 301)).astype(np.float32)
    np.testing.assert_allclose(blob.matmul(x, 2, isa=isa), x @ weights[2].T, rtol=0, atol=1e-4)
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    truncated = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(blob.matmul(bits, isa=isa), truncated @ weights[0].T, rtol=0, atol=1e-4)
    grouped = blob.matmul_grouped(x, np.array([0, 2, 2, 5]), isa=isa)
    expected = np.concatenate([x[:2] @ weights[0].T, x[2:] @ weights[2].T])
    np.testing.assert_allclose(grouped, expected, rtol=0, atol=1e-4)


def test_wrong_operands_are_value_or_type_errors() -> None:
    codes, levels = ternary((2, 4, 10))
    blob = _core.PackedTensor(_core.encode_ternary(codes, levels, ndim=3))
    x = np.ones((3, 10), np.float32)
    assert blob.matmul(x[:0]).shape == (0, 4)
    for call in (
        lambda: blob.matmul(x[:, :9].copy()),
        lambda: blob.matmul(x[:, ::-1]),
        lambda: blob.matmul(x, 2),
        lambda: blob.matmul(x, isa="mmx"),
        lambda: blob.matmul_grouped(x, np.array([0, 3])),
        lambda: blob.matmul_grouped(x, np.array([0, 2, 4])),
        lambda: blob.matmul_grouped(x, np.array([0, -1, 3])),
    ):
        with pytest.raises(ValueError):
            call()
    for wrong in (x.astype(np.float64), x[0], x.tolist()):
        with pytest.raises(TypeError):
            blob.matmul(wrong)


def test_every_format_has_a_kernel() -> None:
    assert set(_core.kernels()) == {"fsv8", "dict16", "groupwise", "codebook", "coded"}


def test_wrong_arguments_are_value_or_type_errors() -> None:
    codes, levels = ternary((1, 4, 10))
    bad_code = codes.copy()
    bad_code[0, 2, 7] = 2
    with pytest.raises(ValueError, match="expert 0, row 2, column 7"):
        _core.encode_ternary(bad_code, levels, ndim=2)
    for value in (np.nan, np.inf, 0.5):
        bad_levels = levels.copy()
        bad_levels[0, 3, 0] = value
        with pytest.raises(ValueError, match="row 3"):
            _core.encode_ternary(codes, bad_levels, ndim=2)
    with pytest.raises(ValueError, match="ndim 4"):
        _core.encode_ternary(codes, levels, ndim=4)
    with pytest.raises(ValueError, match="shape"):
        _core.encode_ternary(codes, levels[:, :3], ndim=2)
    with pytest.raises(ValueError, match="unknown ternary code"):
        _core.encode_ternary(codes, levels, ndim=2, code="zip")
    with pytest.raises(ValueError, match="contiguous"):
        _core.encode_ternary(np.repeat(codes, 2, axis=2)[:, :, ::2], levels, ndim=2)
    with pytest.raises(TypeError):
        _core.encode_ternary(codes.astype(np.int16), levels, ndim=2)
    with pytest.raises(ValueError, match="dtype"):
        _core.PackedTensor(_core.encode_ternary(codes, levels, ndim=2)).dequantize("float64")


@pytest.mark.parametrize("code", ["fsv8", "dict16"])
def test_damage_raises_corruption_errors(code: str) -> None:
    codes, levels = ternary((1, 66, 200))
    data = _core.encode_ternary(codes, levels, ndim=2, code=code)
    for length in (0, 7, 127, 128, data.size - 64, data.size - 1):
        with pytest.raises(_core.CorruptionError, match=r"truncated|corrupt"):
            _core.PackedTensor(data[:length].copy())
    longer = np.concatenate([data, np.zeros(64, np.uint8)])
    with pytest.raises(_core.CorruptionError):
        _core.PackedTensor(longer)
    damaged = data.copy()
    damaged[-1] = 1
    with pytest.raises(_core.CorruptionError, match="padding"):
        _core.PackedTensor(damaged).verify()
    assert issubclass(_core.CorruptionError, ValueError)


def test_the_instruction_set_in_use_is_available() -> None:
    assert _core.available_isas()[0] == "scalar"
    assert _core.isa() in _core.available_isas()
    for threads in (0, 100_000):
        with pytest.raises(ValueError, match="threads"):
            _core.set_threads(threads)

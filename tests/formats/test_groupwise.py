"""Group-wise tensors through the bindings against the reference in tests/oracle; the core tests every spec itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moepack
from moepack import _core
from oracle import groupwise as oracle


def tensor(bits=4, group=64, symmetric=False, dtype="float16", shape=(2, 19, 130), seed=0):
    rng = np.random.default_rng(seed)
    columns = shape[2]
    groups = min(columns, 1) if group == 0 else -(-columns // group)
    codes = rng.integers(0, 2**bits, shape).astype(np.uint8)
    scales, offsets = (rng.integers(-99, 99, (*shape[:2], groups)).astype(np.float32) / 256 for _ in range(2))
    return oracle.Tensor(bits, group, dtype, 3, codes, scales, None if symmetric else offsets)


def encode(made):
    size = made.group or 1 << 20
    return _core.encode_groupwise(
        made.codes, made.scales, made.offsets, bits=made.bits, group_size=size, ndim=made.rank, dtype=made.dtype
    )


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([0, 16, 32, 64, 128, 256]),
    st.booleans(),
    st.sampled_from(["float16", "bfloat16"]),
    st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 300)),
)
def test_the_core_and_the_reference_write_the_same_bytes(bits, group, symmetric, dtype, shape):
    made = tensor(bits, group, symmetric, dtype, shape)
    data = encode(made)
    assert data.tobytes() == oracle.write(made)
    blob = _core.PackedTensor(data)
    blob.verify()
    np.testing.assert_array_equal(blob.decode(), made.codes)
    np.testing.assert_array_equal(blob.dequantize(), made.weights())


def test_attributes():
    data = encode(tensor())
    blob = _core.PackedTensor(data)
    assert (*blob.shape, blob.ndim) == (2, 19, 130, 3)
    assert blob.details() == {"bits": 4, "group_size": 64, "symmetric": False, "dtype": "float16"}
    assert (blob.kind, blob.format, blob.nbytes) == ("groupwise", "groupwise-4bit", len(data))
    assert {*blob.modes} == {"auto", "exact", "int8", "bf16"}
    assert "groupwise-4bit, 2 x 19 x 130" in repr(blob)
    with pytest.raises(ValueError, match=r"no parameters \"offsets\": it has scales"):
        _core.PackedTensor(encode(tensor(symmetric=True))).parameters("offsets")


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("mode", ["exact", "int8"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("group", "symmetric"), [(32, False), (0, True)])
def test_products(bits, group, symmetric, mode, isa):
    made = tensor(bits, group, symmetric, shape=(1, 19, 330))
    blob = _core.PackedTensor(encode(made))
    x = np.random.default_rng(1).standard_normal((5, 330)).astype(np.float32)
    expected = oracle.product(made, x, mode)
    size = np.abs(made.codes[0].astype(float) * 0.4).sum(1).max() * np.abs(x).max()
    np.testing.assert_allclose(blob.matmul(x, mode=mode, isa=isa), expected, rtol=0, atol=1e-6 * size)
    bf16 = (x.view(np.uint32) >> 16).astype(np.uint16)
    same = (bf16.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(blob.matmul(bf16, mode=mode, isa=isa), blob.matmul(same, mode=mode, isa=isa))


@pytest.mark.parametrize("mode", ["exact", "int8"])
def test_grouped_products_match_each_expert(mode):
    blob = _core.PackedTensor(encode(tensor(shape=(3, 19, 130))))
    x = np.random.default_rng(1).standard_normal((7, 130)).astype(np.float32)
    y = blob.matmul_grouped(x, np.array([0, 5, 5, 7]), mode=mode)
    expected = [blob.matmul(x[:5], 0, mode=mode), blob.matmul(x[5:], 2, mode=mode)]
    np.testing.assert_array_equal(y, np.concatenate(expected))
    with pytest.raises(ValueError, match="columns"):
        blob.matmul_grouped(x[:, :64].copy(), np.array([0, 5, 5, 7]))
    with pytest.raises(ValueError, match="offsets"):
        blob.matmul_grouped(x, np.array([0, 8, 7, 7]))
    with pytest.raises(ValueError, match="expert 3"):
        blob.matmul(x, 3)
    with pytest.raises(ValueError, match="mode"):
        blob.matmul(x, mode="int4")


def test_damage_is_a_typed_error():
    data = encode(tensor())
    for length in (0, 100, len(data) - 64):
        with pytest.raises(_core.CorruptionError):
            _core.PackedTensor(data[:length].copy())
    damaged = data.copy()
    damaged[128:130] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    with pytest.raises(_core.CorruptionError, match="expert 0 row 0"):
        _core.PackedTensor(damaged).verify()


def test_wrong_arguments_are_value_errors():
    made = tensor()
    arguments = {"codes": made.codes, "scales": made.scales, "offsets": made.offsets}
    good = {**arguments, "bits": 4, "group_size": 64, "ndim": 3}
    wrong = [
        ({"codes": made.codes + 1}, "code 16"),
        ({"codes": made.codes[:, :, ::-1]}, "contiguous"),
        ({"scales": made.scales * np.float32(1.0001)}, "float16"),
        ({"scales": made.scales * np.float32(np.nan)}, "parameter"),
        ({"offsets": made.offsets[:, :, :1].copy()}, "groups"),
        ({"bits": 5}, "bits"),
        ({"group_size": 48}, "groups"),
        ({"group_size": 0}, "group_size"),
        ({"ndim": 2}, "ndim 2"),
        ({"dtype": "float32"}, "float32"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            _core.encode_groupwise(**{**good, **change})


@given(st.integers(0, 3), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_int3_packing_is_that_of_the_reference(rows, units, seed):
    codes = np.random.default_rng(seed).integers(0, 8, (2, rows, 32 * units)).astype(np.uint8)
    words = moepack.pack_int3(codes)
    assert words.dtype == np.uint32 and words.shape == (2, rows, 3 * units)
    np.testing.assert_array_equal(words, oracle.pack_words(3, codes))
    np.testing.assert_array_equal(moepack.unpack_int3(words), codes)


def test_int3_packing_rejects_invalid_codes():
    with pytest.raises(ValueError, match="multiple of 32"):
        moepack.pack_int3(np.zeros(31, np.uint8))
    with pytest.raises(ValueError, match="code 8"):
        moepack.pack_int3(np.full(32, 8, np.uint8))
    with pytest.raises(TypeError, match="uint8"):
        moepack.pack_int3(np.zeros(32, np.int64))
    with pytest.raises(ValueError, match="multiple of 3"):
        moepack.unpack_int3(np.zeros(4, np.uint32))

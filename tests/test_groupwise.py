"""Two-bit group-wise tensors through the binding; the format and the kernels are tested in the core."""

import numpy as np
import pytest

from moepack import _core


def tensor(experts=2, rows=6, columns=130, group=64, seed=0):
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 4, (experts, rows, columns)).astype(np.uint8)
    parameters = generator.uniform(0, 1, (experts, rows, -(-columns // group), 2)).astype(np.float16).astype(np.float32)
    parameters[..., 1] *= -1
    blob = _core.encode_groupwise(codes, parameters.reshape(experts, rows, -1), group_size=group, rank=3)
    index = np.arange(columns) // group
    return blob, codes, codes * parameters[..., index, 0] + parameters[..., index, 1]


def test_round_trip_and_attributes():
    data, codes, values = tensor()
    blob = _core.GroupwiseBlob(data)
    assert (blob.experts, blob.rows, blob.columns, blob.rank) == (2, 6, 130, 3)
    assert (blob.bits, blob.group_size, blob.nbytes) == (2, 64, len(data))
    np.testing.assert_array_equal(blob.decode(), codes)
    np.testing.assert_array_equal(blob.dequantize(), values)
    blob.verify()
    assert "2 x 6 x 130" in repr(blob)


@pytest.mark.parametrize("isa", _core.available_isas())
def test_grouped_products(isa):
    data, _, values = tensor()
    blob = _core.GroupwiseBlob(data)
    x = np.random.default_rng(1).standard_normal((7, 130)).astype(np.float32)
    y = blob.matmul_grouped(x, np.array([0, 5, 7]), isa=isa)
    expected = np.concatenate([x[:5] @ values[0].T, x[5:] @ values[1].T])
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="columns"):
        blob.matmul_grouped(x[:, :64].copy(), np.array([0, 5, 7]))
    with pytest.raises(ValueError, match="offsets"):
        blob.matmul_grouped(x, np.array([0, 8, 7]))


def test_damage_is_a_typed_error():
    data, _, _ = tensor()
    for length in (0, 100, len(data) - 64):
        with pytest.raises(_core.CorruptionError):
            _core.GroupwiseBlob(data[:length].copy())
    damaged = data.copy()
    damaged[128:130] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    with pytest.raises(_core.CorruptionError, match="expert 0 row 0"):
        _core.GroupwiseBlob(damaged).verify()
    with pytest.raises(ValueError, match="code 4"):
        _core.encode_groupwise(np.full((1, 1, 4), 4, np.uint8), np.zeros((1, 1, 2), np.float32), group_size=64, rank=3)

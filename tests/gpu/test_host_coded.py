"""The GPU decoder of coded integers, compiled for the host, yields the core's codes."""

import subprocess

import numpy as np
import pytest
from emulation import build

from moepack import _core
from moepack.backends.gpu.coded import uploaded
from moepack.backends.gpu.coded_launch import HEADER_WORDS, SECTIONS
from moepack.errors import CorruptionError
from moepack.registry import open_tensor
from oracle.coded import dependent


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build("coded.cpp", tmp_path_factory.mktemp("host") / "coded")


def spread(shape, deviation, seed=0):
    """Codes whose deviation doubles from the first row to the last, with a few outliers."""
    random = np.random.default_rng(seed)
    rows = np.linspace(0.7, 1.4, shape[1])[:, None]
    codes = np.rint(random.standard_normal(shape) * rows * deviation).astype(np.int32)
    outliers = random.random(shape) < 0.003
    return np.where(outliers, random.integers(-(1 << 20), 1 << 20, shape), codes).astype(np.int32)


def packed(codes, stream_rows=None, symbols="plain", columns=None):
    one = np.ones((1, 1), np.float32)
    return _core.encode_coded(codes, one, ndim=3, stream_rows=stream_rows, symbols=symbols, columns=columns)


@pytest.mark.parametrize("way", ["plain", "plain beside dependent", "dependent"])
@pytest.mark.parametrize("segment_chunks", [1, 3])
@pytest.mark.parametrize("stream_rows", [16, 64])
@pytest.mark.parametrize(
    ("shape", "deviation"),
    [((1, 1, 1), 1), ((2, 17, 130), 0.3), ((1, 100, 777), 2), ((3, 40, 256), 9), ((1, 16, 1030), 4)],
)
def test_threads_decode_the_codes_of_the_core(program, tmp_path, shape, deviation, stream_rows, segment_chunks, way):
    codes, kernel = spread(shape, deviation), [] if way == "plain" else ["paths"]
    if way == "dependent":
        codes = dependent(codes.astype(np.int64)).astype(np.int32)
    experts, rows, columns = shape
    data = packed(codes, stream_rows, "dependent" if way == "dependent" else "plain")
    (tmp_path / "layout").write_bytes(_core.coded_to_device(data, segment_chunks).tobytes())
    printed = subprocess.run([program, tmp_path / "layout", *kernel], stdout=subprocess.PIPE, check=True).stdout
    found = np.frombuffer(printed, np.int32).reshape(experts, -1, 16 * -(-columns // 16))
    np.testing.assert_array_equal(found[:, :rows, :columns], codes)


@pytest.mark.parametrize("rows_of_columns", [0, 1, 2])
@pytest.mark.parametrize("paths", [False, True])
def test_layouts_open_as_their_format(paths, rows_of_columns):
    codes, random = spread((2, 70, 300), 3), np.random.default_rng(1)
    codes = dependent(codes.astype(np.int64)).astype(np.int32) if paths else codes
    columns = random.uniform(0.1, 9, (rows_of_columns, 300)).astype(np.float32) if rows_of_columns else None
    data = packed(codes, None, "dependent" if paths else "plain", columns)
    layout = uploaded(data)
    start, size = layout[: 8 * HEADER_WORDS].view(np.int64)[8:].reshape(-1, 2)[SECTIONS.index("columns")]
    found = layout[start : start + size].view(np.float32).reshape(-1, 304)
    assert len(found) == rows_of_columns and not found[:, 300:].any()
    assert columns is None or np.array_equal(found[:, :300], columns)
    np.testing.assert_array_equal(_core.coded_from_device(layout), data)
    np.testing.assert_array_equal(uploaded(layout), layout)
    assert open_tensor(layout).kind == "coded"
    np.testing.assert_array_equal(open_tensor(layout).dequantize(), _core.PackedTensor(data).dequantize())
    with pytest.raises(CorruptionError):
        open_tensor(layout[:500])

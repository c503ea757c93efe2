"""Encoded ternary tensors round-trip in every code, dtype, shape and file; other input is rejected."""

import copy
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import moepack
from moepack import (
    CorruptionError,
    DiskError,
    InvalidTensorError,
    LoadError,
    MoepackError,
    TernaryTensor,
    encode_ternary,
    quantize_ternary,
)
from ternary_cases import CODES, EMPTY, FLOATS, SHAPES, ternary, values


@st.composite
def ternaries(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    shape = tuple(draw(st.lists(st.integers(0, 70), min_size=2, max_size=2)))
    if draw(st.booleans()):
        shape = (draw(st.integers(0, 4)), *shape)
    codes, levels = ternary(shape, draw(st.floats(0, 1)), draw(st.integers(0, 2**32)))
    rows = codes.flatten(0, -2)
    for row in range(len(rows)):
        kind = draw(st.sampled_from(["random", "random", "zeros", "positive", "negative"]))
        if kind == "zeros":
            rows[row] = 0
        elif kind != "random":
            rows[row] = rows[row].abs() * (1 if kind == "positive" else -1)
    return rows.reshape(shape), levels


# ---- round trips


@settings(max_examples=120, deadline=None)
@given(given_=ternaries(), code=st.sampled_from(CODES))
def test_codes_come_back(given_: tuple[torch.Tensor, torch.Tensor], code: str) -> None:
    codes, levels = given_
    encoded = encode_ternary(codes, levels=levels, code=code)
    assert (encoded.shape, encoded.ndim, encoded.code) == (tuple(codes.shape), codes.ndim, code)
    assert encoded.decode().equal(codes) and encoded.decode().dtype == torch.int8
    assert encoded.levels.equal(levels)
    assert encoded.dequantize(torch.float32).equal(values(codes, levels))
    assert encoded.nonzeros == int(codes.count_nonzero())
    assert encoded.nbytes == len(encoded.data)
    encoded.verify()


@settings(max_examples=120, deadline=None)
@given(given_=ternaries(), dtype=st.sampled_from(FLOATS), code=st.sampled_from(CODES))
def test_values_come_back(given_: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype, code: str) -> None:
    weight = values(*given_).to(dtype)
    encoded = encode_ternary(weight, code=code)
    assert encoded.dequantize(dtype).equal(weight) and encoded.dequantize(dtype).dtype == dtype
    assert encoded.decode().equal(weight.sign().to(torch.int8))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("code", CODES)
def test_any_level_of_any_dtype_is_kept(dtype: torch.dtype, code: str) -> None:
    info = torch.finfo(dtype if dtype != torch.float64 else torch.float32)
    levels = [info.max, info.tiny, info.smallest_normal / 4, 1 + info.eps, 1 / 3, 1e-3]
    weight = torch.tensor([[0, -level, level, 0, level] for level in levels], dtype=torch.float32).to(dtype)
    assert encode_ternary(weight, code=code).dequantize(dtype).equal(weight)


def test_quantized_weights_encode_unchanged() -> None:
    weight = torch.randn(3, 40, 200, generator=torch.Generator().manual_seed(1))
    codes, levels = quantize_ternary(weight)
    encoded = encode_ternary(codes, levels=levels)
    assert encoded.decode().equal(codes) and encoded.levels.equal(levels)
    assert encoded == encode_ternary(encoded.dequantize())


def test_more_rows_than_a_chunk() -> None:
    codes, levels = ternary((2, 800, 700))
    weight = values(codes, levels)
    assert encode_ternary(weight).dequantize().equal(weight)


def test_negative_zeros_become_zeros() -> None:
    encoded = encode_ternary(torch.tensor([[-0.0, 0.0, 1.0], [-0.0, -0.0, -0.0]]))
    assert not torch.signbit(encoded.dequantize()).any()
    assert not torch.signbit(encode_ternary(encoded.decode(), levels=torch.full((2, 2), -0.0)).levels).any()


@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("code", CODES)
def test_empty(shape: tuple[int, ...], code: str) -> None:
    for encoded in (
        encode_ternary(torch.zeros(shape), code=code),
        encode_ternary(torch.zeros(shape, dtype=torch.int8), levels=torch.zeros((*shape[:-1], 2)), code=code),
    ):
        assert encoded.shape == shape and encoded.decode().shape == shape and encoded.dequantize().shape == shape
        assert encoded.bits_per_weight == float("inf") and encoded.nbytes > 0
        assert TernaryTensor(encoded.data) == encoded


# ---- inputs in every kind of memory


def test_numpy_and_odd_memory() -> None:
    codes, levels = ternary((6, 40))
    codes[:, 0], codes[:, 1] = 1, -1  # each level occurs, so that it can be found
    weight, expected = values(codes, levels), encode_ternary(codes, levels=levels)
    array, frozen = weight.numpy(), weight.numpy().copy()
    frozen.flags.writeable = False
    for same in (array, frozen, array.astype(">f4"), array.astype(np.float64), np.asfortranarray(array)):
        assert encode_ternary(same) == expected
    for same in (weight.T.contiguous().T, weight.repeat(1, 2)[:, :40], weight.clone().requires_grad_()):
        assert encode_ternary(same) == expected
    assert encode_ternary(array[::-1, ::-1]).dequantize().equal(weight.flip(0, 1))
    assert encode_ternary(codes.numpy(), levels=levels.numpy()) == expected
    assert encode_ternary(codes.T.contiguous().T, levels=levels.double().T.contiguous().T) == expected
    assert encode_ternary(torch.nn.Parameter(weight)) == expected


def test_input_is_left_alone() -> None:
    codes, levels = ternary((6, 40))
    weight = values(codes, levels)
    before = weight.clone()
    encoded = encode_ternary(weight)
    encoded.decode().fill_(0), encoded.dequantize().fill_(0), encoded.levels.fill_(0)
    assert weight.equal(before) and encoded.dequantize().equal(before)
    with pytest.raises(ValueError, match="read-only"):
        encoded.data[0] = 0


# ---- refusals


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0.0, 1.0], [1.0, 2.0]], r"row 1 holds 2 levels \(0 negative, 2 positive\).*quantize_ternary"),
        ([[-1.0, -2.0, 3.0, 0.0]], r"row 0 holds 4 levels \(2 negative, zero, 1 positive\).*quantize_ternary"),
        ([[0.0] * 3, [0.0, 1.0, float("nan")]], "row 1 holds nan"),
        ([[float("inf"), 1.0]], "row 0 holds inf"),
        ([[-float("inf")]], "row 0 holds -inf"),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_that_are_not_ternary(rows: list[list[float]], message: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        encode_ternary(torch.tensor(rows, dtype=dtype))
    assert isinstance(caught.value, InvalidTensorError)


def test_the_row_is_found_in_a_stack_and_behind_the_first_chunk() -> None:
    weight = torch.zeros(2, 1200, 1000)
    weight[1, 1100, :3] = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="row 1100 of matrix 1 holds 4 levels"):
        encode_ternary(weight)


@pytest.mark.parametrize("value", [1 / 3, 1e300, 1e-60])
def test_f64_levels_must_be_exact_in_f32(value: float) -> None:
    with pytest.raises(InvalidTensorError, match=r"row 0 holds .*float32 cannot represent"):
        encode_ternary(torch.tensor([[0.0, value]], dtype=torch.float64))
    with pytest.raises(InvalidTensorError, match=r"row 0 has the levels .*not exact in float32"):
        encode_ternary(torch.zeros(1, 1, dtype=torch.int8), levels=torch.tensor([[0.0, value]], dtype=torch.float64))


ONE = torch.zeros(2, 3, dtype=torch.int8)
PAIRS = torch.tensor([[-1.0, 1.0]] * 2)


@pytest.mark.parametrize(
    ("tensor", "levels", "message"),
    [
        (ONE, None, "need levels"),
        (ONE, PAIRS[:1], r"of shape \[2, 2\]"),
        (ONE, PAIRS[None], "of shape"),
        (ONE, PAIRS.int(), "torch.int32"),
        (ONE, PAIRS.flip(-1), r"row 0 has the levels \[1.0, -1.0\]: not \(negative, positive\)"),
        (ONE, torch.tensor([[-1.0, 1.0], [-1.0, float("nan")]]), "row 1 .*not finite"),
        (ONE, torch.tensor([[-1.0, 1.0], [-float("inf"), 1.0]]), "row 1 .*not finite"),
        (ONE + 2, PAIRS, "row 0 holds the code 2"),
        (ONE - 128, PAIRS, "row 0 holds the code -128"),
        (torch.zeros(3), None, r"shape \[3\]"),
        (torch.zeros(1, 1, 1, 1), None, "shape"),
        (torch.zeros(2, 2, dtype=torch.int32), None, "int32"),
        (torch.zeros(2, 2, dtype=torch.bool), None, "bool"),
        (torch.zeros(2, 2, dtype=torch.complex64), None, "complex64"),
        (torch.zeros(2, 2, device="meta"), None, "not dense"),
        (torch.zeros(2, 2).to_sparse(), None, "not dense"),
        (np.zeros((2, 2), np.longdouble), None, "float128"),
        (np.array([["a"]]), None, "dtype"),
    ],
)
def test_refused(tensor: Any, levels: Any, message: str) -> None:
    with pytest.raises(InvalidTensorError, match=message):
        encode_ternary(tensor, levels=levels)


def test_arguments_without_meaning() -> None:
    with pytest.raises(ValueError, match="unknown code 'zip'"):
        encode_ternary(torch.zeros(1, 1), code="zip")
    with pytest.raises(ValueError, match="levels belong to int8 codes"):
        encode_ternary(torch.zeros(1, 1), levels=torch.zeros(1, 2))
    for other in ([[0.0]], None, np.ma.masked_array([[0.0]], [[True]])):
        with pytest.raises(TypeError, match="must be a torch tensor or a numpy array"):
            encode_ternary(other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype must be"):
        encode_ternary(torch.zeros(1, 1)).dequantize(torch.int8)


# ---- size, equality, copies


def test_size_counts_everything() -> None:
    codes, levels = ternary((2048, 2080), zeros=0.885)
    encoded = encode_ternary(codes, levels=levels)
    assert encoded.bits_per_weight == 8 * encoded.nbytes / codes.numel()
    assert 16 / encoded.bits_per_weight > 24
    assert 16 / encode_ternary(codes, levels=levels, code="dict16").bits_per_weight > 20.5


def test_equality_is_about_values() -> None:
    codes, levels = ternary((5, 30))
    encoded = encode_ternary(codes, levels=levels)
    assert encoded == encode_ternary(codes, levels=levels, code="dict16")
    assert encoded == encode_ternary(codes, levels=levels.double())
    assert encoded != encode_ternary(codes[None], levels=levels[None])
    assert encoded != encode_ternary(codes.flip(0), levels=levels)
    assert encoded != encode_ternary(codes, levels=levels * 2)
    assert encoded != "something else"
    with pytest.raises(TypeError):
        hash(encoded)


def test_repr_copy_and_pickle() -> None:
    codes, levels = ternary((2, 5, 30))
    encoded = encode_ternary(codes, levels=levels)
    assert repr(encoded) == (
        f"TernaryTensor(shape=(2, 5, 30), code='fsv8', nbytes={encoded.nbytes}, "
        f"bits_per_weight={encoded.bits_per_weight:.4f})"
    )
    for same in (copy.copy(encoded), copy.deepcopy(encoded), pickle.loads(pickle.dumps(encoded))):
        assert same == encoded and same.data.tobytes() == encoded.data.tobytes()


# ---- files


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("shape", SHAPES + EMPTY)
def test_save_and_load(shape: tuple[int, ...], code: str, tmp_path: Path) -> None:
    codes, levels = ternary(shape)
    encoded, file = encode_ternary(codes, levels=levels, code=code), tmp_path / "a.safetensors"
    encoded.save(file)
    loaded = TernaryTensor.load(str(file))
    assert loaded == encoded and loaded.shape == shape and loaded.code == code
    assert loaded.data.tobytes() == encoded.data.tobytes() == load_file(file)["ternary"].tobytes()
    assert isinstance(loaded._data, np.memmap)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]
    loaded.save(file)
    assert TernaryTensor.load(file, verify=False) == encoded
    assert pickle.loads(pickle.dumps(loaded)) == encoded


def test_the_blob_is_aligned_in_the_file(tmp_path: Path) -> None:
    encode_ternary(torch.zeros(3, 4)).save(tmp_path / "a")
    start = 8 + struct.unpack("<Q", (tmp_path / "a").read_bytes()[:8])[0]
    assert start % 64 == 0 and (tmp_path / "a").read_bytes()[start:].startswith(b"MOEPTERN")
    assert TernaryTensor.load(tmp_path / "a").data.ctypes.data % 64 == 0


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    codes, levels = ternary((3, 50))
    encode_ternary(codes, levels=levels).save(tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_every_flipped_bit_is_found(saved: Path) -> None:
    raw = saved.read_bytes()
    for position in range(len(raw)):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << position % 8
        saved.write_bytes(damaged)
        with pytest.raises((CorruptionError, LoadError), match=r"a\.safetensors"):
            TernaryTensor.load(saved)


def test_every_truncation_is_found(saved: Path) -> None:
    raw = saved.read_bytes()
    for length in range(len(raw)):
        saved.write_bytes(raw[:length])
        with pytest.raises(CorruptionError, match=r"a\.safetensors"):
            TernaryTensor.load(saved)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), code=st.sampled_from(CODES))
def test_damaged_blobs_never_abort(data: st.DataObject, code: str) -> None:
    """A damaged blob is rejected or decodes to some values; it never crashes the process."""
    codes, levels = ternary((2, 9, 70), zeros=data.draw(st.sampled_from([0.3, 0.7, 0.95])))
    blob = np.array(encode_ternary(codes, levels=levels, code=code).data)
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        blob = blob[: data.draw(st.integers(0, len(blob)))]
    try:
        damaged = TernaryTensor(blob, file="f", tensor="t")
        damaged.decode(), damaged.dequantize(), damaged.verify()
    except CorruptionError as error:
        assert str(error).startswith("f: tensor 't': ") and (error.file, error.tensor) == ("f", "t")


def test_files_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="nothing: does not exist"):
        TernaryTensor.load(tmp_path / "nothing")
    with pytest.raises(LoadError, match="does not exist"):
        TernaryTensor.load(tmp_path)
    (tmp_path / "text").write_text("hello world, this is no tensor")
    with pytest.raises(CorruptionError, match="text"):
        TernaryTensor.load(tmp_path / "text")
    header: dict[str, Any] = {"ternary": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}
    for metadata, kind in (
        ({}, LoadError),
        ({"format": "moepack.ternary", "version": "2"}, LoadError),
        ({"format": "moepack.ternary", "version": "1"}, CorruptionError),
    ):
        text = json.dumps({"__metadata__": metadata, **header}).encode()
        (tmp_path / "other").write_bytes(struct.pack("<Q", len(text)) + text)
        with pytest.raises(kind, match="other"):
            TernaryTensor.load(tmp_path / "other")


def test_blobs_of_a_wrong_dtype_or_shape() -> None:
    blob = encode_ternary(torch.zeros(1, 1)).data
    for other in (blob.astype(np.int64), blob.reshape(2, -1), np.repeat(blob, 2)[::2], [1, 2], None):
        with pytest.raises((TypeError, ValueError)):
            TernaryTensor(other)  # type: ignore[arg-type]


def test_a_refusing_disk_leaves_nothing(tmp_path: Path) -> None:
    encoded = encode_ternary(torch.zeros(3, 4))
    with pytest.raises(DiskError, match="missing/a"):
        encoded.save(tmp_path / "missing/a")
    (tmp_path / "taken").mkdir()
    with pytest.raises(DiskError, match="taken"):
        encoded.save(tmp_path / "taken")
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    encode_ternary(torch.ones(3, 4)).save(file)
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MoepackError, match="No space left") as caught:
        encode_ternary(torch.zeros(3, 4)).save(file)
    assert isinstance(caught.value, DiskError) and file.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_threads_do_not_change_bytes() -> None:
    from moepack import _core

    codes, levels = ternary((3, 100, 200))
    before = _core.threads()
    try:
        blobs = []
        for count in (1, 3):
            _core.set_threads(count)
            blobs.append(encode_ternary(codes, levels=levels).data.tobytes())
    finally:
        _core.set_threads(before)
    assert blobs[0] == blobs[1]


def test_exported() -> None:
    assert moepack.encode_ternary is encode_ternary and moepack.TernaryTensor is TernaryTensor

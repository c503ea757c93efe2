"""Entropy-coded group-wise tensors: the core beside an independent reader, and packed models that hold them."""

import numpy as np
import pytest
import torch

import moepack
from moepack import CorruptionError, _core
from moepack.format import PackedDirectory
from moepack.methods import Qmoe
from moepack.methods.qmoe.forms import GroupwiseForm
from moepack.pipeline import compress
from moepack.registry import open_tensor
from oracle import coded_groupwise as oracle


def packed(shape=(2, 35, 200), seed=0, skew=True, group=64):
    """A plain blob; skewed codes shrink when they are coded."""
    rng = np.random.default_rng(seed)
    share = [0.1, 0.4, 0.4, 0.1] if skew else [0.25] * 4
    codes = rng.choice(4, shape, p=share).astype(np.uint8)
    groups = -(-shape[2] // group)
    scales, offsets = (rng.integers(-99, 99, (*shape[:2], groups)).astype(np.float32) / 256 for _ in range(2))
    return _core.encode_groupwise(codes, scales, offsets, bits=2, group_size=group, ndim=3)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 35, 200), (0, 3, 3), (2, 0, 3), (3, 17, 33)])
def test_an_independent_reader_gets_the_plain_bytes_back(shape):
    plain = packed(shape)
    data = _core.code_groupwise(plain)
    assert oracle.expand(data.tobytes()) == plain.tobytes()
    blob = _core.PackedTensor(data)
    blob.verify()
    assert _core.expand_groupwise(data).tobytes() == plain.tobytes()
    same = _core.PackedTensor(plain)
    assert (*blob.shape, blob.ndim) == (*shape, 3)
    assert blob.details() == same.details()
    assert same.details() == {"bits": 2, "group_size": 64, "symmetric": False, "dtype": "float16"}
    for name in ("scales", "offsets"):
        np.testing.assert_array_equal(blob.parameters(name), same.parameters(name))
    np.testing.assert_array_equal(blob.decode(), same.decode())
    np.testing.assert_array_equal(blob.dequantize(), same.dequantize())


@pytest.mark.parametrize("mode", ["exact", "int8"])
def test_products_are_those_of_the_plain_tensor(mode):
    plain = packed()
    blob = _core.PackedTensor(_core.code_groupwise(plain))
    x = np.random.default_rng(1).standard_normal((7, 200)).astype(np.float32)
    offsets = np.array([0, 5, 7])
    for isa in _core.available_isas():
        wanted = _core.PackedTensor(plain).matmul_grouped(x, offsets, mode, isa)
        np.testing.assert_array_equal(blob.matmul_grouped(x, offsets, mode, isa), wanted)


def test_skewed_codes_shrink_and_even_ones_need_not():
    plain = packed((1, 256, 1024), group=256)
    assert _core.code_groupwise(plain).nbytes < 0.92 * plain.nbytes
    even = packed((1, 16, 64), skew=False)
    assert _core.code_groupwise(even).nbytes > even.nbytes


def test_damage_is_found_or_harmless():
    data = _core.code_groupwise(packed((1, 16, 64)))
    rng = np.random.default_rng(2)
    for place in rng.integers(0, len(data), 300):
        bad = data.copy()
        bad[place] ^= 1 << int(rng.integers(8))
        try:
            blob = _core.PackedTensor(bad)
            assert blob.decode().shape == blob.shape
        except _core.CorruptionError:
            continue
    for length in (0, 7, 100, 575, len(data) - 64):
        with pytest.raises(_core.CorruptionError):
            _core.PackedTensor(data[:length].copy())
        if length >= 8:
            with pytest.raises(CorruptionError):
                open_tensor(data[:length].copy())


@pytest.mark.parametrize("skew", [True, False])
def test_the_smaller_form_is_stored(skew):
    rng = np.random.default_rng(3)
    codes = torch.from_numpy(rng.choice(4, (2, 64, 256), p=[0.1, 0.4, 0.4, 0.1] if skew else [0.25] * 4)).byte()
    parameters = torch.from_numpy(rng.integers(1, 2000, (2, 64, 8)) / 2048).float().half().float()
    form = GroupwiseForm(64)
    stored = form.pack(codes, parameters)
    assert stored.kind == ("coded-groupwise" if skew else "groupwise")
    assert stored.data.nbytes <= form.bound((2, 64, 256))
    values = torch.from_numpy(_core.PackedTensor(stored.data).dequantize())
    torch.testing.assert_close(values, form.values(codes, parameters), rtol=0, atol=0)


def test_a_model_of_coded_experts_runs_like_its_plain_twin(mixtral, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Line {i} of a text that nobody wrote, {i * i} words long.\n" for i in range(200)))

    def model(name, coded):
        with monkeypatch.context() as patch:
            if not coded:
                patch.setattr(_core, "code_groupwise", lambda blob: np.append(blob, blob))
            compress(mixtral, tmp_path / name, method=Qmoe(str(text), samples=4, sequence_length=64, bits="2"))
        assert moepack.verify(tmp_path / name).ok
        kinds = {record.kind for record in PackedDirectory.open(tmp_path / name).manifest.packed().values()}
        return kinds, moepack.load(tmp_path / name, dtype=torch.float32)

    (_, plain), (kinds, coded) = model("plain", False), model("coded", True)
    assert "coded-groupwise" in kinds
    ids = torch.arange(20, 50)[None]
    with torch.inference_mode():
        torch.testing.assert_close(coded(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-4, atol=1e-4)

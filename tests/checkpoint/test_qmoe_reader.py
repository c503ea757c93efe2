"""Reading the QMoE authors' format."""

import json

import pytest
import torch

from moepack.checkpoint.qmoe import QmoeCheckpoint, read_matrix
from moepack.errors import CheckpointError, UnsupportedModelError
from qmoe_format import original_form


def quantized(rows=7, columns=70, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pick = torch.rand(rows, columns, generator=generator)
    levels = torch.rand(rows, 2, generator=generator).bfloat16().float() + 0.5
    low, high = -levels[:, :1], levels[:, 1:]
    return torch.where(pick < 0.1, low, torch.where(pick > 0.9, high, torch.zeros(()))).bfloat16()


@pytest.mark.parametrize("columns", [2, 70, 71])
@pytest.mark.parametrize("code", ["fsv8", "dict16"])
def test_matrices_come_back_exactly(columns, code):
    weights = quantized(columns=columns)
    tensor = read_matrix(*original_form(weights), columns, code=code)
    assert tensor.code == code and torch.equal(tensor.dequantize(torch.float32), weights.float())


def test_rows_without_one_sign_are_healed():
    weights = quantized()
    weights[0] = weights[0].clamp(max=0)  # its zeros are stored as the "maximum"
    weights[1] = weights[1].clamp(min=0)
    weights[2] = 0
    weights[3] = -0.5  # minimum and maximum are the same negative value
    tensor = read_matrix(*original_form(weights), 70)
    assert torch.equal(tensor.dequantize(torch.float32), weights.float())
    codes = tensor.decode()
    assert (codes[2] == 0).all() and (codes[0] <= 0).all()


def test_damage_is_a_typed_error_that_names_the_matrix():
    words, offsets, levels = original_form(quantized())
    for broken in (
        (words[:-1], offsets, levels),
        (words, offsets.flip(0), levels),
        (words, offsets, levels[:-1]),
        (words.int(), offsets, levels),
        (torch.zeros_like(words), offsets, levels),
        (words, offsets, levels * float("nan")),
    ):
        with pytest.raises(CheckpointError, match=r"a\.wi"):
            read_matrix(*broken, 70, name="a.wi")
    with pytest.raises(CheckpointError, match="do not decode"):
        read_matrix(words, offsets, levels, 72, name="a.wi")


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"d_model": 70, "d_ff": 7, "model_type": "switch_transformers"}))
    torch.save({"shared.weight": torch.ones(3, 70).bfloat16()}, tmp_path / "noexp.pt")
    experts = {}
    for projection, weights in {"wi": quantized(), "wo": quantized(70, 7)}.items():
        name = f"encoder.block.1.layer.1.mlp.experts.expert_0.{projection}"
        parts = zip(("w_comp", "row_off", "ter_minmax"), original_form(weights), strict=True)
        experts |= {f"{name}.{part}": tensor for part, tensor in parts}
        experts[f"{name}.weight"] = torch.zeros(0).bfloat16()
    torch.save(experts, tmp_path / "exp00.pt")
    torch.save({}, tmp_path / "sizes.pt")
    return tmp_path


def test_a_directory_opens(directory):
    checkpoint = QmoeCheckpoint.open(directory)
    assert [name.rpartition(".")[2] for name in checkpoint.matrices()] == ["wi", "wo"]
    assert checkpoint.dense() == ("shared.weight",)
    wi, wo = (checkpoint.matrix(name) for name in checkpoint.matrices())
    assert torch.equal(wi.dequantize(torch.float32), quantized().float())
    assert torch.equal(wo.dequantize(torch.float32), quantized(70, 7).float())
    assert torch.equal(checkpoint.tensor("shared.weight"), torch.ones(3, 70).bfloat16())
    with pytest.raises(CheckpointError, match="no such tensor"):
        checkpoint.matrix("encoder.wi")


def test_directories_that_are_something_else(directory, tmp_path):
    (directory / "exp00.pt").write_bytes(b"not a pickle")
    with pytest.raises(CheckpointError, match="exp00"):
        QmoeCheckpoint.open(directory)
    (directory / "exp00.pt").unlink()
    with pytest.raises(UnsupportedModelError):
        QmoeCheckpoint.open(directory)
    (directory / "noexp.pt").unlink()
    with pytest.raises(CheckpointError, match="noexp"):
        QmoeCheckpoint.open(directory)

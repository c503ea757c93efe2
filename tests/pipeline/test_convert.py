"""Conversion of models in the QMoE authors' format to packed directories, with identical values."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM
from typer.testing import CliRunner

import moepack
from moepack.cli import app
from moepack.errors import CheckpointError, InvalidTensorError, OutputExistsError, UnsupportedModelError
from moepack.format import PackedDirectory
from moepack.methods.qmoe.ternary import Ternary
from moepack.pipeline import convert
from moepack.registry import open_tensor
from moepack.solvers.rtn import quantize_ternary
from qmoe_format import original_form


@pytest.fixture(scope="module")
def models(switch, tmp_path_factory):
    """(directory in the authors' format, the same ternary model in the hub's format)."""
    root = tmp_path_factory.mktemp("published")
    published, ternary = root / "published", root / "ternary"
    published.mkdir()
    shutil.copytree(switch, ternary)
    tensors, experts, dense = load_file(switch / "model.safetensors"), {}, {}
    for name, weights in tensors.items():
        if ".experts." not in name:
            dense[name] = weights
            continue
        codes, levels = quantize_ternary(weights)
        low, high = levels[:, :1], levels[:, 1:]
        values = torch.where(codes < 0, low, torch.where(codes > 0, high, 0.0)).bfloat16()
        parts = zip(("w_comp", "row_off", "ter_minmax"), original_form(values), strict=True)
        layer = name.split(".experts.")[0]
        group = experts.setdefault(layer, {})
        group |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts}
        tensors[name] = values
    for number, group in enumerate(experts.values()):
        torch.save(group, published / f"exp{number:02}.pt")
    torch.save(dense, published / "noexp.pt")
    torch.save({}, published / "sizes.pt")
    shutil.copy(switch / "config.json", published)
    save_file(tensors, ternary / "model.safetensors", {"format": "pt"})
    return published, ternary


def dequantized(directory):
    packed = PackedDirectory.open(directory)
    return {name: open_tensor(packed.tensor(name)).dequantize("float32") for name in packed.manifest.packed()}


@pytest.mark.parametrize("code", ["fsv8", "dict16"])
def test_a_published_model_keeps_every_value_and_runs(models, code, switch, tmp_path):
    published, ternary = models
    report = convert(published, tmp_path / "out", original=switch, code=code)
    assert report.method == "qmoe" and moepack.verify(tmp_path / "out").ok
    tensors = load_file(ternary / "model.safetensors")
    for module, values in dequantized(tmp_path / "out").items():
        block, _, projection = module.partition(".experts.expert_0.")
        for expert, matrix in enumerate(values):
            wanted = tensors[f"{block}.experts.expert_{expert}.{projection}"]
            assert torch.equal(torch.from_numpy(matrix), wanted.float())
    model = moepack.load(tmp_path / "out", dtype=torch.float32)
    reference = AutoModelForSeq2SeqLM.from_pretrained(ternary, dtype=torch.float32).eval()
    ids = torch.arange(40, 60)[None]
    with torch.inference_mode():
        found, wanted = (m(input_ids=ids, decoder_input_ids=ids[:, :5]).logits for m in (model, reference))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_dense_tensors_come_from_the_original_where_they_are_not_published(models, switch, tmp_path):
    published = tmp_path / "published"
    shutil.copytree(models[0], published)
    dense = torch.load(published / "noexp.pt")
    lost = "shared.weight"
    kept = dense.pop(lost)
    torch.save(dense, published / "noexp.pt")
    convert(published, tmp_path / "out", original=switch)
    found = next(
        load_file(file)[lost] for file in sorted((tmp_path / "out").glob("*.safetensors")) if lost in load_file(file)
    )
    assert torch.equal(found, kept)


def test_the_original_may_be_a_configuration_alone(models, switch, tmp_path):
    shutil.copytree(switch, tmp_path / "original", ignore=shutil.ignore_patterns("*.safetensors"))
    convert(models[0], tmp_path / "out", original=tmp_path / "original")
    convert(models[0], tmp_path / "same", original=switch)
    first, second = dequantized(tmp_path / "out"), dequantized(tmp_path / "same")
    assert first.keys() == second.keys() and all((first[name] == second[name]).all() for name in first)


def test_another_model_is_refused(models, switch, mixtral, tmp_path):
    shutil.copytree(switch, tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "d_ff": 128}))
    with pytest.raises(CheckpointError, match="d_ff is 128, but 96 in the published one"):
        convert(models[0], tmp_path / "out", original=tmp_path / "other")
    with pytest.raises(UnsupportedModelError, match="'mixtral', not 'switch_transformers'"):
        convert(models[0], tmp_path / "out", original=mixtral)
    with pytest.raises(UnsupportedModelError, match="moepack convert"):
        moepack.compress(models[0], tmp_path / "out", method=Ternary())
    with pytest.raises(CheckpointError, match=r"noexp\.pt"):
        convert(switch, tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputExistsError):
        convert(models[0], tmp_path / "out", original=switch)


def test_damage_is_named(models, switch, tmp_path):
    published = tmp_path / "published"
    shutil.copytree(models[0], published)
    experts = torch.load(published / "exp01.pt")
    name = next(name for name in experts if name.endswith("expert_2.wi.w_comp"))
    words = experts[name]
    experts[name] = torch.zeros_like(words)
    torch.save(experts, published / "exp01.pt")
    with pytest.raises(CheckpointError, match=r"expert_2\.wi"):
        convert(published, tmp_path / "out", original=switch)
    experts[name] = words
    levels = experts[name.replace("w_comp", "ter_minmax")]
    levels.view(-1, 2)[:, 0] = levels.view(-1, 2)[:, 1] / 2  # two positive levels
    torch.save(experts, published / "exp01.pt")
    with pytest.raises(InvalidTensorError, match=r"expert_2\.wi.*two levels of one sign"):
        convert(published, tmp_path / "other", original=switch)
    torch.save({n: t for n, t in experts.items() if "expert_2.wi" not in n}, published / "exp01.pt")
    with pytest.raises(CheckpointError):
        convert(published, tmp_path / "third", original=switch)


def test_the_command_line_converts(models, switch, tmp_path):
    arguments = ["convert", str(models[0]), str(tmp_path / "out"), "--original", str(switch), "-q"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and "bits per weight" in done.output
    assert CliRunner().invoke(app, [*arguments[:2], str(tmp_path / "o"), "--code", "morse"]).exit_code == 2

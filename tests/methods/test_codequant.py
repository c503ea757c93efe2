"""The method codequant: from checkpoint to running model, resumed runs, bad input."""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import moepack
import packed_support as support
from moepack.calibration.load import load_samples
from moepack.checkpoint import Checkpoint
from moepack.cli import app
from moepack.errors import CalibrationError, InvalidTensorError, ResumeError
from moepack.export import export
from moepack.format import PackedDirectory
from moepack.methods import CodeQuant
from moepack.methods.books import packed_bytes
from moepack.pipeline import compress
from stream_support import last_states, record_streams

DECODERS = ("mixtral", "qwen3_moe", "deepseek_v2")


def method(text, **settings):
    return CodeQuant(
        **{"calibration": str(text), "samples": 6, "sequence_length": 64, "steps": 2, "rotation": "none", **settings}
    )


def contents(directory):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(directory.iterdir())}


@pytest.mark.parametrize("architecture", DECODERS)
@pytest.mark.parametrize("activation_bits", [16, 8])
def test_every_architecture_packs_verifies_and_runs(tiny_checkpoint, architecture, activation_bits, text, tmp_path):
    source = tiny_checkpoint(architecture)
    report = compress(source, tmp_path / "out", method=method(text, activation_bits=activation_bits))
    assert report.method == "codequant" and report.dense_weights > 0
    assert moepack.verify(tmp_path / "out").ok
    records = PackedDirectory.open(tmp_path / "out").manifest.packed()
    for record in records.values():
        assert record.kind == "codebook" and record.details["bits"] == 4
        falling = record.details["objective"]
        exact = record.shape[-1] <= 16
        assert len(falling) == 3 and (exact or falling[0] > falling[-1])
        assert sorted(falling, reverse=True) == falling and falling[-1] >= 0
    roles = {record.details.get("role") for record in records.values()}
    assert {"attention", None} <= roles
    model = moepack.load(tmp_path / "out", dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.arange(20, 50)[None]
    with torch.inference_mode():
        expected, found = original(input_ids=ids).logits, model(input_ids=ids).logits
    assert (found - expected).square().mean().sqrt() < 0.3 * expected.std()
    assert model.generate(ids[:, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"activation_bits": 8, "weight_bits": 3},
        {"activation_bits": 4},
        {"drift": 0.0, "block": 128},
        {"rotation": "random"},
    ],
)
def test_the_packed_model_computes_the_states_of_calibration(tiny_checkpoint, settings, text, tmp_path, monkeypatch):
    """The states after the last block, computed by the packed model, equal those of the compressed stream."""
    source = tiny_checkpoint("deepseek_v2")
    chosen = method(text, **settings)
    streams = record_streams(monkeypatch)
    compress(source, tmp_path / "out", method=chosen)
    ids = load_samples(Checkpoint.open(source), text, 6, 64).inputs
    mode = None if "activation_bits" in settings else "exact"
    difference = (streams[0].hidden.tokens - last_states(tmp_path / "out", ids, mode)).abs()
    # A rounded activation may fall to either side, and moves the states of its token.
    assert (difference > 1e-3).float().mean() < (0.02 if "activation_bits" in settings else 1e-9)


def test_two_runs_and_any_resume_give_the_same_bytes(tiny_checkpoint, text, tmp_path, monkeypatch):
    source = tiny_checkpoint("deepseek_v2")
    compress(source, tmp_path / "whole", method=method(text))
    for _ in range(3):
        with support.stopping_after_each_shard(), pytest.raises(KeyboardInterrupt):
            compress(source, tmp_path / "pieces", method=method(text))
    with pytest.raises(ResumeError):
        compress(source, tmp_path / "pieces", method=method(text, weight_bits=3))
    report = compress(source, tmp_path / "pieces", method=method(text))
    assert report.resumed_weights > 0
    assert contents(tmp_path / "whole") == contents(tmp_path / "pieces")


def test_steps_help_the_models_outputs(mixtral, text, tmp_path):
    rows = {"plain": {"steps": 0, "weighted": False}, "fitted": {"steps": 3}}
    for name, settings in rows.items():
        compress(mixtral, tmp_path / name, method=method(text, weight_bits=2, **settings))
    samples = load_samples(Checkpoint.open(mixtral), text, 6, 64)
    models = {name: moepack.load(tmp_path / name, dtype=torch.float32) for name in rows}
    models["original"] = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32)
    with torch.inference_mode():
        logits = {name: model(input_ids=samples.inputs).logits for name, model in models.items()}
    error = {name: (logits[name] - logits["original"]).square().sum() for name in rows}
    assert error["fitted"] < 0.8 * error["plain"], error


@pytest.mark.parametrize("shape", [(1, 16, 128), (3, 21, 300), (2, 5, 1)])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("block", [None, 128, 256])
@pytest.mark.parametrize("activation_bits", [0, 4])
def test_sizes_are_known_in_advance(shape, bits, block, activation_bits):
    tensor = moepack.CodebookTensor.quantize(torch.randn(shape), bits, block, activation_bits=activation_bits)
    assert tensor.nbytes == packed_bytes(shape, bits, block, activation_bits)


def test_an_expert_that_no_token_reaches_is_named(mixtral, text, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(mixtral, source)
    weights = load_file(source / "model.safetensors")
    router = weights["model.layers.0.block_sparse_moe.gate.weight"]
    router[3] = 0
    router[:3] = router[:3].abs() + 1
    weights["model.layers.0.post_attention_layernorm.weight"].zero_()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    report = compress(source, tmp_path / "out", method=method(text))
    assert any("no calibration token reached" in note for note in report.notes)
    assert moepack.verify(tmp_path / "out").ok


def test_bad_weights_text_and_settings_are_refused(mixtral, text, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(mixtral, source)
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    weights[name][3, 4] = torch.nan
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((InvalidTensorError, CalibrationError)):
        compress(source, tmp_path / "out", method=method(text))
    with pytest.raises(InvalidTensorError, match="o_proj"):
        compress(source, tmp_path / "rotated", method=method(text, rotation="random"))
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(CalibrationError):
        compress(mixtral, tmp_path / "out", method=method(tmp_path / "short.txt"))
    for settings in (
        {"weight_bits": 5},
        {"activation_bits": 6},
        {"block": 100},
        {"block": "column"},
        {"dense": "router"},
        {"steps": -1},
        {"assignment": "best"},
        {"damping": 0},
        {"drift": 3},
        {"rotation": "left"},
        {"rotation_steps": -1},
        {"start": "zero"},
        {"hadamard": True},
    ):
        with pytest.raises(ValueError):
            method(text, **settings)


def test_drift_is_undone_unless_four_bits_of_activations_would_pass_for_it(text):
    assert [method(text, activation_bits=bits).settings["drift"] for bits in (16, 8, 4)] == [0.0, 0.5, 0.0]
    assert method(text, activation_bits=4, drift=0.5).settings["drift"] == 0.5


def test_the_command_line_and_export(mixtral, text, tmp_path):
    arguments = ["compress", str(mixtral), str(tmp_path / "out"), "--method", "codequant", "--calibration", str(text)]
    arguments += ["--samples", "4", "--sequence-length", "64", "--weight-bits", "3", "--activation-bits", "8"]
    done = CliRunner().invoke(app, [*arguments, "--block", "128", "--steps", "1", "--quiet"])
    assert done.exit_code == 0, done.output
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "out")], env={"COLUMNS": "200"})
    assert "codebook3" in shown.output and "A8" in shown.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "moepack"
    export(tmp_path / "out", tmp_path / "bf16", "bf16")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.float32)
    packed = moepack.load(tmp_path / "out", dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(mixtral)("Line 7 of a text", return_tensors="pt").input_ids
    with torch.inference_mode():
        a, b = plain(input_ids=ids).logits, packed(input_ids=ids).logits
    assert (a - b).square().mean().sqrt() < 0.05 * a.std()

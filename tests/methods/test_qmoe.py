import hashlib
import json
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from typer.testing import CliRunner

import moepack
import packed_support as support
from fork_support import run_script
from moepack.backends.threads import set_threads
from moepack.calibration.linears import LinearsRun
from moepack.calibration.load import load_samples
from moepack.checkpoint import Checkpoint, describe
from moepack.checkpoint.dense import EMBEDDING
from moepack.cli import app
from moepack.errors import CalibrationError, InvalidTensorError, ResumeError
from moepack.format import PackedDirectory
from moepack.format.balance import balance_of
from moepack.integrations.loading import open_model
from moepack.methods import Qmoe, create
from moepack.methods.coverage import coverage_notes
from moepack.methods.qmoe import PUBLISHED
from moepack.methods.qmoe.forms import GroupwiseForm
from moepack.methods.qmoe.ternary import Ternary
from moepack.pipeline import compress
from moepack.pipeline.journal import Workspace
from moepack.registry import open_tensor
from moepack.solvers.energy import energy_factors
from moepack.solvers.gptq import gptq
from moepack.solvers.grids import TernaryGrid
from stream_support import last_states, record_streams

ARCHITECTURES = ("mixtral", "qwen3_moe", "deepseek_v2", "switch_transformers")


def method(text, **settings):
    return Qmoe(**{"calibration": str(text), "samples": 6, "sequence_length": 64, **settings})


def contents(directory):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(directory.iterdir())}


@pytest.mark.parametrize("bits", ["ternary", "2"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_packs_verifies_and_runs(tiny_checkpoint, architecture, bits, text, tmp_path):
    report = compress(tiny_checkpoint(architecture), tmp_path / "out", method=method(text, bits=bits))
    assert report.method == "qmoe" and report.bits_per_weight < 4
    assert moepack.verify(tmp_path / "out").ok
    model = moepack.load(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(20, 50)[None]
    extra = {"decoder_input_ids": ids[:, :5]} if architecture == "switch_transformers" else {}
    with torch.inference_mode():
        assert torch.isfinite(model(input_ids=ids, **extra).logits).all()


@pytest.mark.parametrize("bits", ["ternary", "2"])
def test_the_packed_values_give_calibration_s_inputs_of_the_next_block(mixtral, bits, text, tmp_path, monkeypatch):
    """The states after the last block, computed by the packed model, equal those of the compressed stream."""
    chosen = method(text, bits=bits, routing="compressed")
    streams = record_streams(monkeypatch)
    compress(mixtral, tmp_path / "out", method=chosen)
    states = last_states(tmp_path / "out", load_samples(Checkpoint.open(mixtral), text, 6, 64).inputs, "exact")
    torch.testing.assert_close(streams[0].hidden.tokens, states, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bits", ["ternary", "2"])
def test_calibration_beats_rounding_on_the_models_outputs(mixtral, bits, text, tmp_path):
    compress(mixtral, tmp_path / "rtn", method=method(text, bits=bits, solver="rtn"))
    compress(mixtral, tmp_path / "qmoe", method=method(text, bits=bits))
    samples = load_samples(Checkpoint.open(mixtral), text, 6, 64)
    models = {name: moepack.load(tmp_path / name, dtype=torch.float32) for name in ("rtn", "qmoe")}
    models["original"] = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32)
    with torch.inference_mode():
        logits = {name: model(input_ids=samples.inputs).logits for name, model in models.items()}
    error = {name: (logits[name] - logits["original"]).square().sum() for name in ("rtn", "qmoe")}
    assert error["qmoe"] < 0.9 * error["rtn"], error


def test_two_runs_and_any_resume_give_the_same_bytes(qwen3_moe, text, tmp_path, monkeypatch):
    compress(qwen3_moe, tmp_path / "whole", method=method(text))
    for _ in range(3):
        with support.stopping_after_each_shard(), pytest.raises(KeyboardInterrupt):
            compress(qwen3_moe, tmp_path / "pieces", method=method(text))
    report = compress(qwen3_moe, tmp_path / "pieces", method=method(text))
    assert report.resumed_weights > 0
    assert contents(tmp_path / "pieces") == contents(tmp_path / "whole")


KILLED = """
import os, signal, sys
from moepack.methods import Qmoe
from moepack.pipeline import compress
from moepack.backends.threads import set_threads
from moepack.pipeline.journal import Workspace
append = Workspace.append
def die(self, shard):
    append(self, shard)
    os.kill(os.getpid(), signal.SIGKILL)
Workspace.append = die
set_threads(int(sys.argv[4]))
rate = float(sys.argv[5]) if sys.argv[5:] else None
compress(sys.argv[1], sys.argv[2], method=Qmoe(sys.argv[3], samples=6, sequence_length=64, bits_per_weight=rate))
"""


@pytest.mark.parametrize("rate", [None, 1.8])
def test_kill_9_between_blocks_and_resume_is_byte_identical(mixtral, rate, text, tmp_path):
    compress(mixtral, tmp_path / "whole", method=method(text, bits_per_weight=rate))
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    arguments = [mixtral, tmp_path / "out", text, torch.get_num_threads(), *([] if rate is None else [rate])]
    died = run_script(script, *arguments, folder=tmp_path)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert (tmp_path / "out.partial").exists() and not (tmp_path / "out").exists()
    report = compress(mixtral, tmp_path / "out", method=method(text, bits_per_weight=rate))
    assert report.resumed_weights == report.expert_weights // 2
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_resume_on_other_threads_keeps_finished_layers_and_is_valid(mixtral, text, tmp_path, monkeypatch):
    """The bytes belong to one number of threads; another number may change the last bits of sums and is accepted."""
    append, threads = Workspace.append, torch.get_num_threads()

    def die(self, shard):
        append(self, shard)
        raise KeyboardInterrupt

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Workspace, "append", die)
            with pytest.raises(KeyboardInterrupt):
                compress(mixtral, tmp_path / "out", method=method(text), threads=1)
        before = contents(tmp_path / "out.partial")
        before.pop("journal.jsonl")
        report = compress(mixtral, tmp_path / "out", method=method(text), threads=2)
    finally:
        set_threads(threads)
    assert report.resumed_weights > 0 and before.items() <= contents(tmp_path / "out").items()
    assert moepack.verify(tmp_path / "out").ok


def test_another_calibration_set_is_another_job(mixtral, text, tmp_path, monkeypatch):
    append = Workspace.append

    def die(self, shard):
        append(self, shard)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "append", die)
        with pytest.raises(KeyboardInterrupt):
            compress(mixtral, tmp_path / "out", method=method(text))
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().upper())
    with pytest.raises(ResumeError, match="calibration_sha256"):
        compress(mixtral, tmp_path / "out", method=method(other))


def test_coverage_is_in_the_manifest_and_in_the_report(mixtral, text, tmp_path):
    report = compress(mixtral, tmp_path / "out", method=method(text, samples=1, minimum_tokens=10_000))
    manifest = PackedDirectory.open(tmp_path / "out").manifest
    first = manifest.tensors["model.layers.0.mlp.experts.gate_proj"].details
    assert sum(first["tokens"]) == 2 * 64 and len(first["tokens"]) == 4
    assert "tokens" not in manifest.tensors["model.layers.0.mlp.experts.down_proj"].details
    assert any(note.startswith("model.layers.0.mlp.experts: fewer than 10000") for note in report.notes)
    assert len(manifest.settings["calibration_sha256"]) == 64


def test_experts_without_tokens_are_rounded_and_named(tiny_checkpoint, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("a" * 64)  # one token, so at most top-k experts of a layer see any
    report = compress(tiny_checkpoint("qwen3_moe"), tmp_path / "out", method=method(file, samples=1))
    assert any("no calibration token reached" in note for note in report.notes)
    assert moepack.verify(tmp_path / "out").ok
    record = PackedDirectory.open(tmp_path / "out").manifest.tensors["model.layers.0.mlp.experts.gate_proj"]
    unseen = [str(e) for e, count in enumerate(record.details["tokens"]) if count == 0]
    assert unseen and all(record.details["rounded"][e] == "no token reached the expert" for e in unseen)


def test_experts_without_tokens_are_almost_empty_at_a_rate_and_named(tiny_checkpoint, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("a" * 64)
    chosen = method(file, samples=1, bits_per_weight=1.25)
    report = compress(tiny_checkpoint("qwen3_moe"), tmp_path / "out", method=chosen)
    assert any("no calibration token" in note and "stored with almost no bits" in note for note in report.notes)
    assert not any("rounded to nearest" in note for note in report.notes)
    packed = PackedDirectory.open(tmp_path / "out")
    name = "model.layers.0.mlp.experts.gate_proj"
    unseen = [e for e, count in enumerate(packed.manifest.tensors[name].details["tokens"]) if count == 0]
    weights = open_tensor(packed.tensor(name)).dequantize("float32")
    density = (weights != 0).mean((1, 2))
    seen = [e for e in range(len(density)) if e not in unseen]
    assert unseen and density[unseen].max() < 0.2 * density[seen].max()


def test_notes_name_a_dozen_and_count_the_rest():
    layers = {"l": {"tokens": [0] * 15 + [3, 900], "rounded": {"16": "the Hessian is not finite"}}}
    assert coverage_notes(layers, 64) == (
        "l: no calibration token reached experts 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 3 more; rounded to nearest.",
        "l: fewer than 64 calibration tokens reached expert 15.",
        "l: expert 16 rounded to nearest: the Hessian is not finite.",
    )


def test_switch_packs_with_span_corruption_and_generates(switch, text, tmp_path):
    compress(switch, tmp_path / "out", method=method(text))
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    inputs = tokenizer("Line <extra_id_0> of a text", return_tensors="pt")
    assert model.generate(input_ids=inputs.input_ids, max_new_tokens=4).shape[1] > 1


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "empty"), (b"\0\1\2", "binary"), (b"short", "less than one sample")],
)
def test_unusable_calibration_leaves_nothing_behind(mixtral, tmp_path, content, message):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        compress(mixtral, tmp_path / "out", method=method(file))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["text.txt"]


def test_samples_longer_than_the_models_positions_are_refused(mixtral, text, tmp_path):
    with pytest.raises(CalibrationError, match="2048 positions"):
        compress(mixtral, tmp_path / "out", method=method(text, sequence_length=4096))


def test_nan_weights_name_the_tensor(mixtral, text, tmp_path):
    shutil.copytree(mixtral, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = next(n for n in tensors if "layers.1" in n and n.endswith("experts.2.w2.weight"))
    tensors[name].view(-1)[7] = float("nan")
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises((InvalidTensorError, CalibrationError), match=r"experts\.2\.w2|expert 2 of"):
        compress(tmp_path / "model", tmp_path / "out", method=method(text))


def test_rounding_is_the_method_ternary(mixtral, text, tmp_path):
    """The levels are equal; codes differ where a weight is half-way, because one method rounds the levels first."""
    compress(mixtral, tmp_path / "a", method=Ternary())
    compress(mixtral, tmp_path / "b", method=method(text, solver="rtn"))
    first, second = PackedDirectory.open(tmp_path / "a"), PackedDirectory.open(tmp_path / "b")
    for name in first.tensors():
        assert (first.blob(name).parameters("levels") == second.blob(name).parameters("levels")).all()
        assert (first.blob(name).dequantize() != second.blob(name).dequantize()).mean() < 0.01


def test_a_model_that_computes_nan_is_refused(mixtral, text, tmp_path):
    shutil.copytree(mixtral, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"].fill_(3e38)  # finite, but too large to compute with
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CalibrationError, match=r"NaN or infinity in 'model\.layers\.1'"):
        compress(tmp_path / "model", tmp_path / "out", method=method(text))
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith("out")] == ["out.partial"]
    # In the first layer nothing is kept, so the output directory can be used with other settings.
    tensors["model.layers.0.input_layernorm.weight"].fill_(3e38)
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CalibrationError, match=r"NaN or infinity in 'model\.layers\.0'"):
        compress(tmp_path / "model", tmp_path / "other", method=method(text))
    assert not [file.name for file in tmp_path.iterdir() if file.name.startswith("other")]


def test_tokens_out_of_the_vocabulary_are_refused(mixtral, text, tmp_path):
    """A tokenizer of another model: ids beyond the embedding must not reach it."""
    shutil.copytree(mixtral, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["e"] = len(vocabulary) + 5000
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(CalibrationError, match="outside the model's vocabulary"):
        compress(tmp_path / "model", tmp_path / "out", method=method(text))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["model"]


def test_the_papers_own_setting_is_gptq_alone(mixtral, text, tmp_path):
    seen = {}
    solve = Qmoe.solve

    def watch(self, stage):
        expected = gptq(torch.cat(list(stage.weights.values()), 1), stage.hessians(), TernaryGrid())
        found = solve(self, stage)
        values = torch.cat([solution.values for solution in found.values()], 1)
        seen[stage.layer, *stage.weights] = torch.equal(values, expected.values)
        return found

    for settings, same in ((PUBLISHED, True), ({}, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Qmoe, "solve", watch)
            compress(mixtral, tmp_path / str(same), method=method(text, **settings))
        assert set(seen.values()) == {same}


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="bits"):
        create("qmoe", calibration="x", bits="3")
    with pytest.raises(ValueError, match="solver"):
        create("qmoe", calibration="x", solver="magic")
    with pytest.raises(ValueError, match="group_size"):
        create("qmoe", calibration="x", bits="2", group_size=48)
    with pytest.raises(ValueError, match="calibration"):
        create("qmoe", calibration="none")
    with pytest.raises(ValueError, match="damping"):
        create("qmoe", calibration="x", damping=-1)


def test_the_command_line_compresses_with_calibration(mixtral, text, tmp_path):
    arguments = ["compress", str(mixtral), str(tmp_path / "out"), "--method", "qmoe", "-q"]
    options = ["--calibration", str(text), "--samples", "4", "--sequence-length", "32"]
    done = CliRunner().invoke(app, [*arguments, *options])
    assert done.exit_code == 0, done.output
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["method"] == "qmoe"
    arguments[2] = str(tmp_path / "other")
    assert CliRunner().invoke(app, [*arguments, "--calibration", "none"]).exit_code == 2


def test_energy_factors_restore_the_energy_of_every_row():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 8, 16, generator=generator)
    x = torch.randn(2, 40, 16, generator=generator)
    hessians = x.mT @ x
    values = weights * torch.rand(2, 8, 1, generator=generator).clamp(min=0.6)
    values[0, 0] = 0
    factors = energy_factors(weights, values, hessians)
    assert factors[0, 0] == 1
    wanted = torch.einsum("erc,ecd,erd->er", weights, hessians, weights)
    scaled = values * factors[..., None]
    found = torch.einsum("erc,ecd,erd->er", scaled, hessians, scaled)
    torch.testing.assert_close(found[factors != 1], wanted[factors != 1], rtol=1e-4, atol=1e-4)
    assert (energy_factors(weights, weights * 100, hessians) == 0.5).all()
    assert (energy_factors(weights, weights, hessians * 0) == 1).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dense_layers_are_packed_and_routers_norms_embeddings_are_not(tiny_checkpoint, architecture, text, tmp_path):
    source = tiny_checkpoint(architecture)
    compress(source, tmp_path / "out", method=method(text, dense_bits=8, group_size=16))
    assert moepack.verify(tmp_path / "out").ok
    tensors = PackedDirectory.open(tmp_path / "out").manifest.tensors
    linears = {linear.source: linear for layer in describe(Checkpoint.open(source)).dense for linear in layer.linears}
    packed = {name for name, record in tensors.items() if record.packed and not record.experts}
    assert packed == {name for name, linear in linears.items() if linear.role not in ("head", EMBEDDING)} and packed
    for name in packed:
        assert tensors[name].details["bits"] == 8 and tensors[name].details["symmetric"]
        assert tensors[name].details["role"] == linears[name].role
    model, original = (
        moepack.load(tmp_path / "out", dtype=torch.float32).dequantize(),
        open_model(source, torch.float32),
    )
    for name, tensor in original.state_dict().items():
        if "router" in name or name.endswith(".gate.weight"):  # rounded to bfloat16 in the scales of the packed model
            torch.testing.assert_close(model.state_dict()[name], tensor, rtol=2**-7, atol=0)
        elif name not in packed and ".experts." not in name:
            assert torch.equal(model.state_dict()[name], tensor), name
    for name, linear in linears.items():
        if name in packed:
            values = balance_of(tmp_path / "out").restored(name, open_matrix_of(tmp_path / "out", name))
            error = (values - linear.matrix().float()).norm() / linear.matrix().float().norm()
            assert error < 0.1, name


def open_matrix_of(directory, name):
    return torch.from_numpy(PackedDirectory.open(directory).blob(name).dequantize())[0]


def test_dense_layers_feed_later_stages_like_the_packed_model(mixtral, text, tmp_path, monkeypatch):
    """The states after the last block, computed by the packed model, equal those of the compressed stream."""
    chosen = method(text, bits="2", dense_bits="attention=4", group_size=16)
    streams = record_streams(monkeypatch)
    compress(mixtral, tmp_path / "out", method=chosen)
    states = last_states(tmp_path / "out", load_samples(Checkpoint.open(mixtral), text, 6, 64).inputs, "exact")
    torch.testing.assert_close(streams[0].hidden.tokens, states, rtol=1e-3, atol=1e-3)


def test_calibrated_dense_layers_beat_rounded_ones_on_the_models_outputs(mixtral, text, tmp_path):
    common = {"bits": "2", "group_size": 16, "dense_bits": 2}
    samples, logits = load_samples(Checkpoint.open(mixtral), text, 6, 64), {}
    for solver in ("rtn", "gptq"):
        compress(mixtral, tmp_path / solver, method=method(text, solver=solver, **common))
        with torch.inference_mode():
            logits[solver] = moepack.load(tmp_path / solver, dtype=torch.float32)(input_ids=samples.inputs).logits
    with torch.inference_mode():
        expected = open_model(mixtral, torch.float32)(input_ids=samples.inputs).logits
    error = {name: (found - expected).square().sum() for name, found in logits.items()}
    assert error["gptq"] < 0.8 * error["rtn"], error


def test_a_resume_with_dense_layers_gives_the_same_bytes(tiny_checkpoint, text, tmp_path, monkeypatch):
    settings = {"samples": 3, "dense_bits": "attention=4,shared=8", "group_size": 16}
    deepseek_v2 = tiny_checkpoint("deepseek_v2")
    compress(deepseek_v2, tmp_path / "whole", method=method(text, **settings))
    append = Workspace.append

    def die_after_each(self, shard):
        append(self, shard)
        raise KeyboardInterrupt

    deaths = 0
    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "append", die_after_each)
        while deaths < 3:
            with pytest.raises(KeyboardInterrupt):
                compress(deepseek_v2, tmp_path / "pieces", method=method(text, **settings))
            deaths += 1
    with pytest.raises(ResumeError, match="dense_bits"):
        compress(deepseek_v2, tmp_path / "pieces", method=method(text, **{**settings, "dense_bits": 8}))
    compress(deepseek_v2, tmp_path / "pieces", method=method(text, **settings))
    assert contents(tmp_path / "pieces") == contents(tmp_path / "whole")


def test_dense_layers_that_cannot_be_packed_are_refused_by_name(mixtral, text, tmp_path):
    with pytest.raises(ValueError, match="does not pack the head"):
        method(text, dense_bits="head=8")
    with pytest.raises(ValueError, match="roles are"):
        method(text, dense_bits="attention=5")
    shutil.copytree(mixtral, tmp_path / "model")
    file = next((tmp_path / "model").glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 4] = float("inf")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises((InvalidTensorError, CalibrationError), match=r"layers\.1"):
        compress(tmp_path / "model", tmp_path / "out", method=method(text, dense_bits=8))
    assert not (tmp_path / "out").exists()


def test_dense_layers_that_were_only_rounded_are_named(mixtral, text, tmp_path, monkeypatch):
    """As if a layer's inputs overflow: its Hessian cannot be used."""
    moments = LinearsRun._moments

    def overflown(run, path, drift):
        given = moments(run, path, drift)
        return replace(given, hessians=given.hessians * torch.nan)

    monkeypatch.setattr(LinearsRun, "_moments", overflown)
    report = compress(mixtral, tmp_path / "out", method=method(text, bits="2", group_size=16, dense_bits="attention=8"))
    packed = PackedDirectory.open(tmp_path / "out").manifest.packed()
    rounded = [name for name, record in packed.items() if record.projection == "weight"]
    reason = packed[rounded[0]].details["rounded"]
    first = packed[min(rounded)].module
    assert f"{first} and {len(rounded) - 1} more linear layers rounded to nearest: {reason}." in report.notes


def test_dense_bits_from_the_command_line(mixtral, text, tmp_path):
    arguments = ["compress", str(mixtral), str(tmp_path / "out"), "--method", "qmoe", "--calibration", str(text)]
    arguments += ["--samples", "2", "--sequence-length", "32", "--dense-bits", "attention=4", "--report", "--quiet"]
    arguments += ["--group-size", "16"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "dense  " in result.output and "int4 group 16" in result.output
    assert PackedDirectory.open(tmp_path / "out").manifest.settings["dense_bits"] == "attention=4"


@pytest.mark.parametrize("columns", [16, 40, 48, 64, 100, 112])
@pytest.mark.parametrize("group_size", [16, 32, 64])
def test_the_bound_of_two_bits_is_the_packed_size(columns, group_size):
    form, shape = GroupwiseForm(group_size), (2, 20, columns)
    generator = torch.Generator().manual_seed(columns)
    codes = torch.randint(0, 4, shape, generator=generator, dtype=torch.uint8)
    parameters = torch.rand((*shape[:2], 2 * -(-columns // group_size)), generator=generator).half().float()
    assert form.pack(codes, parameters).data.nbytes == form.bound(shape)

"""Fine-tuned centroids and scales: gradients, the objective, and the written directory."""

import math
import re
import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner

import moepack
import tiny_models
from fork_support import run_script
from moepack import _core
from moepack.calibration.load import load_samples
from moepack.checkpoint import Checkpoint
from moepack.cli import app, main
from moepack.errors import (
    CalibrationError,
    CorruptionError,
    DiskError,
    MoepackWarning,
    OutputExistsError,
    ResumeError,
    UnsupportedModelError,
)
from moepack.format import PackedDirectory
from moepack.integrations.loading import open_model
from moepack.methods import CodeQuant, Rate
from moepack.methods.qmoe.ternary import Ternary
from moepack.methods.rate.coder import Coder
from moepack.methods.rate.sample import take_sample
from moepack.pipeline import compress
from moepack.pipeline.journal import Workspace
from moepack.pipeline.tune import tune
from moepack.tuning import TuneSettings, listening, thaw, tune_model
from moepack.tuning.tensors import Scales

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def packed(text, tmp_path_factory):
    """A packed two-bit DeepSeek with rotated inputs, and its source."""
    base = tmp_path_factory.mktemp("packed")
    source = tiny_models.build("deepseek_v2", base / "source")
    settings = {"samples": 6, "sequence_length": 64, "steps": 1, "rotation": "random", "weight_bits": 2}
    # Such a small model would be nearly exact on its calibration text with drift correction, so drift is kept.
    settings |= {"activation_bits": 8, "hadamard": True, "drift": 0.0}
    compress(source, base / "out", method=CodeQuant(calibration=str(text), **settings))
    return base / "out", source


def samples(source, text):
    return load_samples(Checkpoint.open(source), text, 8, 64).inputs


@pytest.mark.parametrize("symbols", ["plain", "plain+3"])
@pytest.mark.parametrize("own", [False, True])
def test_fine_tuned_coded_tensors_keep_scales_of_columns(symbols, own):
    random = np.random.default_rng(0)
    codes = np.rint(random.standard_normal((3, 20, 30)) * (60 if symbols == "plain+3" else 0.8)).astype(np.int32)
    columns = np.exp2(random.integers(-3, 4, (3 if own else 1, 30))).astype(np.float32)
    data = _core.encode_coded(codes, np.full((1, 1), 0.25, np.float32), ndim=3, columns=columns, symbols=symbols)
    tuned = Scales(torch.from_numpy(data))
    assert np.array_equal(tuned.blob().numpy(), data)
    x = torch.from_numpy(random.standard_normal((6, 30)).astype(np.float32))
    torch.nn.init.constant_(tuned.moves, 1.0)
    again = _core.PackedTensor(tuned.blob().numpy())
    assert np.array_equal(again.parameters("columns"), columns)
    np.testing.assert_array_equal(again.dequantize(), np.float32(0.5) * codes.astype(np.float32) * columns[:, None])
    expected = again.matmul_grouped(x.numpy(), np.array([0, 2, 3, 6]), "exact")
    np.testing.assert_allclose(tuned.products(x, [2, 1, 3]).detach().numpy(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("own", [False, True])
def test_scales_of_columns_move_with_their_activations(own):
    """Products with changed column scales equal those of the written tensor, and have gradients."""
    random = np.random.default_rng(1)
    codes = np.rint(random.standard_normal((2, 8, 24))).astype(np.int32)
    columns = np.exp2(random.integers(-3, 4, (2 if own else 1, 24))).astype(np.float32)
    tuned = Scales(torch.from_numpy(_core.encode_coded(codes, np.ones((1, 1), np.float32), ndim=3, columns=columns)))
    with torch.no_grad():
        tuned.turns.copy_(torch.from_numpy(random.uniform(-0.3, 0.3, columns.shape)))
    x = torch.from_numpy(random.standard_normal((5, 24)).astype(np.float32))
    found = tuned.products(x, [3, 2])
    again = _core.PackedTensor(tuned.blob().numpy())
    np.testing.assert_array_equal(again.parameters("columns"), tuned.column_scales().detach().numpy())
    expected = again.matmul_grouped(x.numpy(), np.array([0, 3, 5]), "exact")
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-4, atol=1e-3)
    found.square().sum().backward()
    assert (tuned.turns.grad != 0).all() and (tuned.moves.grad != 0).all()


def test_gains_of_norms_move_and_are_written_as_they_were_stored(packed, text, tmp_path):
    out, source = packed
    settings = {"calibration": str(text), "samples": 8, "sequence_length": 64}
    tuned = tune(out, source, tmp_path / "tuned", **settings, settings=TuneSettings(steps=4, rate=1e-3, batch=2))
    norms = {name for name in PackedDirectory.open(out).manifest.tensors if name.endswith("norm.weight")}
    assert tuned.gains.keys() == norms and len(norms) > 4
    model = moepack.load(tmp_path / "tuned", dtype=torch.float32)
    before = moepack.load(out, dtype=torch.float32)
    for name, gain in tuned.gains.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), gain.float(), rtol=0, atol=0)
        assert (model.get_parameter(name) != before.get_parameter(name)).any(), name


def streams(data):
    return [data[first:end] for first, end in _core.PackedTensor(data).payloads()]


def test_a_thawed_model_computes_the_same_as_the_packed_one(packed, text):
    model = moepack.load(packed[0], dtype=torch.float32)
    ids = samples(packed[1], text)[:2]
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
    tensors = thaw(model)
    found = model(input_ids=ids).logits
    # Activations near the middle between two codes may fall to either side.
    assert (found - expected).abs().mean() < 1e-2 * expected.std()
    functional.log_softmax(found, -1)[..., 3].sum().backward()
    assert len(tensors) > 6 and all(tensor.moves.grad.abs().sum() > 0 for tensor in tensors.values())
    for name, data in PackedDirectory.open(packed[0]).tensors().items():
        record = PackedDirectory.open(packed[0]).manifest.tensors[name]
        tensor = tensors[f"{record.module}/{'packed' if record.projection == 'weight' else record.projection}"]
        again = moepack.CodebookTensor(tensor.blob().numpy())
        torch.testing.assert_close(again.dequantize(), moepack.CodebookTensor(data).dequantize(), rtol=1e-4, atol=2e-5)


def test_the_term_of_the_routers_has_a_gradient_and_moves_them(packed, text):
    """The second term of equation 6 alone moves centroids before a router and restores the router's choice."""
    ids = samples(packed[1], text)
    teacher = open_model(packed[1], torch.float32)
    student = moepack.load(packed[0], dtype=torch.float32)
    tensors = thaw(student)
    with listening(student) as heard, listening(teacher) as expected:
        student(input_ids=ids[:2]), teacher(input_ids=ids[:2])
        pairs = zip(expected, heard, strict=True)
        terms = [(functional.softmax(a, -1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum() for a, b in pairs]
    first = torch.autograd.grad(terms[0], [tensor.moves for tensor in tensors.values()], allow_unused=True)
    reached = {name for name, slope in zip(tensors, first, strict=True) if slope is not None and slope.abs().sum() > 0}
    layer = max(int(name.split(".")[2]) for name in reached)
    assert reached and not any(f"layers.{layer}.mlp.experts" in name for name in reached)
    found = {}
    for weight in (0.0, 30.0):
        student = moepack.load(packed[0], dtype=torch.float32)
        tuned = tune_model(student, teacher, ids, TuneSettings(steps=20, router_weight=weight, batch=4), CPU)
        assert tuned.after.total(weight) < tuned.before.total(weight)
        found[weight] = tuned.after
    assert found[30.0].routers < 0.95 * found[0.0].routers
    assert found[0.0].logits < tuned.before.logits


def test_a_tuned_directory_is_verified_keeps_its_size_and_is_closer(packed, text, tmp_path):
    out, source = packed
    tuned = tune(
        out, source, tmp_path / "tuned", calibration=str(text), samples=8, sequence_length=64,
        settings=TuneSettings(steps=20, batch=4),
    )  # fmt: skip
    assert moepack.verify(tmp_path / "tuned").ok
    before, after = (PackedDirectory.open(path).manifest for path in (out, tmp_path / "tuned"))
    for name, record in before.tensors.items():
        assert after.tensors[name].nbytes == record.nbytes
        changes = record.packed or name.endswith("norm.weight")
        assert changes == (after.tensors[name].crc32 != record.crc32), name
    assert after.settings["tuning"]["after"] == list(tuned.after) and after.settings["tuning"]["steps"] == 20
    ids = samples(source, text)
    with torch.inference_mode():
        expected = open_model(source, torch.float32)(input_ids=ids).logits.log_softmax(-1)
        found = [moepack.load(path, dtype=torch.float32)(input_ids=ids).logits for path in (out, tmp_path / "tuned")]
        divergence = [float((expected.exp() * (expected - logits.log_softmax(-1))).sum()) for logits in found]
    assert divergence[1] < 0.9 * divergence[0]
    with pytest.raises(OutputExistsError):
        tune(out, source, tmp_path / "tuned", calibration=str(text))


class Plain(Rate):
    """Coded integers without scales of rows and columns."""

    def coder(self, checkpoint, model, request, progress):
        return Coder.of(self, take_sample(checkpoint, model, self.dense_roles))


@pytest.mark.parametrize("long", [1, 64])
def test_coded_tensors_keep_their_codes_and_long_rows_come_to_have_scales(packed, text, tmp_path, monkeypatch, long):
    monkeypatch.setattr("moepack.tuning.tensors.LONG", long)
    source = packed[1]
    compress(source, tmp_path / "coded", method=Plain(bits_per_weight=2.5))
    few = {"calibration": str(text), "samples": 8, "sequence_length": 64}
    tuned = tune(tmp_path / "coded", source, tmp_path / "tuned", **few, settings=TuneSettings(20, 2e-3, batch=4))
    assert tuned.after.total(1) < 0.95 * tuned.before.total(1) and moepack.verify(tmp_path / "tuned").ok
    before, after = (PackedDirectory.open(tmp_path / name) for name in ("coded", "tuned"))
    for name, record in before.manifest.packed().items():
        old, new = (directory.tensors()[name] for directory in (before, after))
        scaled = record.shape[-1] >= long and not record.module.endswith(("embed_tokens", "lm_head"))
        assert after.manifest.tensors[name].details["row_scales"] == scaled, name
        assert 0 <= len(new) - len(old) <= scaled * (2 * math.prod(record.shape[:-1]) + 64)
        assert (_core.decode_coded(old) == _core.decode_coded(new)).all()
        assert all(np.array_equal(a, b) for a, b in zip(streams(old), streams(new), strict=True))
    # The written model computes the fine-tuned values, has the same size, and can be fine-tuned again.
    model, ids = moepack.load(tmp_path / "tuned", dtype=torch.float32), samples(source, text)[:2]
    moepack.set_compute_mode("exact", model)
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
        thaw(model)
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-3, atol=1e-3)
    tune(tmp_path / "tuned", source, tmp_path / "again", **few, settings=TuneSettings(steps=1, batch=2))
    again = PackedDirectory.open(tmp_path / "again").manifest
    assert {record.nbytes for record in again.tensors.values()} == {
        record.nbytes for record in after.manifest.tensors.values()
    }


def test_the_command(packed, text, tmp_path):
    arguments = ["tune", *map(str, packed), str(tmp_path / "out"), "--calibration", str(text), "--samples", "3"]
    done = CliRunner().invoke(app, [*arguments, "--sequence-length", "32", "--steps", "2", "--batch", "2"])
    assert done.exit_code == 0 and "predictions diverge" in done.output, done.output
    again = CliRunner().invoke(app, [*arguments[:3], str(tmp_path / "no"), *arguments[4:], "--rate", "0"])
    assert again.exit_code == 2


def test_side_files_may_change_before_tuning(packed, text, tmp_path):
    directory, source = shutil.copytree(packed[0], tmp_path / "in"), packed[1]
    changed = (directory / "generation_config.json").read_text() + "\n"
    (directory / "generation_config.json").write_text(changed)
    few = {"calibration": str(text), "samples": 3, "sequence_length": 32, "settings": TuneSettings(steps=1, batch=1)}
    tune(directory, source, tmp_path / "changed", **few)
    assert (tmp_path / "changed/generation_config.json").read_text() == changed
    (directory / "generation_config.json").unlink()
    tune(directory, source, tmp_path / "removed", **few)
    for name in ("changed", "removed"):
        report = moepack.verify(tmp_path / name)
        assert report.ok and not report.side


def test_progress_is_shown_in_tokens_and_a_short_text_is_reported(packed, text, tmp_path, capsys):
    arguments = ["tune", *map(str, packed), str(tmp_path / "out"), "--calibration", str(text), "--samples", "5000"]
    arguments += ["--sequence-length", "32", "--steps", "2", "--batch", "3"]
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    lines = capsys.readouterr().err.splitlines()
    assert caught.value.code == 0, lines
    assert re.fullmatch(
        r"warning: .*text.txt: the text holds \d+ samples of 32 tokens, but 5000 were requested", lines[0]
    )
    stages = [line for line in lines[1:] if " s left" not in line]  # a slow machine prints more lines within a stage
    assert stages == ["192 tokens", "  0%  loading both models", "  0%  fine-tuning"], lines


def test_the_place_is_only_taken_from_another_run_of_tune(packed, text, tmp_path):
    partial = tmp_path / "out.partial"
    few = {"calibration": str(text), "samples": 3, "sequence_length": 32}
    Workspace.open(partial, {"method": "ternary"}, resume=True).close()
    (partial / "shard").write_text("hours of work")
    with pytest.raises(ResumeError, match="method was ternary, is tune"):
        tune(*packed, tmp_path / "out", **few)
    assert (partial / "shard").exists()
    shutil.rmtree(partial)
    Workspace.open(partial, {"method": "tune"}, resume=True).close()
    (partial / "shard").write_text("of a killed run")
    tune(*packed, tmp_path / "out", **few, settings=TuneSettings(steps=1, batch=1))
    assert not partial.exists() and moepack.verify(tmp_path / "out").ok


def test_too_little_space_is_reported_before_the_work(packed, text, tmp_path, monkeypatch):
    monkeypatch.setattr("moepack.pipeline.tune.tune_model", lambda *arguments: pytest.fail("worked"))
    usage = shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DiskError, match=r"needs up to [\d,]+ bytes, but 1,000 are free"):
        tune(*packed, tmp_path / "out", calibration=str(text), samples=3, sequence_length=32)
    assert list(tmp_path.iterdir()) == []


def test_a_signal_leaves_nothing(packed, text, tmp_path):
    """A real Ctrl-C in the middle of the steps."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "from moepack.cli import main\n"
        "from moepack.progress import Lines\n"
        "Lines.advance = lambda self, count, memory: os.kill(os.getpid(), signal.SIGINT)\n"
        "main()\n"
    )
    (folder := tmp_path / "folder").mkdir()
    arguments = [*packed, folder / "out", "--calibration", text, "--samples", "3", "--sequence-length", "32"]
    done = run_script(script, "tune", *arguments, folder=tmp_path)
    assert done.returncode == 130 and "interrupted; nothing was written" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and list(folder.iterdir()) == []


def test_nothing_is_left_of_a_run_that_fails(packed, text, tmp_path, monkeypatch):
    def fail(*arguments):
        assert (tmp_path / "out.partial").is_dir(), "the place is claimed before the work"
        raise KeyboardInterrupt

    monkeypatch.setattr("moepack.pipeline.tune.tune_model", fail)
    with pytest.raises(KeyboardInterrupt):
        tune(*packed, tmp_path / "out", calibration=str(text), samples=3, sequence_length=32)
    arguments = ["tune", *map(str, packed), str(tmp_path / "out"), "--calibration", str(text), "--samples", "3"]
    done = CliRunner().invoke(app, [*arguments, "--sequence-length", "32"])
    assert done.exit_code == 130 and "nothing was written" in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_to_is_known_before_the_work(packed, text, tmp_path, monkeypatch):
    monkeypatch.setattr("moepack.pipeline.tune.tune_model", lambda *arguments: pytest.fail("worked"))
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="cannot create"):
        tune(*packed, tmp_path / "file" / "out", calibration=str(text), samples=3, sequence_length=32)


def test_a_file_that_is_missing_is_known_before_the_work(packed, text, tmp_path, monkeypatch):
    monkeypatch.setattr("moepack.pipeline.tune.tune_model", lambda *arguments: pytest.fail("worked"))
    shutil.copytree(packed[0], tmp_path / "copy")
    (tmp_path / "copy" / "tokenizer.json").unlink()
    with pytest.raises(CorruptionError, match=r"tokenizer\.json: missing"):
        tune(tmp_path / "copy", packed[1], tmp_path / "out", calibration=str(text))


def test_a_different_original_is_rejected(packed, text, tmp_path, recwarn):
    few = {"calibration": str(text), "samples": 2, "sequence_length": 32, "settings": TuneSettings(steps=1, batch=1)}
    tune(*packed, tmp_path / "out", **few)
    assert not [warning for warning in recwarn if warning.category is MoepackWarning]
    other = tmp_path / "other"
    shutil.copytree(packed[1], other)
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    with pytest.warns(MoepackWarning, match=r"other differs from the checkpoint that .* was packed from"):
        tune(packed[0], other, tmp_path / "again", **few)


def test_a_pruned_model_is_tuned_by_its_predictions(mixtral, text, tmp_path):
    few = {"calibration": str(text), "samples": 4, "sequence_length": 32}
    compress(mixtral, tmp_path / "pruned", method=Rate(4, **few), prune="25%")
    found = tune(tmp_path / "pruned", mixtral, tmp_path / "out", settings=TuneSettings(steps=1, batch=1), **few)
    assert found.before.routers == 0 and moepack.verify(tmp_path / "out").ok


def test_models_that_cannot_be_tuned_are_rejected(packed, mixtral, text, tmp_path):

    compress(mixtral, tmp_path / "ternary", method=Ternary())
    with pytest.raises(UnsupportedModelError, match="ternary"):
        tune(tmp_path / "ternary", mixtral, tmp_path / "out", calibration=str(text))
    with pytest.raises(CalibrationError, match="two samples"):
        tune(*packed, tmp_path / "out", calibration=str(text), samples=1, sequence_length=64)
    for settings in ({"steps": 0}, {"rate": 0.0}, {"router_weight": -1.0}, {"batch": 0}):
        with pytest.raises(ValueError):
            TuneSettings(**settings)

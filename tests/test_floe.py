"""The method `floe`: thresholds, records, and the whole path from a checkpoint to text."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import moepack
import runtime_support as support
from moepack import UnsupportedModelError, _core
from moepack.calibration.load import load_samples
from moepack.checkpoint import Checkpoint, describe
from moepack.cli import app
from moepack.export import export
from moepack.format import PackedDirectory
from moepack.integrations.loading import open_model
from moepack.methods import create
from moepack.methods.floe import Floe
from moepack.methods.floe.channels import by_channels
from moepack.methods.floe.quantiles import Quantiles
from moepack.pipeline import compress
from moepack.runtime.backends.cpu import CpuBackend
from moepack.runtime.experts import RefinedExperts, SparseExperts
from moepack.runtime.streaming import statistics_of
from oracle import channels as oracle


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"Line {i} of a text that nobody wrote, {i * i} words long.\n" for i in range(200)))
    return file


@pytest.fixture(scope="module")
def directory(mixtral: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("floe") / "packed"
    compress(mixtral, out, method=method(text))
    return out


def method(text: Path, **settings: Any) -> Floe:
    return Floe(**{"calibration": str(text), "samples": 6, "sequence_length": 64, **settings})


def sparse_modules(model: Any) -> list[SparseExperts]:
    return [module for module in model.modules() if isinstance(module, SparseExperts)]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8, 0.99])
def test_streamed_quantiles_are_those_of_all_values(scale: float, share: float) -> None:
    torch.manual_seed(0)
    values, quantiles = torch.randn(20_000) * scale, Quantiles(2)
    for piece in values.split(700):
        quantiles.add(1, piece)
    exact = float(values.abs().double().quantile(share))
    threshold = quantiles.threshold(share, 1)
    assert exact <= threshold * (1 + 1e-6) and threshold <= 1.005 * exact
    assert quantiles.below(1, threshold) == float((values.abs() < threshold).double().mean())
    assert quantiles.threshold(share) == threshold and quantiles.total.tolist() == [0, 20_000]


def test_quantiles_of_nothing_and_of_everything() -> None:
    quantiles = Quantiles(1)
    assert quantiles.threshold(0.5) == 0 and quantiles.below(0, 1.0) is None
    quantiles.add(0, torch.tensor([0.0, 1e-30, 5.0, 1e20]))
    assert quantiles.threshold(0) == 0 and quantiles.threshold(1) == float("inf")
    assert quantiles.below(0, quantiles.threshold(0.5)) == 0.5


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_directory_holds_what_the_settings_say(mixtral: Path, text: Path, tmp_path: Path, bits: int) -> None:
    chosen = method(text, bits=bits)
    compress(mixtral, tmp_path / "out", method=chosen)
    assert moepack.verify(tmp_path / "out").ok
    opened, model = PackedDirectory.open(tmp_path / "out"), describe(Checkpoint.open(mixtral))
    for number, layer in enumerate(model.layers):
        up, records = (opened.blob(projection.packed_name) for projection in by_channels(layer).projections)
        gate, _, down = layer.projections
        experts = range(layer.experts)
        wanted = torch.stack([torch.cat([gate.expert(e), down.expert(e).T], 1) for e in experts]).float()
        if (order := chosen._decisions[layer.name].order) is not None:
            wanted = wanted.take_along_dim(order[..., None], 1)
        found = torch.from_numpy(records.dequantize())
        error = float((found - wanted).square().sum() / wanted.square().sum())
        assert error <= {4: 0.02, 8: 1e-4, 16: 1e-5}[bits]
        assert up.details()["bits"] == (8 if number == 0 else 2)
        details = opened.manifest.tensors[down.packed_name].details
        thresholds = records.parameters("thresholds").tolist()
        assert thresholds == [float(value) for value in details["thresholds"]]
        assert (max(thresholds) == 0) == (number == 0)


def test_thresholds_skip_what_is_asked_on_the_text_that_they_come_from(mixtral: Path, text: Path) -> None:
    """What enters the first layer is what transformers' model sends there."""
    chosen, checkpoint = method(text, sparsity=0.7, dense_layers=0), Checkpoint.open(mixtral)
    model = describe(checkpoint)
    chosen.prepare(checkpoint, model)
    first = model.layers[0]
    loaded = open_model(mixtral, dtype=torch.float32)
    ids, seen = load_samples(checkpoint, str(text), 6, 64).inputs, []
    loaded.get_submodule(first.name).register_forward_pre_hook(lambda _, given: seen.append(given))
    with torch.no_grad():
        loaded(ids)
    x, index, _ = seen[0]
    details = chosen.decided(first.projections[2].packed_name)
    assert details["tokens"] == torch.bincount(index.flatten(), minlength=first.experts).tolist()
    for expert, count in enumerate(details["tokens"]):
        up = chosen._up(first.projections[1].expert(expert), first.name).values()
        values = (x[(index == expert).any(1)] @ up.T).abs()
        values = values[: count - count // 8]
        threshold = details["thresholds"][expert]
        assert float((values < threshold).double().mean()) == pytest.approx(
            details["predicted_sparsity"][expert], abs=2e-3
        )
        assert 0.7 <= details["predicted_sparsity"][expert] < 0.72


def test_a_model_computes_the_equations(directory: Path) -> None:
    model = moepack.load(directory, dtype="float32", mode="exact")
    assert type(model).__name__ == "MixtralForCausalLM"
    for module in sparse_modules(model):
        up, records = (torch.from_numpy(module.matrix(name).dequantize()) for name in module.projections)
        thresholds = torch.from_numpy(module.matrix("channels").parameters("thresholds"))
        x, index = torch.randn(5, up.shape[2]), torch.tensor([[0, 1], [2, 1], [3, 0], [9, 2], [1, 3]])
        weights = torch.rand(5, 2)
        expected, computed = oracle.layer(up, records, thresholds, x, index, weights)
        torch.testing.assert_close(module(x, index, weights), expected.float(), rtol=1e-4, atol=1e-5)
        assert abs(module.computed - computed) <= 1 and module.asked == 9 * up.shape[1]


def test_coarse_copies_decide_and_compute_what_records_do_not_refine(mixtral: Path, text: Path, tmp_path: Path) -> None:
    report = compress(mixtral, tmp_path / "out", method=method(text, sparsity=0.7, coarse_bits=3.0))
    assert moepack.verify(tmp_path / "out").ok and report.expert_weights
    model = moepack.load(tmp_path / "out", dtype="float32", mode="exact")
    for module in sparse_modules(model):
        assert isinstance(module, RefinedExperts)
        gate, up, down, records = (torch.from_numpy(module.matrix(name).dequantize()) for name in module.projections)
        fine, columns = records.double().chunk(2, 2)
        fine, columns = fine + gate.double(), columns + down.double().mT
        thresholds = module.matrix("residuals").parameters("thresholds")
        assert len(set(thresholds.tolist())) == 1 and 0 < thresholds[0] < np.inf
        x, index = torch.randn(5, up.shape[2]), torch.tensor([[0, 1], [2, 1], [3, 0], [9, 2], [1, 3]])
        weights, expected, computed = torch.rand(5, 2), torch.zeros(5, up.shape[2]).double(), 0
        for token, slot in (index < 9).nonzero().tolist():
            expert, share, y = index[token, slot], weights[token, slot], x[token].double()
            ups = up[expert].double() @ y
            inner = torch.nn.functional.silu(gate[expert].double() @ y) * ups
            chosen = inner.abs() * share >= thresholds[0]
            refined = torch.nn.functional.silu(fine[expert] @ y) * ups
            part = down[expert].double() @ (inner * ~chosen) + columns[expert].T @ (refined * chosen)
            expected[token], computed = expected[token] + share * part, computed + int(chosen.sum())
        torch.testing.assert_close(module(x, index, weights), expected.float(), rtol=1e-4, atol=1e-5)
        assert abs(module.computed - computed) <= 1 and module.asked == 9 * up.shape[1]
        matrices = [module.matrix(name) for name in module.projections]
        traced = CpuBackend().experts(matrices, x, index, weights, module.act_fn, module.mode)
        assert torch.equal(traced, module(x, index, weights))
    ids = support.inputs(model, batch=2, tokens=1)["input_ids"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moepack.MoepackWarning)
        records = sum(module.get_buffer("residuals").nbytes for module in sparse_modules(model))
        least = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) - records + (1 << 20)
        streamed = moepack.load(tmp_path / "out", dtype="float32", mode="exact", host_memory=least)
    generated = [each.generate(ids, max_new_tokens=6, do_sample=False) for each in (model, streamed)]
    counts = statistics_of(streamed)
    assert torch.equal(*generated) and counts is not None and counts.guessed and counts.most <= 1 << 20
    assert 0.05 < sum(module.computed / module.asked for module in sparse_modules(model)) / 2 < 0.6
    export(tmp_path / "out", tmp_path / "plain")
    opened, (gate, _, down) = (
        PackedDirectory.open(tmp_path / "out"),
        describe(Checkpoint.open(tmp_path / "plain")).layers[1].projections,
    )
    records = opened.blob(gate.packed_name.replace("gate_proj", "residuals")).dequantize()
    fine = torch.from_numpy(records[2]).chunk(2, 1)[0] + torch.from_numpy(opened.blob(gate.packed_name).dequantize()[2])
    assert torch.equal(gate.expert(2), fine.bfloat16())
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "out"), "--matrices"]).output
    assert "int4 residuals" in shown and "coded" in shown


def test_it_generates_streams_exports_and_is_shown(directory: Path, mixtral: Path, tmp_path: Path) -> None:
    model = moepack.load(directory, dtype="float32", mode="exact")
    ids = support.inputs(model, batch=1, tokens=5)["input_ids"]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moepack.MoepackWarning)
        streamed = moepack.load(directory, dtype="float32", mode="exact", host_memory="1GB")
    assert torch.equal(streamed.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert statistics_of(streamed) is not None
    shown = CliRunner().invoke(app, ["inspect", str(directory), "--matrices"]).output
    assert "int8 channels" in shown and "skipped" in shown and "threshold" in shown
    export(directory, tmp_path / "plain")
    plain, opened = Checkpoint.open(tmp_path / "plain"), PackedDirectory.open(directory)
    gate, up, down = describe(plain).layers[1].projections
    records = torch.from_numpy(opened.blob(down.packed_name).dequantize("bfloat16")).view(torch.bfloat16)
    assert torch.equal(gate.expert(2), records[2].chunk(2, 1)[0]) and torch.equal(
        down.expert(2), records[2].chunk(2, 1)[1].T
    )
    assert up.expert(2).shape == gate.expert(2).shape
    with pytest.raises(UnsupportedModelError, match="only group-wise"):
        export(directory, tmp_path / "gguf", to="compressed-tensors")


@pytest.mark.parametrize("coarse", [{}, {"coarse_bits": 2.0}], ids=["paper", "coarse"])
@pytest.mark.parametrize("sparsity", [0.0, 1.0])
def test_nothing_and_everything_may_be_skipped(
    mixtral: Path, text: Path, tmp_path: Path, sparsity: float, coarse: dict[str, float]
) -> None:
    compress(mixtral, tmp_path / "out", method=method(text, sparsity=sparsity, dense_layers=0, **coarse))
    model = moepack.load(tmp_path / "out", dtype="float32")
    support.logits(model)
    shares = {module.computed / module.asked for module in sparse_modules(model)}
    assert shares == {1.0 - sparsity}


def test_experts_without_tokens_get_the_threshold_of_their_layer(mixtral: Path, text: Path, tmp_path: Path) -> None:
    report = compress(mixtral, tmp_path / "out", method=method(text, samples=1, sequence_length=2))
    notes = [note for note in report.notes if "threshold of the whole layer" in note]
    assert notes
    records = PackedDirectory.open(tmp_path / "out").manifest.packed().values()
    details = next(record.details for record in records if record.details.get("pooled"))
    assert len({details["thresholds"][expert] for expert in details["pooled"]}) == 1
    assert all(details["predicted_sparsity"][expert] is None for expert in details["pooled"])


def test_a_resumed_job_gives_the_same_bytes(
    directory: Path, mixtral: Path, text: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    packed, pack = [], Floe.pack

    def failing(self: Floe, *given: Any) -> Any:
        if len(packed) == 3:
            raise KeyboardInterrupt
        packed.append(1)
        return pack(self, *given)

    monkeypatch.setattr(Floe, "pack", failing)
    with pytest.raises(KeyboardInterrupt):
        compress(mixtral, tmp_path / "out", method=method(text))
    monkeypatch.undo()
    assert compress(mixtral, tmp_path / "out", method=method(text)).resumed_weights > 0
    for file in sorted(directory.glob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name


def test_damaged_thresholds_and_records_are_found(directory: Path, tmp_path: Path) -> None:
    opened = PackedDirectory.open(directory)
    name = next(name for name, record in opened.manifest.packed().items() if record.projection == "channels")
    record = opened.manifest.tensors[name]
    for place, value in ((128, np.float32(-1).tobytes()), (record.nbytes - 1, b"\1")):
        copy = Path(shutil.copytree(directory, tmp_path / str(place)))
        data = np.array(opened.tensor(name))
        data[place : place + len(value)] = np.frombuffer(value, np.uint8)
        with pytest.raises(_core.CorruptionError):
            _core.PackedTensor(data).verify()
        content = bytearray((copy / record.file).read_bytes())
        start = bytes(content).index(bytes(opened.tensor(name)[:192]))
        content[start : start + len(data)] = data.tobytes()
        (copy / record.file).write_bytes(content)
        assert {fault.tensor for fault in moepack.verify(copy).faults} >= {name}


def test_models_without_gates_and_wrong_settings_are_refused(switch: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="gate"):
        compress(switch, tmp_path / "out", method=method(text))
    for wrong in (
        {"sparsity": 1.1},
        {"bits": 3},
        {"up_bits": 5},
        {"group_size": 7},
        {"solver": "x"},
        {"dense_layers": -1},
        {"coarse_bits": 9.0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong)).replace("coarse_bits", "bits_per_weight")):
            create("floe", calibration=str(text), **wrong)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "deepseek_v2"])
def test_every_gated_architecture_runs(tiny_checkpoint: Any, architecture: str, text: Path, tmp_path: Path) -> None:
    compress(tiny_checkpoint(architecture), tmp_path / "out", method=method(text, solver="hqq"))
    model = moepack.load(tmp_path / "out", dtype="float32")
    assert torch.isfinite(support.logits(model)).all() and sparse_modules(model)

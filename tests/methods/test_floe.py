"""The method `floe` in both forms: thresholds, records, and the whole path from a checkpoint to generated text."""

import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_sensitivity import rescaled
from typer.testing import CliRunner

import moepack
import runtime_support as support
from moepack import UnsupportedModelError, _core
from moepack.backends.cpu import CpuBackend
from moepack.calibration.load import CalibrationRequest, load_samples
from moepack.calibration.samples import decoder_samples
from moepack.checkpoint import Checkpoint, MoeModel, describe
from moepack.cli import app
from moepack.export import export
from moepack.format import PackedDirectory
from moepack.format.balance import balance_of
from moepack.integrations.loading import open_model
from moepack.methods import MethodPlan, create
from moepack.methods.floe import Floe
from moepack.methods.floe.channels import by_channels
from moepack.methods.floe.quantiles import Quantiles
from moepack.modules.experts import RefinedExperts, SparseExperts
from moepack.pipeline import compress
from moepack.pipeline.assignment import Assignment
from moepack.pipeline.estimate import estimate
from moepack.pipeline.report import Totals
from moepack.report.contents import add_up, read_rows
from moepack.stores.streaming import statistics_of
from oracle import channels as oracle
from places import NOVEL, TINY_MOE

STOCK = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module", params=["refined", "paper"])
def directory(
    request: pytest.FixtureRequest, mixtral: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("floe") / request.param
    compress(mixtral, out, method=(paper if request.param == "paper" else method)(text))
    return out


def balanced(model: Path, chosen: Floe) -> MoeModel:
    """The description of what is packed."""
    checkpoint = Checkpoint.open(model)
    return Assignment(chosen).balanced(checkpoint, describe(checkpoint))[1]


def assert_same_function(packed: Path, plain: Path) -> None:
    """Compare a model that refines all channels with its exported weights, which are rounded to bfloat16."""
    model = moepack.load(packed, dtype="float32", mode="exact").dequantize()
    expected, found = support.logits(model), support.logits(open_model(plain, dtype=torch.float32))
    assert float((found - expected).norm() / expected.norm()) < 0.05


def method(text: Path, **settings: Any) -> Floe:
    return Floe(**{"calibration": str(text), "samples": 6, "sequence_length": 64, **settings})


def paper(text: Path, **settings: Any) -> Floe:
    return method(text, paper_form=True, **settings)


def sparse_modules(model: Any) -> list[SparseExperts]:
    return [module for module in model.modules() if isinstance(module, SparseExperts)]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8, 0.99])
def test_streamed_quantiles_match_all_values(scale: float, share: float) -> None:
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


def planned(chosen: Floe, source: Path) -> MethodPlan:
    """Return the plan that a job makes for a checkpoint, in its balanced form."""
    checkpoint = Checkpoint.open(source)
    return chosen.plan(*Assignment(chosen).balanced(checkpoint, describe(checkpoint)))


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_the_paper_s_directory_follows_the_settings(mixtral: Path, text: Path, tmp_path: Path, bits: int) -> None:
    plan = planned(paper(text, bits=bits), mixtral)
    compress(mixtral, tmp_path / "out", method=plan)
    assert moepack.verify(tmp_path / "out").ok
    opened, model = PackedDirectory.open(tmp_path / "out"), balanced(mixtral, plan.method)
    for number, layer in enumerate(model.layers):
        up, records = (opened.blob(projection.packed_name) for projection in by_channels(layer).projections)
        gate, _, down = layer.projections
        experts = range(layer.experts)
        decision = plan.packer._decisions[layer.name]
        factors = torch.ones(down.shape[0], down.shape[2]) if decision.factors is None else decision.factors
        assert (decision.factors is None) == (number == 0)
        wanted = torch.stack([torch.cat([gate.expert(e), down.expert(e).T / factors[e][:, None]], 1) for e in experts])
        if decision.order is not None:
            wanted = wanted.take_along_dim(decision.order[..., None], 1)
        found = torch.from_numpy(records.dequantize())
        error = float((found - wanted).square().sum() / wanted.square().sum())
        assert error <= {4: 0.02, 8: 1e-4, 16: 1e-5}[bits]
        assert up.details()["bits"] == (8 if number == 0 else 2)
        details = opened.manifest.tensors[down.packed_name].details
        thresholds = records.parameters("thresholds").tolist()
        assert thresholds == [float(value) for value in details["thresholds"]]
        assert (max(thresholds) == 0) == (number == 0)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_residuals_lead_from_coarse_copies_to_the_weights(mixtral: Path, text: Path, tmp_path: Path, bits: int) -> None:
    """All tensors store their channels in the same order; each has its own factors of rows and columns."""
    plan = planned(method(text, bits=bits), mixtral)
    compress(mixtral, tmp_path / "out", method=plan)
    opened = PackedDirectory.open(tmp_path / "out")
    for layer in balanced(mixtral, plan.method).layers:
        names = plan.packer._names[layer.name]
        coarse = {name: torch.from_numpy(opened.blob(names[name]).dequantize()) for name in STOCK}
        rows, columns = torch.from_numpy(opened.blob(names["residuals"]).dequantize()).chunk(2, 2)
        found = coarse["gate_proj"] + rows, coarse["up_proj"], coarse["down_proj"] + columns.mT
        order = plan.packer._decisions[layer.name].order
        assert order is not None and not torch.equal(order, order.sort().values)
        for projection, values in zip(layer.projections, found, strict=True):
            wanted = torch.stack([projection.expert(expert) for expert in range(layer.experts)]).float()
            axis = int(projection.name == "down_proj") + 1
            wanted = wanted.take_along_dim(order[..., None] if axis == 1 else order[:, None], axis)
            of_copy, of_all = (
                float((each - wanted).norm() / wanted.norm()) for each in (coarse[projection.name], values)
            )
            if projection.name == "up_proj":
                assert of_copy < 0.25
            else:
                assert of_copy < 0.8 and of_all < {4: 0.2, 8: 0.02, 16: 0.01}[bits] * of_copy


def test_thresholds_skip_the_requested_share_on_their_text(mixtral: Path, text: Path) -> None:
    """The reference inputs of the first layer come from the model in transformers."""
    chosen, checkpoint = paper(text, sparsity=0.7, dense_layers=0), Checkpoint.open(mixtral)
    model = describe(checkpoint)
    plan = chosen.plan(checkpoint, model)
    first = model.layers[0]
    loaded = open_model(mixtral, dtype=torch.float32)
    ids, seen = load_samples(checkpoint, str(text), 6, 64).inputs, []
    loaded.get_submodule(first.name).register_forward_pre_hook(lambda _, given: seen.append(given))
    with torch.no_grad():
        loaded(ids)
    x, index, _ = seen[0]
    details = plan.decisions[first.projections[2].packed_name]
    assert details["tokens"] == torch.bincount(index.flatten(), minlength=first.experts).tolist()
    for expert, count in enumerate(details["tokens"]):
        up = plan.packer._up(first.projections[1].expert(expert), first.name).values()
        values = (x[(index == expert).any(1)] @ up.T).abs() * plan.packer._decisions[first.name].factors[expert]
        values = values[: count - count // 8]
        threshold = details["thresholds"][expert]
        assert float((values < threshold).double().mean()) == pytest.approx(
            details["predicted_sparsity"][expert], abs=2e-3
        )
        assert 0.7 <= details["predicted_sparsity"][expert] < 0.72


def computed(module: SparseExperts, *call: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Evaluate a module's equations in float64 with the values of its matrices."""
    *deciders, records = (torch.from_numpy(module.matrix(name).dequantize()) for name in module.projections)
    thresholds = torch.from_numpy(module.matrix(module.projections[-1]).parameters("thresholds"))
    if len(deciders) == 1:
        return oracle.layer(deciders[0], records, thresholds, *call)
    gate, up, down = deciders
    return oracle.refined_layer((gate, up, down), records, thresholds, *call)


def test_a_model_computes_the_equations(directory: Path) -> None:
    model = moepack.load(directory, dtype="float32", mode="exact")
    assert type(model).__name__ == "MixtralForCausalLM"
    for module in sparse_modules(model):
        assert isinstance(module, RefinedExperts) == (directory.name == "refined")
        _, channels, columns = module.shapes["up_proj"]
        x, index = torch.randn(5, columns), torch.tensor([[0, 1], [2, 1], [3, 0], [9, 2], [1, 3]])
        weights = torch.rand(5, 2)
        expected, count = computed(module, x, index, weights)
        torch.testing.assert_close(module(x, index, weights), expected.float(), rtol=1e-4, atol=1e-5)
        assert abs(module.computed - count) <= 1 and module.asked == 9 * channels
        if isinstance(module, RefinedExperts):
            matrices = [module.matrix(name) for name in module.projections]
            traced = CpuBackend().experts(matrices, x, index, weights, module.act_fn, module.mode)
            assert torch.equal(traced, module(x, index, weights))


def test_coarse_copies_select_channels_and_compute_the_unrefined_ones(
    mixtral: Path, text: Path, tmp_path: Path
) -> None:
    compress(mixtral, tmp_path / "out", method=method(text, sparsity=0.7))
    assert moepack.verify(tmp_path / "out").ok
    model = moepack.load(tmp_path / "out", dtype="float32", mode="exact")
    for module in sparse_modules(model):
        thresholds = module.matrix("residuals").parameters("thresholds")
        assert len(set(thresholds.tolist())) == 1 and 0 < thresholds[0] < np.inf
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
    opened, (gate, *_) = (
        PackedDirectory.open(tmp_path / "out"),
        describe(Checkpoint.open(tmp_path / "plain")).layers[1].projections,
    )
    records = opened.blob(gate.packed_name.replace("gate_proj", "residuals")).dequantize()
    fine = torch.from_numpy(records[2]).chunk(2, 1)[0] + torch.from_numpy(opened.blob(gate.packed_name).dequantize()[2])
    fine = balance_of(opened.path).restored(gate.packed_name, fine)
    assert torch.equal(gate.expert(2), fine.bfloat16())
    assert_same_function(tmp_path / "out", tmp_path / "plain")
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "out"), "--matrices"]).output
    assert "int4 residuals" in shown and "coded" in shown and "not refined" in shown and "skipped" not in shown


def test_the_paper_s_form_generates_streams_exports_and_is_shown(mixtral: Path, text: Path, tmp_path: Path) -> None:
    directory = tmp_path / "packed"
    compress(mixtral, directory, method=paper(text))
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
    first, last = torch.from_numpy(opened.blob(down.packed_name).dequantize()[2]).chunk(2, 1)
    first = balance_of(directory).restored(gate.packed_name, first)
    assert torch.equal(gate.expert(2), first.bfloat16()) and torch.equal(down.expert(2), last.T.bfloat16())
    assert up.expert(2).shape == gate.expert(2).shape
    with pytest.raises(UnsupportedModelError, match="only group-wise"):
        export(directory, tmp_path / "gguf", to="compressed-tensors")


@pytest.mark.parametrize("form", [method, paper], ids=["refined", "paper"])
@pytest.mark.parametrize("sparsity", [0.0, 1.0])
def test_nothing_and_everything_may_be_skipped(
    mixtral: Path, text: Path, tmp_path: Path, sparsity: float, form: Callable[..., Floe]
) -> None:
    compress(mixtral, tmp_path / "out", method=form(text, sparsity=sparsity, dense_layers=0))
    model = moepack.load(tmp_path / "out", dtype="float32")
    support.logits(model)
    shares = {module.computed / module.asked for module in sparse_modules(model)}
    assert shares == {1.0 - sparsity}


def test_experts_without_tokens_get_the_threshold_of_their_layer(mixtral: Path, text: Path, tmp_path: Path) -> None:
    report = compress(mixtral, tmp_path / "out", method=paper(text, samples=1, sequence_length=2))
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
    form, last = (paper, 3) if directory.name == "paper" else (method, 5)

    def failing(self: Floe, *given: Any) -> Any:
        if len(packed) == last:
            raise KeyboardInterrupt
        packed.append(1)
        return pack(self, *given)

    monkeypatch.setattr(Floe, "pack", failing)
    with pytest.raises(KeyboardInterrupt):
        compress(mixtral, tmp_path / "out", method=form(text))
    monkeypatch.undo()
    assert compress(mixtral, tmp_path / "out", method=form(text)).resumed_weights > 0
    for file in sorted(directory.glob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name


def test_damaged_thresholds_and_records_are_found(directory: Path, tmp_path: Path) -> None:
    opened = PackedDirectory.open(directory)
    name = next(name for name, record in opened.manifest.packed().items() if record.kind == "channels")
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
        {"coarse_bits": 9.0},
        {"dense_layers": -1},
        {"up_bits": 5, "paper_form": True},
        {"group_size": 7, "paper_form": True},
        {"solver": "x", "paper_form": True},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            create("floe", calibration=str(text), **wrong)


def test_settings_of_the_other_form_are_refused_by_its_name(text: Path, mixtral: Path, tmp_path: Path) -> None:
    for setting, value in {"up_bits": 2, "group_size": 64, "solver": "lsq"}.items():
        with pytest.raises(ValueError, match=f"{setting} only apply to the paper.s form; set paper_form"):
            method(text, **{setting: value})
        assert getattr(paper(text), setting) == value
    with pytest.raises(ValueError, match=r"coarse_bits: the paper's form \(paper_form, --paper-form\) has no"):
        paper(text, coarse_bits=2.0)
    arguments = ["compress", str(mixtral), str(tmp_path / "out"), "--method", "floe", "--calibration", str(text)]
    refused = CliRunner().invoke(app, [*arguments, "--up-bits", "2"])
    assert refused.exit_code == 2 and "--paper-form" in refused.output and not (tmp_path / "out").exists()


def test_defaults_and_recorded_settings_match_the_form(directory: Path) -> None:
    settings = PackedDirectory.open(directory).manifest.settings
    own = {"refined": {"coarse_bits": 2.0, "bits": 4, "dense_layers": 0}, "paper": {"paper_form": True, "up_bits": 2}}
    assert own[directory.name].items() <= settings.items() and settings["sparsity"] == 0.8
    assert ("coarse_bits" in settings) != ("up_bits" in settings)


def test_the_plan_s_size_equals_the_written_size(directory: Path, mixtral: Path, text: Path, tmp_path: Path) -> None:
    form = paper if directory.name == "paper" else method
    (part,) = estimate(mixtral, tmp_path / "out", form(text)).parts
    layers = describe(Checkpoint.open(mixtral)).layers
    weights = sum(math.prod(projection.shape) for layer in layers for projection in layer.projections)
    manifest = PackedDirectory.open(directory).manifest
    assert part.weights == weights == Totals.of(manifest).experts.weights
    assert weights == add_up(manifest, read_rows(manifest))["weights"]
    packed = sum(record.nbytes for record in PackedDirectory.open(directory).manifest.packed().values())
    assert part.after == pytest.approx(packed, rel=0.25) and not part.exact


def test_coarse_copies_lose_as_much_of_a_model_in_other_scales(tmp_path: Path) -> None:
    apart = []
    for model in (TINY_MOE, rescaled(TINY_MOE, tmp_path / "rescaled")):
        out = tmp_path / f"packed {model.name}"
        compress(model, out, method=method(NOVEL, sequence_length=128, sparsity=1.0))
        apart.append(moepack.evaluate(out, NOVEL, 6_000, reference=model).kl)
    assert apart[0] > 0.01 and apart[1] == pytest.approx(apart[0], rel=0.1)


def test_importance_is_reported_as_unknown_if_the_model_does_not_fit(
    mixtral: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any("float32" in note for note in compress(mixtral, tmp_path / "one", method=method(text)).notes)
    monkeypatch.setattr("moepack.methods.rate.importance.fisher", lambda *_: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = compress(mixtral, tmp_path / "two", method=method(text))
    assert any("float32" in note for note in report.notes)
    assert torch.isfinite(support.logits(moepack.load(tmp_path / "two", dtype="float32"))).all()


@pytest.mark.parametrize("form", [method, paper], ids=["refined", "paper"])
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "deepseek_v2"])
def test_every_gated_architecture_runs(
    tiny_checkpoint: Any, architecture: str, form: Callable[..., Floe], text: Path, tmp_path: Path
) -> None:
    compress(tiny_checkpoint(architecture), tmp_path / "out", method=form(text))
    model = moepack.load(tmp_path / "out", dtype="float32")
    assert torch.isfinite(support.logits(model)).all() and sparse_modules(model)


def test_the_paper_s_solver_runs(mixtral: Path, text: Path, tmp_path: Path) -> None:
    compress(mixtral, tmp_path / "out", method=paper(text, solver="hqq"))
    assert torch.isfinite(support.logits(moepack.load(tmp_path / "out", dtype="float32"))).all()


@pytest.mark.parametrize("form", [method, paper], ids=["refined", "paper"])
@pytest.mark.parametrize(
    ("family", "runs"),
    [
        ("qwen2_moe", True), ("glm4_moe", True), ("ernie4_5_vl_moe", True), ("dots3_note", True),
        ("gpt_oss", False), ("dbrx", False), ("gemma4", False), ("llama4_text", False), ("jetmoe", False),
    ],
)  # fmt: skip
def test_a_family_runs_or_is_refused_before_a_weight_is_read(
    saved: Callable[[str], Path],
    family: str,
    runs: bool,
    form: Callable[..., Floe],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Experts of a vision tower, which no text reaches, are also packed."""
    windows = torch.randint(3, 60, (3, 24), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(CalibrationRequest, "load", lambda *_: decoder_samples(windows))
    settings = {"sparsity": 0.5} if form is paper else {"sparsity": 0.5, "coarse_bits": 5.0}
    chosen, out = form(text, **settings), tmp_path / "out"
    if not runs:
        monkeypatch.setattr(Checkpoint, "tensor", None)
        for job in (estimate, compress):
            with pytest.raises(UnsupportedModelError, match=r"does not compute down\(SiLU\(gate x\) \* up x\)"):
                job(saved(family), out, method=chosen)
        assert not any(tmp_path.iterdir())
        return
    compress(saved(family), out, method=chosen)
    model = moepack.load(out, dtype="float32", mode="exact")
    with torch.no_grad():
        assert torch.isfinite(model(windows).logits).all()
    assert sparse_modules(model) and moepack.verify(out).ok


def test_rates_below_the_metadata_name_the_minimum(
    saved: Callable[[str], Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = torch.randint(3, 60, (3, 24), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(CalibrationRequest, "load", lambda *_: decoder_samples(windows))
    with pytest.raises(ValueError, match=r"coarse copies: .* bits per weight, .*\(--coarse-bits\).*\(--paper-form\)"):
        compress(saved("qwen2_moe"), tmp_path / "out", method=method(text))

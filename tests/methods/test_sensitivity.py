"""Coded integers are invariant to the scales in which a function is written: balance, factors, whole models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import moepack
from moepack import _core
from moepack.calibration import CalibrationSettings
from moepack.calibration.fisher import Sensitivity, fisher
from moepack.calibration.kept import KeptSensitivity
from moepack.calibration.load import CalibrationRequest, load_samples
from moepack.calibration.samples import decoder_samples
from moepack.calibration.text import BUILT_IN
from moepack.checkpoint import Checkpoint, describe
from moepack.format.directory import PackedDirectory
from moepack.methods import Auto, Rate
from moepack.methods.rate.importance import find_balances, find_importance
from moepack.methods.rate.scales import scales_of
from moepack.solvers.balance import Matrices, balance
from places import NOVEL, TINY_MOE


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def powers(count: int, seed: int) -> Tensor:
    """Return powers of two, approximately log-normal with deviation 1; they are exact in every floating-point type."""
    return 2.0 ** (1.44 * drawn(count, seed=seed)).round()


# ---- balance


@pytest.mark.parametrize("experts", [1, 3])
def test_balanced_matrices_have_even_rows_and_columns(experts: int) -> None:
    weights = drawn(experts, 40, 24) * drawn(40, 1, seed=1).exp() * drawn(experts, 1, 24, seed=2).exp()
    (found,) = balance([Matrices(weights.shape, lambda expert: weights[expert])])
    even = weights.abs() / (found.rows[..., None] * found.columns[:, None])
    assert torch.allclose(even.mean(2), torch.ones(experts, 40), atol=1e-5)
    assert torch.allclose(even.mean(1), torch.ones(experts, 24), atol=0.02)


def test_rescaling_moves_the_factors_alone() -> None:
    weights, rows, columns = drawn(2, 32, 16), powers(32, 1), powers(16, 2)
    other = weights * rows[:, None] * columns
    (before,), (after,) = (balance([Matrices(w.shape, lambda e, w=w: w[e])]) for w in (weights, other))
    before, after = (1 / (own.rows[..., None] * own.columns[:, None]) for own in (before, after))
    assert torch.allclose(other * after, weights * before, rtol=0.02, atol=1e-4)


def test_tensors_of_one_input_share_columns_and_zeros_do_no_harm() -> None:
    gate, up = drawn(4, 8, 6), drawn(4, 8, 6, seed=1)
    gate[1], up[:, 3], gate[:, :, 2], up[:, :, 2] = 0, 0, 0, 0
    first, second = balance([Matrices(w.shape, lambda e, w=w: w[e]) for w in (gate, up)])
    assert first.columns.shape == (1, 6) and torch.equal(first.columns, second.columns)
    assert bool(torch.cat([first.rows, second.rows]).gt(0).all()) and first.columns[0, 2] == 1
    assert torch.equal(first.rows[1], torch.ones(8))


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_empty_matrices_have_factors_of_one(shape: tuple[int, int, int]) -> None:
    weights = torch.ones(shape)
    (found,) = balance([Matrices(shape, lambda expert: weights[expert])])
    assert torch.equal(found.rows, torch.ones(shape[:2])) and torch.equal(found.columns, torch.ones(shape[0], shape[2]))


# ---- factors


def test_an_error_counts_one_on_average_after_scaling() -> None:
    """With F of rank one, the mean of F over the squared factors is 1, as one step for all tensors requires."""
    weights, by_row, by_column = drawn(2, 32, 16), drawn(2, 32, 1, seed=1).exp(), drawn(1, 1, 16, seed=2).exp()
    squares = (7 * by_row * by_column).double()
    (known,) = balance([Matrices(weights.shape, lambda expert: weights[expert])])
    rows, columns = known.rows.square().double(), known.columns.square().double()
    of_rows, of_columns = (squares @ columns[..., None])[..., 0] * rows, (rows[:, None] @ squares)[:, 0] * columns
    sensitivity = Sensitivity(float(squares.mean()), of_rows / 16, of_columns / 32)
    scales = scales_of(known, sensitivity)
    counts = squares / (scales.rows[..., None] * scales.columns[:, None]).square()
    assert float(counts.mean()) == pytest.approx(1, rel=0.15)  # factors are steps of an eighth of an octave
    assert counts.std() / counts.mean() < squares.std() / squares.mean()


def test_weights_are_divided_by_the_stored_scales() -> None:
    weights = drawn(3, 20, 12)
    (known,) = balance([Matrices(weights.shape, lambda expert: weights[expert])])
    scales = scales_of(known, 1.0)
    rows, columns = scales.stored(0.25)
    assert torch.equal(rows, rows.bfloat16().float()) and torch.equal(columns, columns.bfloat16().float())
    codes = torch.stack([(scales.scaled(expert, weights[expert]) / 0.25).round() for expert in range(3)])
    values = codes * rows[..., None] * columns[:, None]
    assert (values - weights).abs().max() <= 0.51 * (rows[..., None] * columns[:, None]).max()


@pytest.mark.parametrize("axis", [0, 1])
def test_factors_follow_the_order_of_rows_and_columns(axis: int) -> None:
    weights = drawn(3, 20, 12)
    (known,) = balance([Matrices(weights.shape, lambda expert: weights[expert])])
    order = torch.stack([drawn(weights.shape[axis + 1], seed=seed).argsort() for seed in range(3)])
    for columns in (known.columns, known.columns[:1]):
        scales = scales_of(replace(known, columns=columns), 1.0)
        other = scales.reordered(order, axis)
        for expert, matrix in enumerate(weights):
            expected = scales.scaled(expert, matrix).index_select(axis, order[expert])
            assert torch.equal(other.scaled(expert, matrix.index_select(axis, order[expert])), expected)


# ---- whole models


def rescaled(model: Path, out: Path) -> Path:
    """Write the same function in other scales: norms and their readers, up and down, values and output."""
    shutil.copytree(model, out)
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        _rescale(tensors, json.loads((model / "config.json").read_text()))
        save_file(tensors, file, metadata={"format": "pt"})
    return out


def _rescale(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    def scale(name: str, factors: Tensor) -> None:
        tensors[name] = (tensors[name].float() * factors).to(tensors[name].dtype)

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = hidden // config["num_attention_heads"]
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    for layer in range(config["num_hidden_layers"]):
        path, own = f"model.layers.{layer}", powers(hidden, 10 * layer)
        scale(f"{path}.input_layernorm.weight", own)
        for name in "qkv":
            scale(f"{path}.self_attn.{name}_proj.weight", 1 / own)
        values = powers(config["num_key_value_heads"] * width, 10 * layer + 1)
        scale(f"{path}.self_attn.v_proj.weight", values[:, None])
        repeated = values.view(-1, 1, width).expand(-1, groups, -1).flatten()
        scale(f"{path}.self_attn.o_proj.weight", 1 / repeated)
        own = powers(hidden, 10 * layer + 2)
        scale(f"{path}.post_attention_layernorm.weight", own)
        for name in [name for name in tensors if name.startswith(f"{path}.") and _reads_norm(name)]:
            scale(name, 1 / own)
        for expert in range(config["num_local_experts"]):
            channels = powers(inner, 100 * layer + expert + 3)
            scale(f"{path}.block_sparse_moe.experts.{expert}.w3.weight", channels[:, None])
            scale(f"{path}.block_sparse_moe.experts.{expert}.w2.weight", 1 / channels)


def _reads_norm(name: str) -> bool:
    return name.endswith((".gate.weight", ".w1.weight", ".w3.weight"))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The example model, and the same function in other scales."""
    other = rescaled(TINY_MOE, tmp_path_factory.mktemp("rescaled") / "model")
    loss = [moepack.evaluate(model, NOVEL, 4000).loss for model in (TINY_MOE, other)]
    assert loss[0] == pytest.approx(loss[1], abs=2e-3)
    return TINY_MOE, other


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (Auto, {"calibration": None}),
        (Auto, {"calibration": BUILT_IN, "samples": 4, "sequence_length": 64}),
        (Rate, {"roles": "none"}),
    ],
)
def test_a_model_in_other_scales_loses_as_much(
    both: tuple[Path, Path], method: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Loss and divergence agree. Rounding differs in the last bits, which moves the divergence by a few hundredths."""
    losses, apart = [], []
    for number, model in enumerate(both):
        out = tmp_path / str(number)
        moepack.compress(model, out, method=method(bits_per_weight=3.0, **settings))
        found = moepack.evaluate(out, NOVEL, 12_000, reference=model)
        losses.append(found.loss)
        apart.append(found.kl)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert apart[0] > 0.01 and apart[1] == pytest.approx(apart[0], rel=0.1)


# ---- the built-in text


def test_the_default_reads_the_built_in_text_where_the_model_can_run(
    mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(mixtral)
    model = describe(checkpoint)

    def taken(**settings: Any) -> str | None:
        plan = Auto(ratio=0.8, samples=2, sequence_length=32, **settings).plan(checkpoint, model)
        return None if plan.request is None else str(plan.request.source)

    assert taken() == BUILT_IN
    assert taken(calibration="none") is None and taken(prefer="speed") == "built-in"
    assert taken(calibration=str(NOVEL)) == str(NOVEL)
    monkeypatch.setattr("moepack.methods.request.total_bytes", lambda: 1000)
    assert taken() is None and taken(calibration=str(NOVEL)) == str(NOVEL)


def test_measurements_are_kept_and_damaged_ones_repeated(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs: list[int] = []

    def counted(*given: Any) -> Any:
        runs.append(1)
        return fisher(*given)

    monkeypatch.setattr("moepack.methods.rate.importance.fisher", counted)

    def scales(size: str) -> dict[str, Any]:
        method, checkpoint = Auto(size, calibration=BUILT_IN, samples=2, sequence_length=32), Checkpoint.open(shallow)
        plan = method.plan(checkpoint, describe(checkpoint))
        return dict(plan.packer.coder.importance.scales)  # type: ignore[attr-defined]

    first, second = scales("2MB"), scales("1MB")
    assert len(runs) == 1
    checkpoint = Checkpoint.open(shallow)
    kept = KeptSensitivity(checkpoint, load_samples(checkpoint, BUILT_IN, 2, 32))
    read = kept.read()
    assert read is not None and {name for name, own in read.items() if own.metric is not None} == {
        linear.source for dense in describe(checkpoint).dense for linear in dense.linears if "layers" not in linear.name
    }
    kept.file.write_bytes(kept.file.read_bytes()[:100])
    third = scales("2MB")
    assert len(runs) == 2
    layers = [name for name in first if "layers" in name]  # rows of tokens follow the size
    for other in (second, third):
        assert all(torch.equal(first[name].rows, other[name].rows) for name in layers)


def test_experts_that_no_text_reaches_are_packed_with_factors_of_their_weights(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts of a vision tower keep these factors; the sensitivity of the others is measured."""
    windows = torch.randint(3, 60, (3, 24), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(CalibrationRequest, "load", lambda *_: decoder_samples(windows))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint = Checkpoint.open(saved("ernie4_5_vl_moe"))
    model, request = describe(checkpoint), CalibrationRequest("", 3, 24, CalibrationSettings())
    found, again = (find_importance(checkpoint, model, request) for _ in "12")
    without = find_importance(checkpoint, model, None)
    names = {part.packed_name for layer in model.layers for part in layer.projections}
    unread = {name for name in names if "vision" in name}
    assert unread and found.measured and unread < names
    for name in names:
        same = torch.equal(found.scales[name].rows, without.scales[name].rows)
        assert same == (name in unread) and torch.equal(found.scales[name].rows, again.scales[name].rows)
    moepack.compress(checkpoint.path, tmp_path / "out", method=Rate(6.0, calibration=str(NOVEL)))
    assert moepack.verify(tmp_path / "out").ok


def test_sensitivity_of_experts_is_that_of_their_matrices(tmp_path: Path) -> None:
    """F of each projection is read from parameters that contain gate and up of all experts."""
    checkpoint = Checkpoint.open(TINY_MOE)
    model = describe(checkpoint)
    samples = load_samples(checkpoint, str(NOVEL), 2, 32)
    found = fisher(checkpoint, model, find_balances(model), samples, torch.device("cpu"))
    assert found is not None
    for layer in model.layers:
        for part in layer.projections:
            own = found[part.packed_name]
            assert own.rows.shape == part.shape[:2] and own.columns.shape == (part.shape[0], part.shape[2])
            assert float(own.rows.mean()) == pytest.approx(float(own.columns.mean()), rel=1e-4)


def test_packed_tensors_have_scales_of_columns(shallow: Path, tmp_path: Path) -> None:
    moepack.compress(shallow, tmp_path / "out", method=Auto("1MB", calibration=None))
    packed = PackedDirectory.open(tmp_path / "out")
    for name, record in packed.manifest.packed().items():
        columns = packed.blob(name).parameters("columns")
        first = name.endswith(("gate_proj", "up_proj"))
        assert record.details["column_scales"] and record.details["dtype"] == "bfloat16"
        assert columns.shape[0] == (1 if first or record.details.get("role") else 8)


# ---- experts that the text hardly reaches


@pytest.mark.parametrize("method", [pytest.param(Auto, marks=pytest.mark.slow), Rate])
def test_experts_that_few_tokens_reach_are_kept(method: type[Auto] | type[Rate], shallow: Path, tmp_path: Path) -> None:
    """64 tokens reach some experts twice or never; their weights still stay near the original."""
    text = tmp_path / "text.txt"
    text.write_text(NOVEL.read_text(encoding="utf-8")[3000:3400], encoding="utf-8")
    few = method(bits_per_weight=2.5, calibration=str(text), samples=2, sequence_length=64)
    report = moepack.compress(shallow, tmp_path / "out", method=few)
    assert any("no calibration token reached" in note and "error compensation" in note for note in report.notes)
    tensors = PackedDirectory.open(report.path).tensors()
    for layer in describe(Checkpoint.open(shallow)).layers:
        for part in layer.projections:
            packed = torch.from_numpy(_core.PackedTensor(tensors[part.packed_name]).dequantize())
            for expert, found in enumerate(packed):
                weights = part.expert(expert).float()
                error = float((weights - found).square().sum() / weights.square().sum())
                assert error < 0.9, (part.packed_name, expert, error)

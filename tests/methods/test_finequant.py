"""The method `finequant`: rules for group sizes, bits by role, and the whole path from checkpoint to running model."""

import copy
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import moepack
import packed_support as support
import tiny_models
from moepack import _core
from moepack.calibration.stage import layer_tensors
from moepack.checkpoint import Checkpoint, describe
from moepack.cli import main
from moepack.format import PackedDirectory
from moepack.methods import create
from moepack.methods.finequant import FineQuant
from moepack.methods.finequant.sizes import (
    free_size,
    halving_ratios,
    halvings,
    packed_bytes,
    sizes_for,
    stored_size,
)
from moepack.methods.roles import parse_dense_bits
from moepack.modules.linear import PackedLinear
from moepack.pipeline import Assignment
from places import NOVEL, TINY_MOE
from runtime_support import ARCHITECTURES, logits, tiny_model, write_packed


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 17, 100), (2, 16, 64), (2, 33, 257), (0, 4, 64), (3, 0, 64), (3, 4, 0)]
)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packed_bytes_equals_the_core_s_output(bits: int, symmetric: bool, shape: tuple[int, int, int]) -> None:
    for size in (None, 16, 32, 64, 128, 256):
        groups = 0 if not shape[2] else -(-shape[2] // (size or shape[2]))
        parameters = np.zeros((*shape[:2], groups), np.float32)
        blob = _core.encode_groupwise(
            np.zeros(shape, np.uint8), parameters, None if symmetric else parameters,
            bits=bits, group_size=size or max(shape[2], 1), ndim=3,
        )  # fmt: skip
        assert blob.nbytes == packed_bytes(shape, bits, size, symmetric)


def naive_ratio(weight: np.ndarray, parent: int, child: int, over: Any = min) -> float:
    ratios = []
    for row in np.abs(weight):
        for start in range(0, len(row), child):
            outer = row[start // parent * parent : (start // parent + 1) * parent].max()
            ratios.append(row[start : start + child].max() / outer if outer else 1.0)
    return float(over(ratios))


@pytest.mark.parametrize("columns", [16, 17, 64, 100, 300, 512])
def test_halving_ratios(columns: int) -> None:
    weight = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns))
    weight[3, columns // 2 :] = 0
    weight[5] = 0
    widths = halvings(columns)
    assert widths[0] == columns and widths[1:] == [2**k for k in range(12, 3, -1) if 2**k < columns]
    expected = [naive_ratio(weight.numpy(), a, b) for a, b in pairwise(widths)]
    assert np.allclose(halving_ratios(weight), expected)


@pytest.mark.parametrize("columns", [0, 16, 17, 64, 100, 128, 256, 300, 512, 896])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_free_size_is_the_smallest_that_costs_nothing(columns: int, symmetric: bool) -> None:
    shape = (3, 20, columns)
    for size in sizes_for(columns):
        limit = packed_bytes(shape, 4, size, symmetric)
        found = free_size(shape, size, symmetric)
        assert packed_bytes(shape, 4, found, symmetric) <= limit
        for other in sizes_for(columns):
            if other is not None and (found is None or other < found):
                assert packed_bytes(shape, 4, other, symmetric) > limit
    assert free_size((1, 64, 256), None) == 128  # 16 rows of two scales are one register
    assert free_size((1, 64, 256), None, symmetric=False) is None


def test_the_papers_rule_halves_while_ranges_fall() -> None:
    ratios = [0.1, 0.2, 0.3, 0.9, 0.1]  # 2048 -> 1024 -> 512 -> 256 -> 128 -> 64
    assert stored_size(2048, [0.9, *ratios], 0.35) is None
    assert stored_size(2048, [0.1, 0.9], 0.35) == 256  # ends at 1024: the next that can be stored
    assert stored_size(2048, ratios, 0.35) == 256
    assert stored_size(2048, [0.1] * 5, 0.35) == 64
    assert stored_size(2048, [0.1] * 7, 0.35) == 16
    assert stored_size(16, [], 0.35) is None


def test_the_papers_rule_finds_outliers() -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    assert stored_size(512, halving_ratios(weight), 0.3) is None
    weight[::5, 37] = 40.0
    assert stored_size(512, halving_ratios(weight), 0.3) in (16, 32, 64, 128, 256)


def test_dense_bits() -> None:
    assert parse_dense_bits(None) == {}
    assert parse_dense_bits(8) == parse_dense_bits("8") == {"attention": 8, "shared": 8, "mlp": 8}
    assert parse_dense_bits("shared=4,attention=3") == {"attention": 3, "shared": 4}
    for wrong in ("5", "router=8", "attention", "attention=x", "attention=4,8", "attention=4,attention=8"):
        with pytest.raises(ValueError, match="dense_bits"):
            parse_dense_bits(wrong)


@pytest.mark.parametrize(
    "settings",
    [
        {"bits": 5}, {"bits": "four"}, {"group_size": 48}, {"group_size": "some"}, {"alpha": 1.0},
        {"bits_per_weight": 4.5}, {"dense_bits": "7"}, {"colour": 1}, {"alpha": 0.3},
        {"group_size": "adaptive", "alpha": 0.0}, {"group_size": "48"}, {"group_size": ""}, {"group_size": 0},
        {"group_size": "budget", "bits_per_weight": math.nan}, {"group_size": "budget", "bits_per_weight": -1.0},
    ],
)  # fmt: skip
def test_unknown_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"bits|group_size|alpha|colour"):
        create("finequant", **settings)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_int8_everywhere_changes_next_to_nothing(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    method = FineQuant(bits=8, group_size=32, dense_bits="attention=8,shared=8,mlp=8,head=8")
    directory = write_packed(model, tmp_path / "packed", method)
    assert moepack.verify(directory).ok
    loaded = moepack.load(directory)
    assert any(isinstance(module, PackedLinear) for module in loaded.modules())
    expected, found = logits(model), logits(loaded)
    # The median: a token of a random model may change its expert.
    assert 0 < (found - expected).abs().median() / expected.abs().median() < 0.05


def test_the_packed_model_is_the_dequantized_one(tmp_path: Path) -> None:
    """The packed model gives the logits of the source model with its dequantized weights, norms and routers."""
    model = tiny_model("deepseek_v2")
    directory = write_packed(model, tmp_path / "packed", FineQuant(bits=3, group_size=16, dense_bits="4"))
    opened = PackedDirectory.open(directory)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for file in directory.glob("*.safetensors"):
            for name, values in load_file(file).items():
                if name in parameters and name not in opened.manifest.packed():
                    parameters[name].copy_(values)
        for name, record in opened.manifest.packed().items():
            values = torch.from_numpy(opened.blob(name).dequantize())
            if not record.experts:
                parameters[name].copy_(values[0])
                continue
            experts = model.get_submodule(record.module)
            rows = record.shape[1]
            if record.projection == "down_proj":
                experts.down_proj.copy_(values)
            else:
                first = 0 if record.projection == "gate_proj" else rows
                experts.gate_up_proj[:, first : first + rows].copy_(values)
    torch.testing.assert_close(logits(moepack.load(directory, mode="exact")), logits(model), rtol=1e-4, atol=1e-4)


@pytest.fixture
def outliers(tmp_path: Path) -> Path:
    """A checkpoint with outliers in all columns of one layer, which small groups confine."""
    model = tiny_models.build("deepseek_v2", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if "layers.1.mlp.experts" in name and "up_proj" in name:
            rows = torch.arange(len(tensor))
            tensor[rows, 5 * rows % tensor.shape[1]] += 1.0
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model


def sizes(directory: Path) -> dict[str, int]:
    records = PackedDirectory.open(directory).manifest.packed().items()
    return {name: record.details["group_size"] for name, record in records}


def test_adaptive_groups_follow_the_weights(outliers: Path, tmp_path: Path) -> None:
    moepack.compress(outliers, tmp_path / "out", method=FineQuant(group_size="adaptive", alpha=0.25, dense_bits=8))
    found = sizes(tmp_path / "out")
    assert found["model.layers.1.mlp.experts.up_proj"] == 16
    assert found["model.layers.1.mlp.experts.gate_proj"] == 32  # costs as much as its row of 64
    assert moepack.verify(tmp_path / "out").ok


def test_a_budget_goes_where_the_error_is_and_is_kept(outliers: Path, tmp_path: Path) -> None:
    rate = 4.75
    report = moepack.compress(
        outliers, tmp_path / "out", method=FineQuant(group_size="budget", bits_per_weight=rate, dense_bits=4)
    )
    found = sizes(tmp_path / "out")
    assert found["model.layers.1.mlp.experts.up_proj"] < max(found.values())
    packed = PackedDirectory.open(tmp_path / "out").manifest.packed().values()
    weights = sum(math.prod(record.shape) for record in packed)
    assert rate - 0.5 < 8 * sum(record.nbytes for record in packed) / weights <= rate
    assert report.dense_weights and moepack.verify(tmp_path / "out").ok
    with pytest.raises(ValueError, match="one scale per row takes"):
        moepack.compress(outliers, tmp_path / "no", method=FineQuant(group_size="budget", bits_per_weight=3.0))


def test_a_budget_has_less_error_than_the_fixed_size_of_the_same_bytes(outliers: Path, tmp_path: Path) -> None:
    def total(name: str, method: FineQuant) -> tuple[float, int]:
        moepack.compress(outliers, tmp_path / name, method=method)
        opened = PackedDirectory.open(tmp_path / name)
        checkpoint = Checkpoint.open(outliers)
        _, form = Assignment(method).balanced(checkpoint, describe(checkpoint))
        error, nbytes = 0.0, 0
        for layer in form.layers:
            for projection in layer.projections:
                values = torch.from_numpy(opened.blob(projection.packed_name).dequantize())
                given = torch.stack([projection.expert(each).float() for each in range(projection.shape[0])])
                error += float((values - given).square().sum() / given.square().mean())
                nbytes += opened.manifest.tensors[projection.packed_name].nbytes
        return error, nbytes

    fixed, bytes_fixed = total("fixed", FineQuant(group_size=64))
    budget, bytes_budget = total("budget", FineQuant(group_size="budget"))
    assert bytes_budget <= bytes_fixed and budget < 0.8 * fixed


@pytest.mark.parametrize("group_size", [64, "row", "adaptive", "budget"])
def test_bytes_do_not_depend_on_threads_or_interruptions(group_size: Any, mixtral: Path, tmp_path: Path) -> None:
    support.assert_same_bytes(mixtral, tmp_path, lambda: FineQuant(bits=3, group_size=group_size, dense_bits=8), 12)


@pytest.mark.parametrize("group_size", [64, "row", "adaptive", "budget"])
def test_the_bound_holds(group_size: Any) -> None:
    method = FineQuant(bits=4, group_size=group_size, dense_bits="attention=8")
    for shape in [(1, 1, 1), (3, 65, 100), (0, 3, 4), (2, 5, 0)]:
        for size in sizes_for(shape[2]) if isinstance(group_size, str) else (64,):
            if group_size != "row" or size is None:
                assert packed_bytes(shape, 4, size) <= method.bound(shape)
                assert packed_bytes((1, *shape[1:]), 8, size) <= method.bound((1, *shape[1:]), "attention")


@pytest.mark.parametrize("group_size", [64, "adaptive", "budget"])
def test_a_weight_that_is_not_a_number_names_its_tensor(group_size: Any, mixtral: Path, tmp_path: Path) -> None:
    model = tiny_models.build("mixtral", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if "experts.2.w3" in name)
    tensors[name][5, 7] = torch.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(moepack.InvalidTensorError, match="holds nan") as caught:
        moepack.compress(model, tmp_path / "out", method=FineQuant(group_size=group_size))
    assert caught.value.tensor and "experts" in caught.value.tensor


def test_the_command_line(mixtral: Path, tmp_path: Path, capsys: Any) -> None:
    def run(*arguments: str) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as caught:
            main([*map(str, arguments)])
        return caught.value.code, "".join(capsys.readouterr())

    out = tmp_path / "out"
    common = ("compress", mixtral, out, "--method", "finequant", "-q")
    code, text = run(*common, "--bits", "4", "--group-size", "32", "--dense-bits", "attention=8", "--report")
    assert code == 0 and "dense " in text and "int4 group 32" in text and "int8 group 32" in text
    code, text = run("inspect", out, "--json")
    content = json.loads(text)
    assert content["settings"]["dense_bits"] == "attention=8"
    assert all(1e-5 < row["error"] < 0.02 for row in content["tensors"])
    assert run("verify", out)[0] == 0
    assert run("generate", out, "--prompt", "abc", "--max-new-tokens", "4")[0] == 0
    assert run(*common[:2], tmp_path / "b", *common[3:], "--group-size", "budget", "--bits-per-weight", "2")[0] == 2
    assert run(*common[:2], tmp_path / "b", *common[3:], "--group-size", "48")[0] == 2
    without_effect = [
        ("--codes", "plain"), ("--rank", "uniform:8"), ("--grid", "codebook"), ("--steps", "3"),
        ("--alpha", "0.3"), ("--bits-per-weight", "4.5"),
    ]  # fmt: skip
    for option in without_effect:
        assert run(*common[:2], tmp_path / "b", *common[3:], *option)[0] == 2, option
    assert not (tmp_path / "b").exists()


def test_the_mode_of_a_loaded_model(tmp_path: Path) -> None:
    directory = write_packed(tiny_model("qwen3_moe"), tmp_path / "packed", FineQuant(dense_bits=8))
    exact, approximate = moepack.load(directory), moepack.load(directory, mode="int8")
    assert not torch.equal(logits(exact), logits(approximate))
    assert torch.equal(logits(copy.deepcopy(approximate)), logits(approximate))
    moepack.set_compute_mode("int8", exact)
    assert torch.equal(logits(exact), logits(approximate))
    moepack.set_compute_mode("exact", exact)
    assert torch.equal(logits(exact), logits(moepack.load(directory, mode="exact")))
    with pytest.raises(ValueError, match="mode must be one of"):
        moepack.load(directory, mode="int4")


STAGES = 8
"""Stages that a job solves before it is interrupted, in the second of two layers."""


def with_text(text: Path = NOVEL, **settings: Any) -> FineQuant:
    return FineQuant(calibration=str(text), samples=6, sequence_length=64, group=3, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"bits": 3},
        {"bits": 2, "symmetric": False, "group_size": 32},
        {"bits": 4, "group_size": "adaptive", "dense_bits": 4},
        {"bits": 3, "group_size": "budget"},
        {"bits": 2, "grid": "codebook", "dense_bits": "attention=8"},
    ],
    ids=str,
)
def test_solved_on_a_text(settings: dict[str, Any], mixtral: Path, tmp_path: Path) -> None:
    """Sizes are those without a text; the packed model computes what the solver chose; resumed bytes are the same."""
    report = moepack.compress(mixtral, tmp_path / "packed", method=with_text(**settings))
    assert all("quantized" not in note for note in report.notes)
    manifest = PackedDirectory.open(tmp_path / "packed").manifest
    kinds = {record.kind for record in manifest.packed().values() if record.experts}
    assert kinds == {"codebook" if settings.get("grid") else "groupwise"}
    if not settings.get("grid"):
        moepack.compress(mixtral, tmp_path / "free", method=FineQuant(**settings))
        free = PackedDirectory.open(tmp_path / "free").manifest.packed()
        assert {name: record.nbytes for name, record in manifest.packed().items()} == {
            name: record.nbytes for name, record in free.items()
        }
    expected = with_text(**settings).expected
    for layer in describe(Checkpoint.open(mixtral)).layers:
        for weights in layer_tensors(layer).values():
            assert manifest.tensors[weights.name].nbytes <= with_text(**settings).bound(weights.shape)
            if expected(weights).exact:
                assert manifest.tensors[weights.name].nbytes == expected(weights).nbytes
    assert torch.isfinite(logits(moepack.load(tmp_path / "packed"))).all()
    with support.interrupted(FineQuant, STAGES):
        moepack.compress(mixtral, tmp_path / "again", method=with_text(**settings))
    assert moepack.compress(mixtral, tmp_path / "again", method=with_text(**settings)).resumed_weights > 0
    assert support.contents(tmp_path / "again") == support.contents(tmp_path / "packed")


@pytest.mark.parametrize("bits", [2, 3])
def test_a_text_lowers_the_loss(bits: int, tmp_path: Path) -> None:
    novel = NOVEL.read_text(encoding="utf-8")
    head, tail = tmp_path / "head.txt", tmp_path / "tail.txt"
    head.write_text(novel[: len(novel) * 3 // 4], encoding="utf-8")
    tail.write_text(novel[len(novel) * 3 // 4 :], encoding="utf-8")
    original = moepack.evaluate(TINY_MOE, tail, 12000).loss
    seen = {"calibration": str(head), "samples": 48, "sequence_length": 256}
    methods = {
        "free": FineQuant(bits),
        "text": FineQuant(bits, **seen),
        "book": FineQuant(bits, grid="codebook", **seen),
    }
    rises = {}
    for name, method in methods.items():
        moepack.compress(TINY_MOE, tmp_path / name, method=method)
        rises[name] = moepack.evaluate(tmp_path / name, tail, 12000).loss - original
    assert rises["text"] < 0.6 * rises["free"], rises
    assert rises["book"] < rises["text"], rises


@pytest.mark.parametrize(
    "settings",
    [
        {"grid": "codebook"},
        {"grid": "codebook", "bits": 8, "calibration": "x"},
        {"grid": "codebook", "group_size": 32, "calibration": "x"},
        {"grid": "codebook", "symmetric": False, "calibration": "x"},
        {"grid": "lattice"},
    ],
    ids=str,
)
def test_grids_that_do_not_exist_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="grid"):
        FineQuant(**settings)


def test_experts_without_tokens_are_rounded_and_named(mixtral: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a")
    for grid in ("integers", "codebook"):
        method = FineQuant(2, calibration=str(short), samples=1, sequence_length=1, grid=grid)
        report = moepack.compress(mixtral, tmp_path / grid, method=method)
        assert any("no calibration token reached" in note for note in report.notes)
        assert torch.isfinite(logits(moepack.load(tmp_path / grid))).all()

"""Warnings for float16 sources whose weights or activations come close to the float16 maximum."""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from moepack import compress
from moepack.errors import MoepackWarning
from moepack.methods.finequant import FineQuant
from moepack.methods.rate import Rate
from moepack.pipeline.report import CompressReport

LIMIT = 65504


def scaled(path: Path, dtype: torch.dtype, factors: dict[str, float]) -> Path:
    """A tiny Mixtral with some tensors scaled to a given largest magnitude."""
    tiny_models.build("mixtral", path)
    tensors = load_file(path / "model.safetensors")
    for name, x in tensors.items():
        largest = next((largest for part, largest in factors.items() if part in name), None)
        tensors[name] = (x if largest is None else x.float() * (largest / x.float().abs().max())).to(dtype)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = (path / "config.json").read_text()
    for known in ("float32", "bfloat16"):
        config = config.replace(f'"{known}"', f'"{str(dtype).removeprefix("torch.")}"')
    (path / "config.json").write_text(config)
    return path


def warned(report: CompressReport, caught: list[warnings.WarningMessage]) -> set[str]:
    """The notes about float16, which are also issued as warnings."""
    notes = {note for note in report.notes if "is in float16" in note}
    assert notes == {str(each.message) for each in caught if "is in float16" in str(each.message)}
    return notes


@pytest.mark.parametrize(
    ("where", "largest", "told"),
    [
        ("experts.0.w1", LIMIT, True),
        ("w2.weight", 2500, True),
        ("q_proj", LIMIT / 2, True),
        ("norm.weight", LIMIT, True),
        ("experts.0.w1", 100, False),
        ("q_proj", 1000, False),
    ],
)
@pytest.mark.parametrize("method", [FineQuant(bits=8), Rate(8.0)])
def test_weights_near_the_limit_are_reported(
    method: FineQuant | Rate, where: str, largest: float, told: bool, tmp_path: Path
) -> None:
    source = scaled(tmp_path / "source", torch.float16, {where: largest})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MoepackWarning)
        notes = warned(compress(source, tmp_path / "packed", method=method), caught)
    # The balanced form, which finequant packs, moves a tensor's scale to the tensor in front of it.
    moved = isinstance(method, FineQuant) and where == "w2.weight"
    assert bool(notes) is (told and not moved)
    if notes:
        (note,) = notes
        assert "weights come close" in note and f"({round(torch.tensor(largest).half().item()):,})" in note
        assert "--dtype bfloat16" in note


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_sources_are_not_warned_of(dtype: torch.dtype, tmp_path: Path) -> None:
    source = scaled(tmp_path / "source", dtype, {"w2.weight": LIMIT})
    report = compress(source, tmp_path / "packed", method=FineQuant(bits=8))
    assert not any("float16" in note for note in report.notes)


def test_a_model_that_config_json_loads_in_float16_is_warned_of(tmp_path: Path) -> None:
    """Its norm is infinite once it is loaded."""
    source = scaled(tmp_path / "source", torch.bfloat16, {"norm.weight": 2 * LIMIT})
    file = source / "config.json"
    file.write_text(file.read_text().replace('"bfloat16"', '"float16"'))
    report = compress(source, tmp_path / "packed", method=FineQuant(bits=8))
    assert any("is in float16" in note and "norm.weight (1" in note for note in report.notes)


@pytest.mark.parametrize(("w1", "told"), [(10.0, True), (0.1, False)])
def test_activations_near_the_limit_are_reported(w1: float, told: bool, tmp_path: Path) -> None:
    """The weights are within the range, but the products of gate and up are not."""
    source = scaled(tmp_path / "source", torch.float16, {"w1.weight": w1, "w3.weight": 10 * w1, "w2.weight": w1})
    (tmp_path / "text.txt").write_text("the sea and the wolf and the fire said " * 60)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MoepackWarning)
        method = Rate(8.0, calibration=str(tmp_path / "text.txt"), samples=4, sequence_length=64)
        notes = warned(compress(source, tmp_path / "packed", method=method), caught)
    assert bool(notes) is told and all("activations come close" in note and "mlp.experts" in note for note in notes)

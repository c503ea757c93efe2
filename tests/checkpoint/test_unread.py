"""Tensors that the model lacks are reported wherever a checkpoint is inspected, and have no effect."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moepack import compress, describe, load
from moepack.checkpoint.quantized import open_checkpoint
from moepack.cli import main
from moepack.integrations.loading import open_model
from moepack.methods import create
from moepack.methods.finequant import FineQuant
from moepack.methods.rate import Rate
from moepack.pipeline.estimate import estimate

IDS = torch.arange(3, 19)[None]
FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v3", "switch_transformers", "glm4_moe", "gpt_oss", "qwen3_next", "dbrx"]

Saved = Callable[..., Path]


def with_strays(source: Path, target: Path, strays: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | strays, target / "model.safetensors", {"format": "pt"})
    return target


def strays_of(source: Path) -> dict[str, torch.Tensor]:
    """An unmerged adapter, a norm, frequencies, an extra layer, and a tower, in addition to valid tensors."""
    tensors = load_file(source / "model.safetensors")
    first = next(name for name, x in tensors.items() if name.endswith(".weight") and x.ndim == 2 and ".0." in name)
    stem = first.removesuffix(".weight")
    layer = stem[: stem.index(".0.") + 2]
    return {
        f"{stem}.lora_A.weight": torch.ones(2, 2),
        f"{stem}.lora_B.default.weight": torch.ones(2, 2),
        f"{layer}.stray_norm.weight": torch.ones(3),
        f"{layer}.rotary_emb.inv_freq": torch.ones(4),
        f"{layer[:-1]}77.mixer.weight": torch.ones(2, 2),
        "some_tower.norm.weight": torch.ones(3),
        "lonely": torch.ones(1),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_exactly_the_stray_tensors_are_reported(family: str, saved: Saved, tmp_path: Path) -> None:
    source = saved(family)
    assert describe(open_checkpoint(source)).unread == ()
    strays = strays_of(source)
    model = describe(open_checkpoint(with_strays(source, tmp_path / "x", strays)))
    assert set(model.unread) == set(strays) and set(strays) <= set(model.dense_names)
    (note,) = (note for note in model.notes if "no effect" in note)
    assert note.startswith(f"{len(strays)} tensors have no effect") and all(name in note for name in strays)
    assert any("is not applied" in note and "merge" in note for note in model.notes)


def test_plan_and_report_agree(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = with_strays(saved("mixtral"), tmp_path / "x", {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
    told = "1 tensor has no effect"
    plan = estimate(source, tmp_path / "packed", create("finequant", bits=8))
    report = compress(source, tmp_path / "packed", method="finequant", bits=8)
    for notes in (plan.notes, report.notes):
        assert any(note.startswith(told) and "q_norm" in note for note in notes)
    with pytest.raises(SystemExit) as ended:
        main(["compress", str(source), str(tmp_path / "no"), "--method", "finequant", "--dry-run"])
    assert not ended.value.code and told in capsys.readouterr().out


def test_strays_change_no_output(saved: Saved, tmp_path: Path) -> None:
    """A stray tensor named like a linear layer of other models is not packed, because the model has no such layer."""
    source = saved("qwen3_moe")
    inner = json.loads((source / "config.json").read_text())["hidden_size"]
    strays = {f"model.layers.0.mlp.{name}_proj.weight": torch.randn(inner, inner) for name in ("gate", "up", "down")}
    strays |= {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.randn(4, inner)}
    place = with_strays(source, tmp_path / "strays", strays)
    want = open_model(source, torch.float32)(IDS).logits
    assert torch.equal(open_model(place, torch.float32)(IDS).logits, want)
    packed = [compress(each, tmp_path / f"{each.name} packed", method=Rate(8.0)).path for each in (source, place)]
    first, second = (load(each, "float32", mode="exact")(IDS).logits for each in packed)
    assert torch.equal(first, second)


def test_many_strays_are_grouped_and_counted(saved: Saved, tmp_path: Path) -> None:
    source = saved("qwen3_moe")
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    strays = {
        f"model.layers.{layer}.self_attn.q_proj.lora_{side}.weight": torch.ones(1)
        for layer in range(layers)
        for side in "AB"
    } | {f"tower_{i}.weight": torch.ones(1) for i in range(20)}
    (note,) = (
        note
        for note in describe(open_checkpoint(with_strays(source, tmp_path / "x", strays))).notes
        if "no effect" in note
    )
    assert f"model.layers.*.self_attn.q_proj.lora_A: {layers} tensors" in note
    assert note.endswith("; 14 more places.") and len(note) < 600


def test_an_adapter_next_to_the_weights_is_reported(saved: Saved, tmp_path: Path) -> None:
    place = Path(shutil.copytree(saved("mixtral"), tmp_path / "x"))
    (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "nowhere"}))
    report = compress(place, tmp_path / "packed", method=FineQuant(bits=8))
    assert any("The checkpoint contains an adapter, which is not applied" in note for note in report.notes)
    assert not (tmp_path / "packed" / "adapter_config.json").exists()


@pytest.mark.parametrize(
    "end", ["lora_A.weight", "lora_embedding_B", "lora_magnitude_vector.default.weight", "lora_B.default.bias"]
)
def test_every_part_of_an_adapter_is_known_as_such(end: str, saved: Saved, tmp_path: Path) -> None:
    """Also among experts, where other stray tensors are rejected."""
    strays = {f"model.layers.0.{path}.{end}": torch.ones(2) for path in ("self_attn.q_proj", "mlp.experts")}
    model = describe(open_checkpoint(with_strays(saved("qwen3_moe"), tmp_path / "x", strays)))
    assert {*model.unread} == {*strays} and any("is not applied" in note for note in model.notes)

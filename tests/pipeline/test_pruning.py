"""Leaving experts out: which ones go, what goes with them, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import moepack
import packed_support as support
import tiny_models
from moepack.checkpoint import Checkpoint, MoeLayer, describe
from moepack.checkpoint.names import check_tensors
from moepack.checkpoint.pruned import Group, PrunedCheckpoint, remaining
from moepack.errors import ResumeError, UnsupportedModelError
from moepack.export import export
from moepack.format import PackedDirectory
from moepack.methods import create
from moepack.pipeline import compress
from moepack.pipeline.pruning import Pruning, pruned
from moepack.pipeline.recipe import Recipe

FAMILIES = ["mixtral", "deepseek_v3", "switch_transformers", "granitemoe", "gpt_oss", "qwen3_vl_moe", "olmoe", "llama4"]


def groups_of(layer: MoeLayer, *members: int) -> list[Group]:
    return [((member, 1.0),) for member in members]


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_and_router_rows_go_together(family: str, saved: Callable[[str], Path]) -> None:
    original = Checkpoint.open(saved(family))
    model = describe(original)
    experts = model.layers[0].experts
    kept = [number for number in range(experts) if number != 1]
    found = PrunedCheckpoint(original, model, {layer.name: groups_of(layer, *kept) for layer in model.layers})
    after = describe(found)
    check_tensors(found, [layer.name for layer in after.layers])
    for before, layer in zip(model.layers, after.layers, strict=True):
        assert layer.experts == experts - 1
        for old, new in zip(before.projections, layer.projections, strict=True):
            for number, source in enumerate(kept):
                assert torch.equal(new.expert(number), old.expert(source))
        for name in layer.router:
            whole, part = original.tensor(name), found.tensor(name)
            assert torch.equal(part, whole[kept] if whole.shape[:1] == (experts,) else whole)
            assert found.raw(name).nbytes == found.info(name).nbytes
    assert found.fingerprint() != original.fingerprint() and found.stored == original.stored


def changed(model: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None], **config: Any) -> Path:
    """Copy a checkpoint, change its tensors and its configuration."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, **config}))
    return folder


def weaken(*experts: int) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith("w2.weight") and int(name.split(".")[-3]) in experts:
                tensors[name] *= 1e-3

    return change


def text_of(text: Path) -> dict[str, Any]:
    return {"calibration": str(text), "samples": 4, "sequence_length": 64}


def test_experts_with_small_outputs_go_first(mixtral: Path, text: Path, tmp_path: Path) -> None:
    model = changed(mixtral, tmp_path / "model", weaken(1, 3))
    experts = describe(Checkpoint.open(model)).layers[0].experts
    method = create("finequant", **text_of(text))
    found = pruned(Checkpoint.open(model), Pruning(2 / experts), method)
    for groups in found.groups.values():
        assert [group[0][0] for group in groups] == [number for number in range(experts) if number not in (1, 3)]
    assert any("2 of" in note for note in describe(found).notes)


def test_merged_experts_are_means_weighted_by_their_tokens(mixtral: Path, text: Path, tmp_path: Path) -> None:
    model = changed(mixtral, tmp_path / "model", weaken(1))
    original = Checkpoint.open(model)
    layers = describe(original).layers
    share = 1 / layers[0].experts
    found = pruned(original, Pruning(share, "merge"), create("finequant", **text_of(text)))
    for before, after in zip(layers, describe(found).layers, strict=True):
        groups = found.groups[before.name]
        (merged,) = (number for number, group in enumerate(groups) if len(group) == 2)
        assert 1 in dict(groups[merged]) and sum(dict(groups[merged]).values()) == pytest.approx(1)
        for old, new in zip(before.projections, after.projections, strict=True):
            expected = sum(old.expert(member).float() * own for member, own in groups[merged])
            assert torch.equal(new.expert(merged), expected.to(old.dtype))  # type: ignore[union-attr]


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_every_architecture_packs_and_runs(
    architecture: str, tiny_checkpoint: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    model, out = tiny_checkpoint(architecture), tmp_path / "out"
    experts = describe(Checkpoint.open(model)).layers[0].experts
    report = compress(model, out, method="finequant", prune=1.01 / experts, **text_of(text))
    assert moepack.verify(out).ok and any("were left out" in note for note in report.notes)
    records = PackedDirectory.open(out).manifest.packed().values()
    assert {record.shape[0] for record in records} == {experts - 1}
    ids = torch.arange(20, 40)[None]
    more = {"decoder_input_ids": ids} if architecture.startswith("switch") else {}
    with torch.inference_mode():
        assert torch.isfinite(moepack.load(out)(input_ids=ids, **more).logits).all()


def test_exports_and_recipes_follow(mixtral: Path, text: Path, tmp_path: Path) -> None:
    compress(mixtral, tmp_path / "a", method="finequant", group_size=32, prune="25%", prune_by="merge", **text_of(text))
    experts = describe(Checkpoint.open(mixtral)).layers[0].experts
    for kind in ("bf16", "compressed-tensors"):
        export(tmp_path / "a", tmp_path / kind, to=kind)
        assert json.loads((tmp_path / kind / "config.json").read_text())["num_local_experts"] == experts * 3 // 4
    assert describe(Checkpoint.open(tmp_path / "bf16")).layers[0].experts == experts * 3 // 4
    assert Recipe.read(tmp_path / "a").pruning == Pruning(0.25, "merge")
    compress(mixtral, tmp_path / "b", recipe=tmp_path / "a")
    assert support.contents(tmp_path / "a") == support.contents(tmp_path / "b")


def test_a_resumed_job_sees_another_pruning(
    mixtral: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moepack.pipeline import job

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    settings = {"method": "finequant", **text_of(text)}
    with monkeypatch.context() as patch:
        patch.setattr(job, "_write_dense", fail)
        with pytest.raises(KeyboardInterrupt):
            compress(mixtral, tmp_path / "out", prune=0.25, **settings)
    with pytest.raises(ResumeError, match="pruned"):
        compress(mixtral, tmp_path / "out", **settings)
    assert compress(mixtral, tmp_path / "out", prune=0.25, **settings).resumed_weights > 0


def test_what_would_break_is_refused(mixtral: Path, tmp_path: Path) -> None:
    layer = describe(Checkpoint.open(mixtral)).layers[0]
    for share, message in (
        (0.9, "fewer than the .* that a token chooses"),
        (0.01, f"of {layer.experts} experts leaves out none"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            compress(mixtral, tmp_path / "out", method="finequant", prune=share)
    for settings, message in (
        ({"prune": "x"}, "prune must be auto or a share"),
        ({"prune": 1.0}, "prune must be auto or a share"),
        ({"prune": 0.25, "prune_by": "mix"}, "prune_by must be drop or merge"),
        ({"prune_by": "merge"}, "prune_by requires prune"),
    ):
        with pytest.raises(ValueError, match=message):
            compress(mixtral, tmp_path / "out", method="finequant", **settings)
    assert not list(tmp_path.iterdir())


def test_settings_replace_those_of_a_recipe() -> None:
    known = Pruning(0.25, "merge")
    assert Pruning.of(None, None, known) == known
    assert Pruning.of(None, "drop", known) == Pruning(0.25, "drop")
    assert Pruning.of("50%", None, known) == Pruning(0.5, "merge")


def test_groups_of_a_router_keep_equal_sizes(saved: Callable[[str], Path]) -> None:
    model = describe(Checkpoint.open(saved("deepseek_v3")))
    experts = model.layers[0].experts
    config = {"n_routed_experts": experts, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    with pytest.raises(UnsupportedModelError, match="chooses among 2 groups of equal size"):
        remaining(config, model, 1 / experts)
    if experts >= 6:
        assert remaining(config, model, 2 / experts) == experts - 2

"""`--prune auto`: experts are left out if that costs less than the bits that they free, at the size of all experts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moepack.checkpoint import Checkpoint
from moepack.checkpoint.pruned import PrunedCheckpoint
from moepack.errors import RecipeError
from moepack.format import PackedDirectory
from moepack.methods import Auto, FineQuant, Method
from moepack.methods.auto.target import weight_count
from moepack.pipeline import compress, share
from moepack.pipeline.pruning import Pruning
from moepack.pipeline.recipe import Recipe
from moepack.pipeline.share import leave_out
from moepack.pipeline.source import Source
from places import NOVEL, TINY_MOE

TEXT: dict[str, Any] = {"calibration": str(NOVEL), "samples": 16, "sequence_length": 64}


def source(model: Path = TINY_MOE) -> Source:
    return Source(model, Checkpoint.open(model), None)


def test_few_bits_leave_experts_out_and_the_size_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "SHARES", (1 / 4,))
    report = compress(TINY_MOE, tmp_path / "a", bits_per_weight=1.5, prune="auto", **TEXT)
    recipe = Recipe.read(tmp_path / "a")
    assert recipe.pruning == Pruning(0.25)
    wanted = weight_count(Checkpoint.open(TINY_MOE)) * 1.5 / 8
    stored = sum(file.stat().st_size for file in (tmp_path / "a").glob("*.safetensors"))
    assert 0.98 * wanted < stored <= wanted
    assert any("Without 25% of the experts" in note for note in report.notes)
    records = PackedDirectory.open(tmp_path / "a").manifest.packed().values()
    assert {record.shape[0] for record in records if record.module.endswith("experts")} == {6}


def test_many_bits_keep_all_experts(tmp_path: Path) -> None:
    own = source()
    method = leave_out(own, Pruning(None), Auto(bits_per_weight=5.0, **TEXT), tmp_path / "out")
    assert own.pruning is None and not isinstance(own.checkpoint, PrunedCheckpoint)
    assert own.checkpoint.notes[-1] == "All experts stay."
    assert isinstance(method, Auto) and method.size == int(weight_count(own.checkpoint) * 5 / 8)


def test_the_windows_that_choose_experts_do_not_measure_their_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    own = source()
    text = share._Text.of(own.checkpoint, Auto(bits_per_weight=3.0, **TEXT))
    assert len(text.choosing) == len(text._measuring) == 8
    assert not any(torch.equal(one, other) for one in text.choosing for other in text._measuring)
    assert text.increase(own.checkpoint) == 0
    monkeypatch.setattr(text, "_losses", lambda _: text._before + torch.tensor([1.0, -1.0] * 4))
    assert text.increase(own.checkpoint) == pytest.approx((8 / 7) ** 0.5 / 8**0.5)  # the standard error


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (FineQuant(bits=4), "require the method auto and a calibration text"),
        (Auto(bits_per_weight=3.0, calibration=None), "require the method auto and a calibration text"),
        (Auto(bits_per_weight=3.0, **{**TEXT, "samples": 3}), "at least 4 windows of text, not 3"),
    ],
)
def test_losses_that_nobody_expects_are_not_compared(method: Method, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        leave_out(source(), Pruning(None), method, tmp_path / "out")


def test_a_recipe_names_the_share(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("method: auto\nprune: auto\n")
    with pytest.raises(RecipeError, match="prune must be a share"):
        Recipe.read(tmp_path / "recipe.yaml")

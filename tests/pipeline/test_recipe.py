"""Recipes: what compress writes beside a result, and takes back."""

from pathlib import Path
from typing import Any

import pytest
import yaml

import moepack
import packed_support as support
from moepack.errors import OverrideError, RecipeError, TextError
from moepack.format.side import RECIPE
from moepack.methods import METHODS
from moepack.pipeline import compress
from moepack.pipeline.recipe import Recipe

TEXT = {"samples": 2, "sequence_length": 32}
JOBS: list[tuple[str, dict[str, Any]]] = [
    ("auto", {"ratio": 0.5, "calibration": "none"}),
    ("auto", {"calibration": "text", **TEXT, "bits": "down_proj=5,experts.0=7"}),
    ("finequant", {"calibration": "none", "bits": "8,down_proj=2,layers.1=16", "dense_bits": "attention=4"}),
    ("finequant", {"calibration": "none", "group_size": "adaptive"}),
    ("rate", {"bits_per_weight": 3, "calibration": "none"}),
    ("milo", {"calibration": "none", "memory_budget": 150_000, "rounds": 2}),
    ("milo", {"calibration": "none", "rounds": 2}),
    ("codequant", {"calibration": "text", **TEXT, "rotation_steps": 4}),
    ("qmoe", {"calibration": "text", **TEXT}),
    ("floe", {"calibration": "text", **TEXT}),
]


@pytest.mark.parametrize(("method", "settings"), JOBS)
def test_a_recipe_gives_the_same_bytes(
    method: str, settings: dict[str, Any], mixtral: Path, text: Path, tmp_path: Path
) -> None:
    if settings.get("calibration") == "text":
        settings = {**settings, "calibration": str(text)}
    compress(mixtral, tmp_path / "first", method=method, check=False, **settings)
    file = tmp_path / "first" / RECIPE
    again = compress(mixtral, tmp_path / "again", recipe=file, check=False)
    assert support.contents(tmp_path / "first") == support.contents(tmp_path / "again")
    assert moepack.verify(tmp_path / "again").ok and not moepack.verify(tmp_path / "again").side
    assert not any("recipe" in note for note in again.notes)
    assert Recipe.read(file).to_bytes() == file.read_bytes()


def test_a_recipe_holds_no_path_but_what_was_given(
    mixtral: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").symlink_to(mixtral)
    (tmp_path / "mine.txt").write_text(text.read_text())
    monkeypatch.chdir(tmp_path)
    compress("model", "out", method="qmoe", calibration="mine.txt", **TEXT)
    content = yaml.safe_load((tmp_path / "out" / RECIPE).read_text())
    assert content["source"].keys() == {"digest"} and content["settings"]["calibration"] == "mine.txt"
    assert str(tmp_path) not in (tmp_path / "out" / RECIPE).read_text()
    assert len(content["calibration_sha256"]) == len(content["source"]["digest"]) == 64


def test_given_settings_replace_those_of_a_recipe_and_notes_say_so(mixtral: Path, tmp_path: Path) -> None:
    compress(mixtral, tmp_path / "a", ratio=0.5, calibration="none", bits="down_proj=5", check=False)
    report = compress(mixtral, tmp_path / "b", recipe=tmp_path / "a", bits_per_weight=6, check=False)
    assert report.notes[0] == "bits_per_weight 6 was given and replaces the recipe's ratio 0.5."
    settings = yaml.safe_load((tmp_path / "b" / RECIPE).read_text())
    assert settings["settings"]["bits_per_weight"] == 6 and "ratio" not in settings["settings"]
    assert settings["bits"] == {"down_proj": 5}
    other = compress(mixtral, tmp_path / "c", recipe=tmp_path / "a", method="finequant", calibration="none", bits=2)
    assert "the recipe's method auto and its settings do not apply" in other.notes[0]
    assert Recipe.read(tmp_path / "c").settings["bits"] == 2


def test_another_checkpoint_is_noticed(mixtral: Path, qwen3_moe: Path, tmp_path: Path) -> None:
    compress(mixtral, tmp_path / "a", method="finequant", calibration="none")
    report = compress(qwen3_moe, tmp_path / "b", recipe=tmp_path / "a")
    assert any("made for another checkpoint" in note for note in report.notes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("method: atuo", "there is no method 'atuo'; the nearest are auto"),
        ("metod: auto", "there is no entry 'metod'; the nearest are method"),
        ("settings: {siz: 3MB}", "there is no setting of the method auto 'siz'; the nearest are size"),
        ("source: {nam: x}", "there is no entry of the source 'nam'; the nearest are name"),
        ("method: [a]", "method must be text"),
        ("settings: 3", "settings must be a mapping"),
        ("mtp_bits: true", "mtp_bits must be a whole number"),
        ("- 1", "holds no entries"),
        ("settings: {size: 3MB, size: 4MB}", "the entry size is given twice"),
        ("method: auto\nmethod: milo", "the entry method is given twice"),
        ("method: finequant\nsettings: {bits: 5}", "bits must be"),
        ("a: b: c", "is not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("", "holds no entries"),
    ],
)
def test_a_bad_recipe_is_a_typed_error(content: str, message: str, mixtral: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(content)
    with pytest.raises(RecipeError, match=message) as caught:
        compress(mixtral, tmp_path / "out", recipe=file)
    assert caught.value.file == str(file)


def test_other_bad_values_are_reported(mixtral: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    with pytest.raises(TextError):
        compress(mixtral, tmp_path / "out", recipe=file)
    file.write_text("method: finequant\nbits: {downproj: 4}\n")
    with pytest.raises(OverrideError, match="down_proj"):
        compress(mixtral, tmp_path / "out", recipe=file)


def test_every_method_is_covered() -> None:
    assert {method for method, _ in JOBS} == set(METHODS)

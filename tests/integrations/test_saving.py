"""`save_pretrained` of a packed model writes an equal directory, with any additions."""

import copy
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import moepack
import packed_support as support
from moepack import MoepackWarning, OutputExistsError, SerializationError
from moepack.format import MANIFEST


@pytest.fixture
def model(packed: Path, tmp_path: Path) -> object:
    """A loaded model, and a separate directory that also contains a model card."""
    directory = tmp_path / "packed"
    moepack.load(packed).save_pretrained(directory)
    (directory / "README.md").write_text("# a model card")
    return transformers.AutoModelForCausalLM.from_pretrained(directory)


def test_the_saved_directory_is_equal(packed: Path, tmp_path: Path) -> None:
    moepack.load(packed).save_pretrained(tmp_path / "a" / "saved", max_shard_size="1KB", safe_serialization=True)
    assert support.contents(tmp_path / "a" / "saved") == support.contents(packed)
    assert moepack.verify(tmp_path / "a" / "saved").ok
    assert {file.stat().st_nlink > 1 for file in (tmp_path / "a" / "saved").glob("*.safetensors")} == {True}
    assert (tmp_path / "a" / "saved" / "config.json").stat().st_nlink == 1


def test_added_files_and_a_tokenizer_follow(model: object, tmp_path: Path) -> None:
    copy.deepcopy(model).save_pretrained(tmp_path / "saved")  # type: ignore[attr-defined]
    transformers.AutoTokenizer.from_pretrained(tmp_path / "saved").save_pretrained(tmp_path / "saved")
    report = moepack.verify(tmp_path / "saved")
    assert report.ok and "README.md" in {each.file for each in report.side}
    assert moepack.load(tmp_path / "saved") is not None


def test_where_links_are_refused_bytes_are_copied(
    model: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError("another file system")

    monkeypatch.setattr(os, "link", refuse)
    model.save_pretrained(tmp_path / "saved")  # type: ignore[attr-defined]
    assert support.contents(tmp_path / "saved") == support.contents(tmp_path / "packed")


def test_saving_again_and_in_place(model: object, tmp_path: Path) -> None:
    for place in ("saved", "saved", "packed"):
        model.save_pretrained(tmp_path / place)  # type: ignore[attr-defined]
        assert moepack.verify(tmp_path / place).ok


def test_weights_of_another_model_are_not_mixed_in(model: object, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_bytes(b"")
    with pytest.raises(OutputExistsError, match=r"model\.safetensors"):
        model.save_pretrained(tmp_path / "other")  # type: ignore[attr-defined]


def test_a_source_that_is_gone_leaves_no_manifest(model: object, tmp_path: Path) -> None:
    (tmp_path / "packed" / "tokenizer.json").unlink()
    with pytest.raises(SerializationError, match="gone"):
        model.save_pretrained(tmp_path / "saved")  # type: ignore[attr-defined]
    assert not (tmp_path / "saved" / MANIFEST).exists()


def test_push_to_hub_uploads_the_equal_directory(
    model: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own `push_to_hub` calls `save_pretrained` and uploads by itself."""
    import huggingface_hub

    class Hub:
        uploaded: dict[str, bytes]

        def __init__(self, token: str | None = None) -> None:
            assert token == "secret"

        def create_repo(self, name: str, private: bool | None, exist_ok: bool) -> object:
            return type("Url", (), {"repo_id": f"me/{name}"})

        def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> None:
            assert (repo_id, commit_message) == ("me/saved", "packed")
            Hub.uploaded = support.contents(folder_path)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    options = {"push_to_hub": True, "token": "secret", "commit_message": "packed"}
    model.save_pretrained(tmp_path / "saved", **options)  # type: ignore[attr-defined]
    assert Hub.uploaded == support.contents(tmp_path / "packed")


def copied(model: Any) -> Any:
    return copy.deepcopy(model)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("through", [lambda model: model, copied, pickled], ids=["itself", "copied", "pickled"])
def test_changes_that_are_not_saved_are_named(model: Any, tmp_path: Path, through: Callable[[Any], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        through(model).save_pretrained(tmp_path / "unchanged")
        through(model.to(torch.bfloat16)).save_pretrained(tmp_path / "unchanged")
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    with pytest.warns(MoepackWarning, match=r"without the changes of 'model\.norm\.weight'$"):
        through(model).save_pretrained(tmp_path / "saved")
    model.added = torch.nn.Linear(2, 2)
    with pytest.warns(MoepackWarning, match=r"without the changes of '[\w.]+' and of 2 other parameters$"):
        through(model).save_pretrained(tmp_path / "saved")


def test_another_class_of_model_is_named(model: Any, tmp_path: Path) -> None:
    classes = transformers.AutoModelForSequenceClassification
    classifier = classes.from_pretrained(tmp_path / "packed", num_labels=2, pad_token_id=0)
    with pytest.warns(MoepackWarning, match=r"holds the weights of MixtralForCausalLM, not all of MixtralForSeq"):
        classifier.save_pretrained(tmp_path / "saved")


def test_the_generation_configuration_is_saved(model: Any, tmp_path: Path) -> None:
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "saved")
    assert moepack.load(tmp_path / "saved").generation_config.max_new_tokens == 7
    assert moepack.verify(tmp_path / "saved").ok

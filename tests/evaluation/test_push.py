"""Uploads of packed directories. The Hub's client is replaced; nothing is uploaded."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

import moepack
from moepack.errors import LoadError, UploadError
from moepack.report import push
from moepack.report.card import is_own_card


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The uploads so far: repository, privacy, and the names of the files that the client's own filter accepts."""
    seen: list[dict[str, Any]] = []

    class Api:
        def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> Any:
            assert exist_ok
            seen.append({"name": name, "private": private})
            return huggingface_hub.RepoUrl(f"https://hub.example/{name}", endpoint="https://hub.example")

        def upload_folder(self, *, folder_path: Path, repo_id: str, ignore_patterns: list[str], **_: Any) -> Any:
            files = [file.relative_to(folder_path).as_posix() for file in folder_path.rglob("*") if file.is_file()]
            sent = huggingface_hub.utils.filter_repo_objects(files, ignore_patterns=ignore_patterns)
            seen[-1] |= {"repo": repo_id, "files": set(sent)}
            return SimpleNamespace(commit_url="https://hub.example/commit")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return seen


def test_a_packed_directory_is_uploaded_with_a_card(
    packed: Path, tmp_path: Path, uploads: list[dict[str, Any]]
) -> None:
    place = shutil.copytree(packed, tmp_path / "packed")
    (place / ".git").mkdir()
    (place / ".git" / "config").write_text("secret")
    model, commit = push(place, "someone/packed", private=True, base_model="someone/moe")
    assert model.endswith("someone/packed") and commit.endswith("commit")
    (found,) = uploads
    assert found["name"] == found["repo"] == "someone/packed" and found["private"]
    assert {"config.json", "README.md"} <= found["files"]
    assert not any(name.startswith(".git") for name in found["files"])
    card = (place / "README.md").read_text()
    assert is_own_card(card) and "base_model: someone/moe" in card
    (place / "README.md").write_text(card + "\nMine.\n")
    push(place, "someone/packed")
    assert "Mine." in (place / "README.md").read_text(), "an existing card is kept"
    moepack.verify(place)


def test_other_directories_are_not_uploaded(mixtral: Path, tmp_path: Path, uploads: list[dict[str, Any]]) -> None:
    with pytest.raises((LoadError, moepack.CorruptionError)):
        push(mixtral, "someone/packed")
    assert not uploads


def test_a_refusal_is_one_error(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Api:
        def create_repo(self, *_: Any, **__: Any) -> Any:
            raise OSError("403 Forbidden\nmany lines")

    place = shutil.copytree(packed, tmp_path / "packed")
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    with pytest.raises(UploadError, match=r"someone/packed': 403 Forbidden$"):
        push(place, "someone/packed")

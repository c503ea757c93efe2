"""Uploads of packed directories (the Hub's client is replaced; nothing is uploaded), and their discovery on a Hub."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

import moepack
import packed_support as support
from hub_support import serving, use
from moepack.errors import CorruptionError, LoadError, UploadError
from moepack.format.side import RECIPE
from moepack.pipeline.prepacked import fetch_packed, find_packed
from moepack.report.card import is_own_card
from moepack.report.upload import push


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


@pytest.mark.parametrize("source", ["someone/moe", "someone/moe:Q8_0", "someone/moe/BF16/moe.gguf"])
def test_the_card_names_the_original_of_the_recipe(
    packed: Path, tmp_path: Path, uploads: list[dict[str, Any]], source: str
) -> None:
    place = shutil.copytree(packed, tmp_path / "packed")
    (place / RECIPE).write_text(f"source:\n  name: {source}\n  revision: abc\nmethod: finequant\n")
    push(place, "someone/packed")
    assert "base_model: someone/moe\n" in (place / "README.md").read_text()


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


@pytest.fixture
def versions(packed: Path, mixtral: Path, tmp_path: Path) -> dict[str, Path]:
    """Two packed versions of a model and a model that only claims to be one."""
    small = tmp_path / "small"
    moepack.compress(mixtral, small, method="finequant", bits=2)
    return {"a/large": shutil.copytree(packed, tmp_path / "large"), "b/small": small, "c/unpacked": mixtral}


def test_packed_versions_are_found_and_verified(
    versions: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {name: sum(file.stat().st_size for file in place.glob("*.safetensors")) for name, place in versions.items()}
    small, large = sorted(("a/large", "b/small"), key=sizes.__getitem__)
    with serving(versions) as hub:
        hub.tags = {name: {"moepack", "base_model:quantized:someone/moe"} for name in versions}
        use(hub, tmp_path, monkeypatch)
        assert find_packed("someone/other", None) is None and find_packed(tmp_path, None) is None
        found = find_packed("someone/moe@v1", sizes[large] - 1)
        assert found is not None and found.listing.model == small and found.nbytes == sizes[small]
        assert find_packed("someone/moe", 1) is None
        best = find_packed("someone/moe", sizes[large])
        assert best is not None and best.listing.model == large
        fetch_packed(best, tmp_path / "out")
        assert support.contents(tmp_path / "out") == support.contents(versions[large])
        support.flip(next(versions[small].glob("*.safetensors")), 8 * 5000)
        with pytest.raises(CorruptionError, match=f"{small}: the version on the Hub is damaged"):
            fetch_packed(found, tmp_path / "damaged")
    assert not list(tmp_path.glob("damaged*"))

"""Models by hub id. Nothing is downloaded: the cache is simulated, and the hub is offline."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import moepack
import packed_support as support
from hub_support import cached
from moepack.checkpoint.gguf.files import is_kind
from moepack.checkpoint.hub_model import hub_id, hub_model
from moepack.checkpoint.resolve import resolve_model
from moepack.errors import CheckpointError
from moepack.methods.qmoe.ternary import Ternary

OLDER = "fedcba9876543210fedcba9876543210fedcba98"


def test_an_id_of_the_hub_is_its_snapshot_in_the_cache(hub_cache: Path, mixtral: Path) -> None:
    snapshot = cached(hub_cache, "someone/tiny-moe", mixtral)
    assert resolve_model("someone/tiny-moe") == snapshot
    assert resolve_model(Path("someone/tiny-moe")) == snapshot
    older = cached(hub_cache, "someone/tiny-moe", mixtral, OLDER, "v1.0")
    assert resolve_model("someone/tiny-moe@v1.0") == resolve_model(f"someone/tiny-moe@{OLDER}") == older


def test_a_model_of_links_is_compressed_and_evaluated_as_its_files_are(
    hub_cache: Path, mixtral: Path, packed: Path, tmp_path: Path
) -> None:
    snapshot = cached(hub_cache, "someone/tiny-moe", mixtral)
    assert (snapshot / "model.safetensors").is_symlink()
    moepack.compress("someone/tiny-moe", tmp_path / "out", method=Ternary())
    assert support.contents(tmp_path / "out") == support.contents(packed)
    (tmp_path / "text.txt").write_text("the sea and the wolf and the fire said " * 20, encoding="utf-8")
    report = moepack.evaluate(tmp_path / "out", tmp_path / "text.txt", 600, reference="someone/tiny-moe")
    again = moepack.evaluate(packed, tmp_path / "text.txt", 600, reference=mixtral)
    of_the_process = {"seconds": 0, "peak_memory": 0}
    assert report.to_json() | of_the_process == again.to_json() | of_the_process


def test_a_packed_model_on_the_hub_is_loaded(hub_cache: Path, packed: Path) -> None:
    cached(hub_cache, "someone/packed", packed)
    assert moepack.load("someone/packed").config.model_type == "mixtral"


def test_a_directory_wins_over_an_id(hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "tiny-moe").mkdir(parents=True)
    assert resolve_model("someone/tiny-moe") == Path("someone/tiny-moe")


@pytest.mark.parametrize("given", ["absent", "./some/model", "/some/model", "a/b/c", "some/model/", "../model", ""])
def test_strings_that_are_not_ids_are_passed_through(hub_cache: Path, given: str) -> None:
    assert resolve_model(given) == Path(given)


@pytest.mark.parametrize("use", [moepack.load, lambda name: moepack.compress(name, "nowhere")])
def test_a_missing_id_is_one_clear_error(hub_cache: Path, use: Callable[[str], Any]) -> None:
    with pytest.raises(CheckpointError, match=r"someone/absent.*HF_HUB_OFFLINE") as caught:
        use("someone/absent")
    assert "\n" not in str(caught.value) and not Path("nowhere").exists()


def answer(status: int, kind: type[Exception]) -> Exception:
    """The error of the hub's client for a response with the given status."""
    httpx = pytest.importorskip(huggingface_hub.errors.HTTPError.__module__.partition(".")[0])
    request = httpx.Request("GET", "https://hub/api")
    return kind("many\nlines\nof advice", response=httpx.Response(status, request=request))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (404, "RepositoryNotFoundError", "does not exist or is private"),
        (403, "GatedRepoError", "it is gated"),
        (404, "RevisionNotFoundError", "at revision 'v9'"),
    ],
)
def test_errors_of_the_hub_are_one_line(status: int, kind: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise answer(status, getattr(huggingface_hub.errors, kind))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=expected) as caught:
        resolve_model("someone/model@v9")
    assert "\n" not in str(caught.value)


def test_only_used_files_are_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The patterns, applied by the hub's own filter to the files of a repository that has everything."""
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("someone/model@abc") == tmp_path
    assert asked.pop("name") == "someone/model" and asked.pop("revision") == "abc"
    wanted = [
        *("config.json", "generation_config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer.model", "spiece.model", "merges.txt", "chat_template.jinja", "LICENSE"),
        *("additional_chat_templates/tool_use.jinja", "qwen.tiktoken", "tokenizer.model.v3"),
        *("tokenization_kimi.py", "USAGE_POLICY", "USE_POLICY.md"),
    ]
    others = [
        *("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "consolidated.safetensors"),
        *("original/model.safetensors", "original/params.json", "onnx/model.onnx"),
        *("model.gguf", "tf_model.h5", "flax_model.msgpack", "a.pt"),
    ]
    assert [*huggingface_hub.utils.filter_repo_objects([*wanted, *others], **asked)] == wanted


@pytest.mark.parametrize("has_safetensors", [False, True])
def test_pickles_are_downloaded_only_without_safetensors(
    has_safetensors: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        (tmp_path / "config.json").write_text("{}")
        if has_safetensors:
            (tmp_path / "model.safetensors").write_bytes(b"")
        asked.append(options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("someone/model") == tmp_path and len(asked) == 2 - has_safetensors
    options = asked[-1]
    del options["revision"]
    shards = ["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "pytorch_model.bin"]
    others = ["training_args.bin", "original/pytorch_model.bin", "optimizer.bin"]
    found = [*huggingface_hub.utils.filter_repo_objects([*shards, *others], **options)]
    assert found == ([] if has_safetensors else shards)


def test_a_gguf_file_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All parts of the file are downloaded, and the small files of its repository."""
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match="of the Hub has no such file"):
        resolve_model("someone/model-GGUF@abc/Q4/model-00001-of-00002.gguf")
    assert asked.pop("name") == "someone/model-GGUF" and asked.pop("revision") == "abc"
    wanted = ["Q4/model-00001-of-00002.gguf", "Q4/model-00002-of-00002.gguf", "config.json"]
    others = ["Q8/model-00001-of-00002.gguf", "Q4/model-00001-of-00003.gguf", "model.gguf", "model.safetensors"]
    assert [*huggingface_hub.utils.filter_repo_objects([*wanted, *others], **asked)] == wanted


def test_a_repository_of_gguf_files_lists_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = ["README.md", "Q4.gguf", "Q8.gguf"]
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: files)
    with pytest.raises(CheckpointError, match=r"GGUF files \(Q4\.gguf, Q8\.gguf\); .* such as a/b@c/Q4\.gguf"):
        resolve_model("a/b@c")


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("a/b", ("a/b", None, None, None)),
        ("a/b@v1/x", ("a/b", "v1/x", None, None)),
        ("a/b:Q8_0", ("a/b", None, None, "Q8_0")),
        ("a/b@v1:Q4_K_M", ("a/b", "v1", None, "Q4_K_M")),
        ("a/b/Q4/m.gguf", ("a/b", None, "Q4/m.gguf", None)),
        ("a/b@v1/m.gguf", ("a/b", "v1", "m.gguf", None)),
    ],
)
def test_names_of_models_on_the_hub(given: str, parts: tuple[str | None, ...]) -> None:
    found = hub_model(given)
    assert found is not None and (found.name, found.revision, found.file, found.kind) == parts
    assert hub_id(given) == (None if found.is_gguf else parts[:2])


@pytest.mark.parametrize(
    "given", ["a", "./a/b", "a/b.gguf", "a/b:", "a/b@", "a/b/c", "/a/b:Q8_0", "a/b:Q8_0/c", "a" * 300, "a\0b"]
)
def test_other_values_are_paths(given: str) -> None:
    assert hub_model(given) is None


def test_a_quantization_is_a_whole_word_of_a_path() -> None:
    assert is_kind("moe-Q8_0.gguf", "q8_0") and is_kind("Q4_K_M/moe-00001-of-00002.gguf", "Q4_K_M")
    assert not is_kind("moe-IQ4_XS.gguf", "Q4_XS") and not is_kind("moe-Q4_K_M.gguf", "Q4_K")


def test_the_root_of_a_cache_is_not_a_model(hub_cache: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--someone--moe" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="snapshots/abc"):
        resolve_model(snapshot.parent.parent)
    assert resolve_model(snapshot) == snapshot

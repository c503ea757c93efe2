"""GGUF models on a hub, planned from their headers and packed while they are downloaded."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import moepack
import packed_support as support
from checkpoint.test_gguf_sources import OWN, saved
from command_support import interruptible
from gguf_support import quantized, write_gguf
from hub_support import LARGE, Answer, Hub, bytes_in, held_from, serving, use
from moepack.checkpoint.quantized import open_checkpoint
from moepack.checkpoint.remote import Altered, files, open_remote, parts, reading
from moepack.checkpoint.resolve import resolve_model
from moepack.cli import app
from moepack.errors import CheckpointError, DownloadError
from moepack.format.side import RECIPE
from moepack.methods import create
from moepack.pipeline.estimate import estimate
from moepack.pipeline.library import entries, place_of, title_of
from moepack.pipeline.recipe import Recipe
from places import ROOT

pytest.importorskip("gguf")

NAME = "someone/moe-GGUF"
SPLIT = {"split_max_tensors": 9}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {**OWN["qwen3_moe"], "num_hidden_layers": 4, "num_experts": 8}
    return saved("qwen3_moe", tmp_path_factory.mktemp("original") / "model", **sizes)


@pytest.fixture(scope="session")
def repository(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(original, tmp_path_factory.mktemp("repository"))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of a smaller model, for methods that search."""
    place = tmp_path_factory.mktemp("small")
    return written(saved("qwen3_moe", place / "model", **OWN["qwen3_moe"]), place / "repository")


def written(original: Path, folder: Path) -> Path:
    """Write two quantizations: one in one file, one split and in a folder; and an image encoder."""
    folder.mkdir(exist_ok=True)
    (folder / "BF16").mkdir()
    write_gguf(original, folder / "moe-Q8_0.gguf", quantized("Q8_0"))
    write_gguf(original, folder / "BF16" / "moe-BF16.gguf", quantized("BF16"), **SPLIT)
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
    (folder / "README.md").write_text("# A model\n")
    return folder


@pytest.fixture
def hub(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving({NAME: repository}) as server:
        use(server, tmp_path, monkeypatch)
        yield server


def local_of(repository: Path, kind: str) -> Path:
    found = sorted(repository.rglob(f"*{kind}*.gguf"))
    assert len(found) > 1 or kind == "Q8_0"
    return found[0]


def same_but_source(directory: Path) -> dict[str, bytes]:
    files = support.contents(directory)
    return {**files, RECIPE: Recipe.read(directory / RECIPE).without_source().to_bytes()}


@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
def test_a_remote_file_is_the_local_one(hub: Hub, repository: Path, kind: str) -> None:
    local = open_checkpoint(local_of(repository, kind))
    for name in (f"{NAME}:{kind.lower()}", f"{NAME}@main/{local_of(repository, kind).relative_to(repository)}"):
        found = open_remote(name)
        assert found is not None
        remote = found[0]
        assert remote.config == local.config and remote.names() == local.names() and remote.notes == local.notes
        assert remote.fingerprint() == local.fingerprint()
        assert support.contents(remote.path) == {
            name: content for name, content in support.contents(local.path).items() if not name.endswith(".gguf")
        }
    assert all(remote.tensor(each).equal(local.tensor(each)) for each in local.names()[::3])


def test_a_plan_reads_the_headers_only(
    hub: Hub, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "FIRST", 4096)
    method, file = create("finequant", bits=4), local_of(repository, "Q8_0")
    found = open_remote(f"{NAME}:Q8_0")
    header = found[0].shards[file.name] if found is not None else None
    assert header is not None and hub.sent <= 2 * min(info.offset for info in header.tensors.values())
    plan = estimate(f"{NAME}:Q8_0", tmp_path / "out", method)
    before = estimate(file, tmp_path / "out", method)
    assert (plan.parts, plan.kept, plan.seconds) == (before.parts, before.kept, before.seconds)
    assert plan.streaming is not None and plan.streaming.download == file.stat().st_size
    assert not list(tmp_path.glob("out*")) and not list((tmp_path / "cache").rglob("*.gguf"))


@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
@pytest.mark.parametrize(("method", "settings"), [("finequant", {"bits": 3}), ("auto", {"calibration": "none"})])
def test_the_result_equals_that_of_the_file(
    hub: Hub, small: Path, tmp_path: Path, kind: str, method: str, settings: dict[str, object]
) -> None:
    hub.models[NAME] = small
    moepack.compress(f"{NAME}:{kind}", tmp_path / "remote", method=method, **settings)
    moepack.compress(local_of(small, kind), tmp_path / "local", method=method, **settings)
    assert same_but_source(tmp_path / "remote") == same_but_source(tmp_path / "local")
    source = Recipe.read(tmp_path / "remote").source
    assert source is not None and source.name == f"{NAME}:{kind}" and source.revision
    assert not list(tmp_path.glob("remote.*")) and not list((tmp_path / "cache").rglob("*.gguf"))


def test_a_kept_source_serves_the_next_job_without_a_connection(hub: Hub, tmp_path: Path) -> None:
    moepack.compress(f"{NAME}:BF16", tmp_path / "out", method="finequant", keep_source=True)
    assert open_remote(f"{NAME}:BF16") is None, "the cache holds the model"
    hub.close()
    moepack.compress(f"{NAME}:BF16", tmp_path / "again", method="finequant")
    assert same_but_source(tmp_path / "out") == same_but_source(tmp_path / "again")


def test_a_configuration_of_the_user(hub: Hub, original: Path, repository: Path, tmp_path: Path) -> None:
    """It may have entries that the metadata of a file lack."""
    for name, model in (("remote", f"{NAME}:Q8_0"), ("local", str(local_of(repository, "Q8_0")))):
        arguments = ["compress", model, str(tmp_path / name), "--method", "finequant", "--config", str(original)]
        done = CliRunner().invoke(app, [*arguments, "--quiet"])
        assert done.exit_code == 0, done.output
    assert same_but_source(tmp_path / "remote") == same_but_source(tmp_path / "local")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_one_of_several_files_must_be_named(hub: Hub) -> None:
    listed = r"\(BF16/moe-BF16-00001-of-\d+\.gguf, moe-Q8_0\.gguf\); name one of them, such as someone/moe-GGUF"
    for given, reason in ((NAME, "no weights but GGUF files"), (f"{NAME}:Q4_0", "no GGUF file of 'Q4_0'")):
        for opening in (open_remote, resolve_model):
            with pytest.raises(CheckpointError, match=f"{reason} {listed}"):
                opening(given)
    with pytest.raises(DownloadError, match="has no such file"):
        open_remote(f"{NAME}/moe-Q2_K.gguf")


def test_the_only_file_of_a_repository_needs_no_name(
    hub: Hub, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "single").mkdir()
    file = write_gguf(original, tmp_path / "single" / "moe.gguf", quantized("Q8_0"))
    hub.models["someone/single"] = file.parent
    found = open_remote("someone/single")
    assert found is not None and found[0].fingerprint() == open_checkpoint(file).fingerprint()
    assert open_checkpoint(resolve_model("someone/single")).fingerprint() == found[0].fingerprint()


def test_another_process_reads_ranges(hub: Hub, repository: Path) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")  # Ray's way to send a checkpoint to a node
    found, local = open_remote(f"{NAME}:BF16"), open_checkpoint(local_of(repository, "BF16"))
    assert found is not None
    checkpoint = pickle.loads(cloudpickle.dumps(found[0]))
    assert all(checkpoint.tensor(each).equal(local.tensor(each)) for each in local.names()[::7])


def test_a_quantization_is_part_of_a_name_in_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    place_of(title_of(f"{NAME}:Q8_0"), "9GB").mkdir(parents=True)
    (entry,) = entries(f"{NAME}:Q8_0")
    assert entry.size == "9GB" and ":" not in entry.path.name


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of more than 60 kB are cut into parts of at least 40 kB."""
    monkeypatch.setattr(parts, "WHOLE", 60_000)
    monkeypatch.setattr(parts, "LEAST", 40_000)


class Watching(moepack.progress.Silent):
    """Notes how much of a model was on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most = folder, 0

    def traffic(self, received: int, left: int, disk: int) -> None:
        self.most = max(self.most, bytes_in(self.folder, "moe*.gguf-*"))


def test_a_large_file_is_packed_in_parts(hub: Hub, small_parts: None, repository: Path, tmp_path: Path) -> None:
    """The disk holds some parts of it, and its SHA-256 is verified all the same."""
    file = local_of(repository, "Q8_0")
    found = open_remote(f"{NAME}:Q8_0")
    assert found is not None and len(found[1].sizes) > 3 and sum(found[1].sizes.values()) == file.stat().st_size
    watching = Watching(tmp_path / "remote.source")
    budget = 4 * max(found[1].sizes.values())
    assert budget < file.stat().st_size / 2
    report = moepack.compress(
        f"{NAME}:Q8_0", tmp_path / "remote", method="finequant", disk_budget=budget, progress=watching
    )
    moepack.compress(file, tmp_path / "local", method="finequant")
    assert same_but_source(tmp_path / "remote") == same_but_source(tmp_path / "local")
    assert 0 < watching.most <= budget and len(hub.shards()) > len(found[1].sizes)
    assert not any("SHA-256" in note for note in report.notes)


def test_a_large_file_with_another_digest_leaves_nothing(hub: Hub, small_parts: None, tmp_path: Path) -> None:
    """The difference is found when layers are already packed."""

    def changed(body: bytes) -> bytes:
        return body[:-1] + bytes([body[-1] ^ 1]) if len(body) > LARGE else body

    hub.fault = lambda request: Answer(change=changed) if request.path.startswith("/network/") else None
    with pytest.raises(Altered, match=r"its SHA-256 is \w+, but the Hub lists"):
        moepack.compress(f"{NAME}:Q8_0", tmp_path / "out", method="finequant")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("killed", [True, False])
def test_a_killed_job_continues(
    hub: Hub,
    repository: Path,
    tmp_path: Path,
    small_parts: None,
    monkeypatch: pytest.MonkeyPatch,
    killed: bool,
) -> None:
    """If too much would have to be downloaded again to verify the file, its report says so."""
    awaited = "out.partial/*.safetensors" if killed else "out.source/moe-*.gguf-*"
    gone = held_from(hub, lambda: bool(list(tmp_path.glob(awaited))))
    code = (
        "import sys, moepack; from moepack.checkpoint.remote import parts; parts.WHOLE, parts.LEAST = 60_000, 40_000; "
        f"moepack.compress('{NAME}:Q8_0', sys.argv[1], method='finequant', calibration=None, disk_budget=sys.argv[2])"
    )
    found = open_remote(f"{NAME}:Q8_0")
    budget = str(0 if found is None else 4 * max(found[1].sizes.values()))
    there = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    environment = {**os.environ, **there, "PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, "-c", code, str(tmp_path / "out"), budget]
    with interruptible():
        job = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob(awaited)):
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    job.send_signal(signal.SIGKILL if killed else signal.SIGINT)
    job.wait(300)
    assert not (tmp_path / "out").exists() and (tmp_path / "out.source").exists()
    gone.set()
    monkeypatch.setattr(files, "LARGEST_REST", 1000 if killed else 64 << 20)
    report = moepack.compress(f"{NAME}:Q8_0", tmp_path / "out", method="finequant", disk_budget=budget)
    moepack.compress(local_of(repository, "Q8_0"), tmp_path / "local", method="finequant")
    assert same_but_source(tmp_path / "out") == same_but_source(tmp_path / "local")
    assert any("SHA-256 of moe-Q8_0.gguf was not compared" in note for note in report.notes) == killed
    assert not list(tmp_path.glob("out.*"))

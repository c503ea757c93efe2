"""Models on a hub, packed while they are downloaded. The hub is a server on loopback (`hub_support`)."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import moepack
import packed_support as support
import tiny_models
from checkpoint.test_pickles import pickled
from command_support import interruptible
from hub_support import COMMIT, Answer, Hub, Request, bytes_in, cached, held_from, serving, use
from moepack.checkpoint.quantized import open_checkpoint
from moepack.checkpoint.remote import open_remote, reading, transfer
from moepack.checkpoint.remote.transfer import Listing, Transfer
from moepack.errors import CheckpointError, DiskError, DownloadError, InvalidTensorError, ResumeError
from moepack.format.side import RECIPE
from moepack.methods import create
from moepack.methods.qmoe.ternary import Ternary
from moepack.pipeline.estimate import estimate
from moepack.pipeline.recipe import Recipe
from moepack.pipeline.source import opened
from moepack.progress import Bar, Lines
from places import ROOT

NAME = "someone/moe"
TEXT = "the sea and the wolf and the fire said " * 60


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of many small shards, whose layers share shards."""
    return tiny_models.build("qwen3_moe", tmp_path_factory.mktemp("sharded") / "model", max_shard_size="60KB")


@pytest.fixture
def hub(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the model, which this process uses, and an empty cache."""
    with serving({NAME: sharded}) as server:
        use(server, tmp_path, monkeypatch)
        yield server


@pytest.fixture(scope="session")
def packed_by_auto(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, packed from its directory by the default method without a text."""
    return moepack.compress(sharded, tmp_path_factory.mktemp("auto") / "out", calibration="none").path


def same_but_source(directory: Path) -> dict[str, bytes]:
    """Every file of a packed directory; the recipe without its source, which has a name only on the Hub."""
    files = support.contents(directory)
    return {**files, RECIPE: Recipe.read(directory / RECIPE).without_source().to_bytes()}


def total(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def downloaded(folder: Path) -> int:
    """The bytes of shards in a folder, complete or not."""
    return bytes_in(folder, "*.safetensors", "*.part")


def test_a_remote_checkpoint_reads_what_the_directory_holds(hub: Hub, sharded: Path) -> None:
    found = open_remote(NAME)
    assert found is not None
    remote, local = found[0], open_checkpoint(sharded)
    assert remote.config == local.config and remote.names() == local.names()
    assert remote.fingerprint() == local.fingerprint()
    for name in local.names()[::5]:
        assert remote.info(name).shape == local.info(name).shape
        assert remote.tensor(name).equal(local.tensor(name))


def test_a_mirror_may_list_names_only(hub: Hub, sharded: Path) -> None:
    hub.names_only = True
    found = open_remote(NAME)
    assert found is not None and found[0].fingerprint() == open_checkpoint(sharded).fingerprint()
    assert all(len(stamp.split()[1]) == 64 for stamp in found[0].stamps().values()), "the digests are known"


def test_a_plan_reads_headers_only(hub: Hub, sharded: Path, tmp_path: Path) -> None:
    before = estimate(sharded, tmp_path / "out", create("finequant", bits=4))
    plan = estimate(NAME, tmp_path / "out", create("finequant", bits=4))
    assert (plan.parts, plan.kept, plan.seconds) == (before.parts, before.kept, before.seconds)
    assert plan.streaming is not None and plan.streaming.download == total(sharded)
    whole = [each for each in hub.shards() if each.start is None]
    assert not whole and not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("finequant", {"bits": 3}),
        ("auto", {"calibration": "none"}),
        ("qmoe", {"samples": 4, "sequence_length": 32}),
        ("codequant", {"samples": 4, "sequence_length": 32}),
        ("milo", {}),
    ],
)
def test_the_result_equals_that_of_the_directory(
    hub: Hub,
    sharded: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    method: str,
    settings: dict[str, Any],
) -> None:
    if "samples" in settings:
        (tmp_path / "text.txt").write_text(TEXT)
        settings = {**settings, "calibration": str(tmp_path / "text.txt")}
    moepack.compress(NAME, tmp_path / "remote", method=method, **settings)
    if method == "auto":
        local: Path = request.getfixturevalue("packed_by_auto")
    else:
        local = moepack.compress(sharded, tmp_path / "local", method=method, **settings).path
    assert same_but_source(tmp_path / "remote") == same_but_source(local)
    source = Recipe.read(tmp_path / "remote").source
    assert source is not None and (source.name, source.revision) == (NAME, COMMIT)
    assert not list(tmp_path.glob("remote.*")), "nothing of the download remains"
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize("shards", [1, 3])
def test_pickles_are_read_by_ranges_and_packed_while_they_are_downloaded(
    shards: int, qwen3_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, counted = pickled(qwen3_moe, tmp_path / "model", shards), list[int]()
    read = Transfer.read

    def counting(self: Transfer, name: str, start: int, stop: int) -> bytes:
        counted.append(stop - start)
        return read(self, name, start, stop)

    with serving({NAME: model}) as server:
        use(server, tmp_path, monkeypatch)
        monkeypatch.setattr(Transfer, "read", counting)
        monkeypatch.setattr(reading, "BLOCK", 512)
        found = open_remote(NAME)
        assert found is not None and found[0].notes == open_checkpoint(model).notes
        assert found[0].fingerprint() == open_checkpoint(model).fingerprint()
        counted.clear()
        assert open_remote(NAME) is not None
        assert sum(counted) < sum(file.stat().st_size for file in model.glob("*.bin")) / 2
        moepack.compress(NAME, tmp_path / "remote", method="finequant", bits=4)
        assert not list((tmp_path / "cache").rglob("*.bin")) and not list(tmp_path.glob("remote.*"))
    moepack.compress(model, tmp_path / "local", method="finequant", bits=4)
    assert same_but_source(tmp_path / "remote") == same_but_source(tmp_path / "local")


def test_shards_on_disk_stay_within_the_budget(hub: Hub, sharded: Path, tmp_path: Path) -> None:
    seen: list[int] = []

    class Watching(moepack.progress.Silent):
        def traffic(self, received: int, left: int, disk: int) -> None:
            seen.append(downloaded(tmp_path / "out.source"))
            assert disk <= budget

    sizes = sorted(file.stat().st_size for file in sharded.glob("*.safetensors"))
    budget = sum(sizes[-4:])
    assert budget < total(sharded) / 2, "the test needs a model that exceeds its budget"
    moepack.compress(NAME, tmp_path / "out", method=Ternary(), progress=Watching(), disk_budget=budget)
    assert seen and max(seen) <= budget
    starts = [each.path for each in hub.shards() if each.start == 0]
    assert len(starts) <= 3 * len(sizes), "headers, fingerprint and one download of each shard"


def test_a_sample_of_removed_shards_is_read_by_ranges(hub: Hub, sharded: Path, tmp_path: Path) -> None:
    found = open_remote(NAME, tmp_path / "shards")
    assert found is not None
    checkpoint, files = found
    names = [name for name in checkpoint.names() if "experts" in name]
    shards = list(dict.fromkeys(checkpoint.info(name).file.name for name in names))
    files.claim(3 * max(files.sizes.values()))
    checkpoint.expect([[name] for name in names])
    for name in names:
        checkpoint.tensor(name)
    local, before = open_checkpoint(sharded), hub.sent
    for name in names[:: len(names) // 4]:
        assert checkpoint.tensor(name).equal(local.tensor(name))
    sample = hub.sent - before
    assert sample <= 5 * max(checkpoint.info(name).nbytes for name in names)
    before = hub.sent
    for name in names:
        assert checkpoint.tensor(name).equal(local.tensor(name))
    files.close(remove=True)
    assert hub.sent - before <= 1.3 * sum(files.sizes[shard] for shard in shards)
    assert not (tmp_path / "shards").exists()


def test_a_budget_below_a_layer_is_refused_before_the_download(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="disk budget of 1 kB is too small: a layer of this model needs"):
        moepack.compress(NAME, tmp_path / "out", method=Ternary(), disk_budget="1kB")
    assert not list(tmp_path.glob("out*"))


def test_a_method_with_several_passes_downloads_once(hub: Hub, packed_by_auto: Path, tmp_path: Path) -> None:
    plan = estimate(NAME, tmp_path / "out", create("auto", calibration="none"))
    assert plan.streaming is not None and plan.streaming.whole and plan.plan is None
    small = estimate(NAME, tmp_path / "out", create("auto", calibration="none"), disk_budget="200kB")
    assert any("reads all weights several times" in note for note in small.notes)
    moepack.compress(NAME, tmp_path / "out", calibration="none", disk_budget="200kB")
    assert same_but_source(tmp_path / "out") == same_but_source(packed_by_auto)


def test_kept_shards_are_in_the_cache_and_serve_the_next_job(hub: Hub, sharded: Path, tmp_path: Path) -> None:
    moepack.compress(NAME, tmp_path / "out", method=Ternary(), keep_source=True)
    kept = (tmp_path / "cache").rglob("snapshots/*/*.safetensors")
    assert {file.name for file in kept} == {file.name for file in sharded.glob("*.safetensors")}
    assert open_remote(NAME) is None, "the cache holds the model"
    hub.close()
    moepack.compress(NAME, tmp_path / "again", method=Ternary())
    assert support.contents(tmp_path / "out") == support.contents(tmp_path / "again")


def test_a_complete_cache_is_used_without_a_connection(hub: Hub, sharded: Path, tmp_path: Path) -> None:
    cached(tmp_path / "cache", NAME, sharded)
    assert open_remote(NAME) is None
    assert not hub.shards()


FAULTS = {
    "too many requests": Answer(status=429, headers={"Retry-After": "0"}),
    "unavailable": Answer(status=503, headers={"Retry-After": "0"}),
    "server error": Answer(status=500),
    "a truncated body": Answer(keep=1000),
    "an empty body": Answer(keep=0),
    "a stalling peer": Answer(delay=1.5),
    "an ignored range": Answer(whole=True),
    "an expired address": Answer(status=403),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_network_do_not_change_the_result(
    hub: Hub, packed_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Every ninth request for weights is answered wrongly."""
    counted = [0]
    if fault == "a stalling peer":
        # The timeout is short for weights only, and on a busy machine other answers may be late, too.
        prepare = Transfer.__init__

        def impatient(self: Transfer, listing: Listing) -> None:
            prepare(self, listing)
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 1)

        monkeypatch.setattr(Transfer, "__init__", impatient)
        monkeypatch.setattr(transfer, "ATTEMPTS", 100)

    def broken(request: Request) -> Answer | None:
        if not request.path.startswith("/network/"):
            return None
        counted[0] += 1
        due = counted[0] % (9 if fault != "a stalling peer" else 150) == 5
        return FAULTS[fault] if due else None

    hub.fault = broken
    moepack.compress(NAME, tmp_path / "out", method=Ternary())
    assert counted[0] > 5
    assert support.contents(tmp_path / "out") == support.contents(packed_shards)


@pytest.fixture(scope="session")
def packed_shards(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, packed from its directory."""
    out = tmp_path_factory.mktemp("sharded") / "packed"
    moepack.compress(sharded, out, method=Ternary())
    return out


def test_the_token_is_not_sent_to_the_content_network(
    sharded: Path, packed_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving({NAME: sharded}, token="hf_secret") as server:
        use(server, tmp_path, monkeypatch)
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        with pytest.raises(DownloadError, match="gated"):
            moepack.compress(NAME, tmp_path / "out", method=Ternary())
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        moepack.compress(NAME, tmp_path / "out", method=Ternary())
        assert server.shards() and not any(each.authorization for each in server.shards())
    assert support.contents(tmp_path / "out") == support.contents(packed_shards)


def test_other_bytes_than_listed_are_refused(hub: Hub, tmp_path: Path) -> None:
    def changed(body: bytes) -> bytes:
        return body[:-1] + bytes([body[-1] ^ 1]) if len(body) > 20_000 else body

    hub.fault = lambda request: Answer(change=changed) if request.path.startswith("/network/") else None
    with pytest.raises(DownloadError, match="SHA-256"):
        moepack.compress(NAME, tmp_path / "out", method=Ternary())
    assert not (tmp_path / "out").exists()


VERSIONS = {
    "another commit": ("/someone/", {"X-Repo-Commit": "f" * 40}, f"sent commit {'f' * 40} instead of {COMMIT}"),
    "another file": ("/someone/", {"X-Linked-Etag": f'"{"e" * 64}"'}, f"has the SHA-256 {'e' * 64}, but the Hub lists"),
    "a changed file": ("/network/", {"ETag": '"changed"'}, r"changed during the download: its tag was '\w+-5' and is"),
    "another range": ("/network/", {"Content-Range": "bytes 0-9/99"}, "sent the range 'bytes 0-9/99' instead of"),
    "no range": ("/network/", {"Content-Range": "items 1"}, "sent the range 'items 1' instead of that from"),
    "another size": ("/network/", {"Content-Range": "bytes {start}-{start}/9"}, "sent .* bytes as the range"),
    "a compressed range": ("/network/", {"Content-Encoding": "br"}, "a range of compressed content"),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_ranges_of_another_version_are_refused(hub: Hub, version: str) -> None:
    found = open_remote(NAME)
    assert found is not None
    checkpoint, files = found
    path, headers, message = VERSIONS[version]
    files._transfer._locations.clear()  # opening the model followed the redirects

    def wrong(request: Request) -> Answer | None:
        if not request.path.startswith(path) or request.start is None:
            return None
        return Answer(headers={key: value.replace("{start}", str(request.start)) for key, value in headers.items()})

    hub.fault = wrong
    with pytest.raises(DownloadError, match=message):
        checkpoint.tensor(next(name for name in checkpoint.names() if "experts" in name))


def test_files_of_xet_storage_are_read_over_http(hub: Hub, packed_shards: Path, tmp_path: Path) -> None:
    """The redirect of a file leads to its bytes, whether hf_xet is installed or not."""
    hub.xet = True
    moepack.compress(NAME, tmp_path / "out", method=Ternary())
    assert support.contents(tmp_path / "out") == support.contents(packed_shards)


@pytest.mark.parametrize("reason", ["disabled", "not installed"])
def test_files_of_xet_storage_are_kept_without_hf_xet(
    hub: Hub, sharded: Path, packed_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "disabled":  # by HF_HUB_DISABLE_XET
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    else:
        monkeypatch.setattr("huggingface_hub.file_download.is_xet_available", lambda: False)
    hub.xet = True
    moepack.compress(NAME, tmp_path / "out", method=Ternary(), keep_source=True)
    assert support.contents(tmp_path / "out") == support.contents(packed_shards)
    kept = (tmp_path / "cache").rglob("snapshots/*/*.safetensors")
    assert {file.name for file in kept} == {file.name for file in sharded.glob("*.safetensors")}


def test_a_failure_of_xet_storage_names_the_way_around(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("hf_xet")
    hub.xet = True
    with pytest.raises(DownloadError, match=r"cannot be downloaded: .*; HF_HUB_DISABLE_XET=1 downloads without hf_xet"):
        moepack.compress(NAME, tmp_path / "out", method=Ternary(), keep_source=True)
    assert not (tmp_path / "out").exists()


def test_a_lost_connection_is_continued_by_the_same_call(hub: Hub, packed_shards: Path, tmp_path: Path) -> None:
    def lost(request: Request) -> Answer | None:
        return Answer(keep=0) if request.path.startswith("/network/") and hub.sent > limit else None

    with pytest.raises(DownloadError, match="cannot be downloaded"):
        limit = 0
        hub.fault = lost
        moepack.compress(NAME, tmp_path / "out", method=Ternary())
    hub.fault, before = lambda _: None, hub.sent
    found = open_remote(NAME)
    assert found is not None
    found[0].fingerprint()
    limit = hub.sent + (hub.sent - before) + 250_000  # in the middle of the shards
    hub.fault = lost
    with pytest.raises(DownloadError, match=f"{NAME}/model-"):
        moepack.compress(NAME, tmp_path / "out", method=Ternary())
    assert (tmp_path / "out.source").exists()
    hub.fault = lambda _: None
    moepack.compress(NAME, tmp_path / "out", method=Ternary())
    assert support.contents(tmp_path / "out") == support.contents(packed_shards)
    assert not list(tmp_path.glob("out.*"))


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_job_is_continued(hub: Hub, packed_shards: Path, tmp_path: Path, kill: signal.Signals) -> None:
    awaited = {signal.SIGINT: "out.source/*.safetensors", signal.SIGKILL: "out.partial/*.safetensors"}[kill]
    gone = held_from(hub, lambda: bool(list(tmp_path.glob(awaited))))
    code = (
        "import sys, moepack; from moepack.methods.qmoe.ternary import Ternary; "
        f"moepack.compress({NAME!r}, sys.argv[1], method=Ternary())"
    )
    there = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    environment = {**os.environ, **there, "PYTHONPATH": str(ROOT / "python")}
    with interruptible():
        job = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob(awaited)):
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    job.send_signal(kill)
    job.wait(300)
    assert not (tmp_path / "out").exists() and (tmp_path / "out.source").exists()
    gone.set()
    before = downloaded(tmp_path / "out.source")
    start = len(hub.requests)
    moepack.compress(NAME, tmp_path / "out", method=Ternary())
    assert support.contents(tmp_path / "out") == support.contents(packed_shards)
    assert before and start and not list(tmp_path.glob("out.*"))


def test_a_full_disk_is_an_error_that_keeps_the_download(
    hub: Hub, packed_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moepack.checkpoint.remote.files import RemoteFiles

    receive = RemoteFiles._receive

    def full(self: RemoteFiles, name: str, part: Path) -> None:
        if "00004" in name:
            raise DiskError("cannot be written: No space left on device", file=part)
        receive(self, name, part)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFiles, "_receive", full)
        with pytest.raises(DiskError, match="No space left"):
            moepack.compress(NAME, tmp_path / "out", method=Ternary())
    assert (tmp_path / "out.source").exists()
    moepack.compress(NAME, tmp_path / "out", method=Ternary())
    assert support.contents(tmp_path / "out") == support.contents(packed_shards)


def test_shards_stay_beside_finished_layers_after_any_exception(hub: Hub, tmp_path: Path) -> None:
    for layers in (True, False):
        with pytest.raises(MemoryError), opened(NAME, tmp_path / "out") as source:
            assert source.remote is not None
            source.remote.claim(10**6)
            (tmp_path / "out.partial").mkdir() if layers else (tmp_path / "out.partial").rmdir()
            raise MemoryError
        assert (tmp_path / "out.source").exists() == layers


def test_shards_of_another_commit_are_not_used(hub: Hub, packed_shards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out.source"
    (folder / "tensors").mkdir(parents=True)
    (folder / ("f" * 40)).touch()
    for number in range(1, 4):
        (folder / f"model-{number:05d}-of-00008.safetensors").write_bytes(b"old")
    moepack.compress(NAME, tmp_path / "out", method=Ternary())
    assert support.contents(tmp_path / "out") == support.contents(packed_shards)


def test_a_folder_of_the_user_is_not_emptied(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "out.source").mkdir()
    (tmp_path / "out.source" / "notes.txt").write_text("mine")
    with pytest.raises(ResumeError, match="was not created by moepack"):
        moepack.compress(NAME, tmp_path / "out", method=Ternary())
    assert (tmp_path / "out.source" / "notes.txt").read_text() == "mine"


def test_a_budget_for_a_directory_is_refused(sharded: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="applies only to a Hub model"):
        moepack.compress(sharded, tmp_path / "out", method=Ternary(), disk_budget="1GB")


@pytest.mark.parametrize("awaited", [False, True], ids=["before it is needed", "while a reader waits"])
def test_a_failed_download_ahead_is_repeated_when_it_is_needed(
    hub: Hub, packed_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, awaited: bool
) -> None:
    from moepack.checkpoint.remote.files import RemoteFiles

    receive, failed = RemoteFiles._receive, []

    def once(self: RemoteFiles, name: str, part: Path) -> None:
        if name not in self._wanted and name not in failed:
            failed.append(name)
            deadline = time.monotonic() + (60 if awaited else 0)
            while name not in self._wanted and time.monotonic() < deadline:
                time.sleep(0.01)
            raise DownloadError("cannot be downloaded: the server is restarting", file=name)
        receive(self, name, part)

    monkeypatch.setattr(RemoteFiles, "_receive", once)
    moepack.compress(NAME, tmp_path / "out", method=Ternary())
    assert failed and support.contents(tmp_path / "out") == support.contents(packed_shards)


def test_two_jobs_do_not_share_a_folder(hub: Hub, tmp_path: Path) -> None:
    first, second = (open_remote(NAME, tmp_path / "out.source") for _ in range(2))
    assert first is not None and second is not None
    first[1].claim(10**6)
    with pytest.raises(ResumeError, match="another process"):
        second[1].claim(10**6)
    second[1].close(remove=True)
    assert (tmp_path / "out.source").exists()
    first[1].close(remove=True)
    assert not (tmp_path / "out.source").exists()


@pytest.mark.parametrize("display", [Lines, Bar])
def test_progress_shows_packing_download_and_disk(hub: Hub, tmp_path: Path, display: type[Lines] | type[Bar]) -> None:
    hub.pause = 0.05
    shown = Console(file=StringIO(), force_terminal=display is Bar, width=300)
    moepack.compress(NAME, tmp_path / "out", method=Ternary(), progress=display(shown))
    lines = re.split("[\n\r]", shown.file.getvalue())  # type: ignore[attr-defined]
    together = [line for line in lines if "weights/s" in line and "to download" in line and "on disk" in line]
    assert together and any("experts" in line for line in together)


def test_a_defect_of_the_model_leaves_no_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build("mixtral", tmp_path / "model", max_shard_size="60KB")
    checkpoint = open_checkpoint(model)
    info = checkpoint.info(next(name for name in checkpoint.names() if "experts" in name))
    data = bytearray(info.file.read_bytes())
    data[info.offset : info.offset + 2] = b"\xff\x7f"  # NaN
    info.file.write_bytes(data)
    with serving({NAME: model}) as server:
        use(server, tmp_path, monkeypatch)
        with pytest.raises(InvalidTensorError):
            moepack.compress(NAME, tmp_path / "out", method=Ternary())
    assert not list(tmp_path.glob("out.source")) or list(tmp_path.glob("out.partial"))


def test_names_and_revisions_that_the_hub_lacks(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="does not exist or is private"):
        moepack.compress("someone/other", tmp_path / "out")
    with pytest.raises(CheckpointError, match="no such revision"):
        moepack.compress(f"{NAME}@v9", tmp_path / "out")
    found = open_remote(f"{NAME}@{COMMIT}")
    assert found is not None and found[0].names()

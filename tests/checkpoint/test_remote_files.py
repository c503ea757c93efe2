"""Downloads of shards: interrupted readers, what an earlier run left, and digests of parts, without a model."""

import hashlib
import threading
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hub_support import Answer, Hub, Request, held_from, serving, use
from moepack.checkpoint.remote import files as files_module
from moepack.checkpoint.remote import kept, parts, sums
from moepack.checkpoint.remote.files import RemoteFiles
from moepack.checkpoint.remote.parts import Part, Parts
from moepack.checkpoint.remote.sums import Sums
from moepack.checkpoint.remote.transfer import Listing, RemoteFile, Transfer, list_model
from moepack.errors import DiskError, DownloadError, ResumeError
from moepack.format.header import Header, TensorInfo, read_header

NAME = "someone/shards"
SHARDS = [f"model-{number}.safetensors" for number in range(4)]
LONG = 60.0
"""Seconds after which a wait has failed."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Shards of one tensor each, and the same names with other values in two folders."""
    folder = tmp_path / "model"
    for place in ("", "BF16", "F16"):
        (folder / place).mkdir(parents=True)
        for number, name in enumerate(SHARDS):
            values = torch.full((8_000,), 10 * number + len(place), dtype=torch.float32)
            save_file({f"w{number}": values}, folder / place / name)
    return folder


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving({NAME: model}) as server:
        use(server, tmp_path, monkeypatch)
        yield server


def headers(folder: Path) -> Mapping[str, Header]:
    return {name: read_header(folder / name) for name in SHARDS}


def remote(model: Path, folder: Path, place: str = "", budget: int | None = 10**6) -> RemoteFiles:
    """The shards of a folder of the repository, ready to download into `folder`."""
    transfer = Transfer(list_model(NAME, None).within(place))
    found = RemoteFiles(headers(model / place), transfer, {}, folder)
    found.claim(budget)
    return found


def infos(found: RemoteFiles) -> list[TensorInfo]:
    return [info for header in found.shards.values() for info in header.tensors.values()]


def in_thread(work: Any, *arguments: Any) -> tuple[threading.Thread, list[Any]]:
    """Start a thread; its result, or its exception, will be in the list."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work(*arguments))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def ended(thread: threading.Thread) -> None:
    thread.join(LONG)
    assert not thread.is_alive()


def test_a_reader_does_not_wait_for_stopped_downloads(hub: Hub, model: Path, tmp_path: Path) -> None:
    reached = threading.Event()

    def reach() -> bool:
        reached.set()
        return True

    released = held_from(hub, reach)
    found = remote(model, tmp_path / "out.source")
    first = infos(found)[0]
    found.expect([[first]])
    thread, results = in_thread(found.raw, first)
    assert reached.wait(LONG)
    closing = threading.Thread(target=found.close, args=(False,), daemon=True)
    closing.start()
    ended(thread)
    released.set()
    ended(closing)
    assert isinstance(results[0], DownloadError) and "stopped" in str(results[0])


def test_a_shard_that_cannot_be_removed_is_an_error_of_the_reader(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    found = remote(model, tmp_path / "out.source", budget=40_000)
    found.expect([[each] for each in infos(found)])
    assert found.raw(infos(found)[0]).size
    monkeypatch.setattr(files_module, "remove", refuse)
    thread, results = in_thread(lambda: [found.raw(each) for each in infos(found)])
    ended(thread)
    monkeypatch.undo()
    assert isinstance(results[0], DiskError) and "cannot remove: Permission denied" in str(results[0])
    found.close(remove=True)


def test_files_of_one_name_in_two_folders_are_not_mixed_up(hub: Hub, model: Path, tmp_path: Path) -> None:
    """An interrupted job over one folder of a repository leaves shards with the names of the other folder's."""
    folder = tmp_path / "out.source"
    for place in ("BF16", "F16"):
        found = remote(model, folder, place)
        found.gather(infos(found)[:1])
        found.expect([infos(found)])
        assert [each.view(np.float32)[0] for each in map(found.raw, infos(found))] == [
            10 * number + len(place) for number in range(len(SHARDS))
        ]
        found.close(remove=False)


def test_another_run_of_the_same_job_takes_over_shards(hub: Hub, model: Path, tmp_path: Path) -> None:
    for _ in range(2):
        found = remote(model, tmp_path / "out.source")
        found.expect([infos(found)])
        for each in infos(found):
            found.raw(each)
        found.close(remove=False)
    assert len(hub.shards()) == len(SHARDS)


def test_a_smaller_budget_applies_to_what_an_earlier_run_left(hub: Hub, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out.source"
    found = remote(model, folder)
    found.expect([infos(found)])
    for each in infos(found):
        found.raw(each)
    found.close(remove=False)
    largest = max(found.sizes.values())
    found = remote(model, folder, budget=2 * largest)
    held_from(hub, lambda: True)
    found.expect([[each] for each in infos(found)])
    assert found.traffic().disk <= 2 * largest
    assert sorted(file.name for file in folder.glob("*.safetensors")) == SHARDS[:2]
    hub.fault = lambda _: None
    found.close(remove=True)


def test_a_folder_without_files_is_taken_over(hub: Hub, model: Path, tmp_path: Path) -> None:
    """A process that is killed at its start may leave one."""
    (tmp_path / "out.source").mkdir()
    remote(model, tmp_path / "out.source").close(remove=True)
    (tmp_path / "out.source").mkdir()
    (tmp_path / "out.source" / "notes.txt").touch()
    with pytest.raises(ResumeError, match="was not created by moepack"):
        remote(model, tmp_path / "out.source")


def test_tensors_that_share_their_bytes_are_kept_once(hub: Hub, model: Path, tmp_path: Path) -> None:
    """Pickles of a model with tied embeddings have such tensors."""
    found = remote(model, tmp_path / "out.source")
    tied = [replace(infos(found)[1], name=name) for name in ("embedding", "head", *map(str, range(6)))]
    found.gather(tied)
    assert len(hub.shards()) == 1 and len(list((tmp_path / "out.source/tensors").iterdir())) == 1
    for each in tied:
        assert found.raw(each).view(np.float32)[0] == 10
        found.release([each])
    assert len(hub.shards()) == 1 and not list((tmp_path / "out.source/tensors").iterdir())
    found.close(remove=True)


def test_ctrl_c_does_not_wait_for_tensors_that_are_gathered(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streams of the other threads end before their next piece."""
    begun, interrupted, completed = threading.Event(), threading.Event(), list[str]()
    stream, stop = Transfer.stream, Transfer.stop

    def held(self: Transfer, name: str, start: int, end: int) -> Iterator[bytes]:
        pieces = stream(self, name, start, end)
        if name != SHARDS[0]:
            yield next(pieces)[:1]
            begun.set()
            assert interrupted.wait(LONG)
        yield from pieces
        completed.append(name)

    def stopping(self: Transfer) -> None:
        stop(self)
        interrupted.set()

    def interrupt() -> None:
        assert begun.wait(LONG)
        raise KeyboardInterrupt

    found = remote(model, tmp_path / "out.source")
    monkeypatch.setattr(Transfer, "stream", held)
    monkeypatch.setattr(Transfer, "stop", stopping)
    found.report = interrupt
    first, second = infos(found)[:2]
    with pytest.raises(KeyboardInterrupt):
        found.gather([first, second])
    assert SHARDS[1] not in completed
    found.close(remove=True)


def test_a_pause_that_a_server_asks_for_ends_with_the_download(hub: Hub, model: Path, tmp_path: Path) -> None:
    asked = threading.Event()

    def busy(request: Request) -> Answer | None:
        asked.set()
        return Answer(status=429, headers={"Retry-After": "300"})

    found = remote(model, tmp_path / "out.source")
    hub.fault = busy
    thread, results = in_thread(found._transfer.read, SHARDS[0], 0, 100)
    assert asked.wait(LONG)
    while thread.is_alive():  # the stream may not have begun to wait
        found._transfer.stop()
        thread.join(0.05)
    assert isinstance(results[0], DownloadError) and "stopped" in str(results[0])
    found.close(remove=True)


def test_a_range_is_in_memory_once(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transfer, "stream", lambda *_: (bytes(1 << 20) for _ in range(8)))
    found = RemoteFiles(headers(model), Transfer(list_model(NAME, None)), {}, None)
    large = replace(infos(found)[0], nbytes=8 << 20)
    tracemalloc.start()
    data = found.raw(large)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert data.nbytes == large.nbytes and peak < 1.5 * data.nbytes


def test_strided_tensors_are_compared_to_their_last_element(hub: Hub, model: Path, tmp_path: Path) -> None:
    values = torch.zeros(2, 1000)
    other = values.clone()
    other[1, 999] = 1
    save_file({"one": values, "other": other}, model / "both.safetensors")
    header = read_header(model / "both.safetensors")
    found = RemoteFiles({"both.safetensors": header}, Transfer(list_model(NAME, None)), {}, None)
    one, last = (replace(info, shape=(2,), nbytes=8, strides=(1999,)) for info in header.tensors.values())
    assert found.equal(one, one) and not found.equal(one, last)


def _sums(content: bytes, pieces: Any) -> tuple[Sums, list[Part], Path]:
    """The digest of a shard of three tensors, one in each part; `pieces` reads the parts that are not downloaded."""
    third = len(content) // 3
    file = Path("moe.safetensors")
    tensors = {str(at): TensorInfo(str(at), (third,), torch.uint8, file, at * third, third) for at in range(3)}
    header = Header(file, len(content), tensors, {}, "", "")
    listing = Listing(NAME, None, "0", {file.name: RemoteFile(file.name, len(content), _digest(content))})
    found = Parts({file.name: header}, ())
    return Sums(found, listing, pieces), found.of(file.name), file


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_part_that_was_removed_before_its_turn_is_read_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "WHOLE", 1000)
    monkeypatch.setattr(parts, "LEAST", 1000)
    content = bytes(range(256)) * 12
    sums, (first, second, third), _ = _sums(content, lambda part: iter([content[part.start : part.stop]]))
    sums.expect([first.name, second.name, third.name])
    for part in (second, first, third):
        path = tmp_path / part.name
        path.write_bytes(content[part.start : part.stop])
        sums.add(part, path)
        if part is second:
            sums.forget(second)
    assert sums.read() and sums.unverified
    sums.wait()
    assert not sums.unverified


@pytest.mark.parametrize("failing", ["ranges", "a file"])
def test_a_part_that_could_not_be_read_counts_once(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is lost in the middle of a part is no difference of the file."""
    monkeypatch.setattr(parts, "WHOLE", 1000)
    monkeypatch.setattr(parts, "LEAST", 1000)
    content, failures = bytes(range(256)) * 12, [DownloadError("cannot be downloaded: lost", file="moe")]

    def broken(data: bytes) -> Iterator[bytes]:
        yield data[:10]
        if failures:
            raise failures.pop()
        yield data[10:]

    found, three, _ = _sums(content, lambda part: broken(content[part.start : part.stop]))
    if failing == "a file":
        found.expect(part.name for part in three)
        monkeypatch.setattr(sums, "_blocks", lambda stream: broken(stream.read()))
    for part in three:
        (tmp_path / part.name).write_bytes(content[part.start : part.stop])
        if failing == "a file":
            found.add(part, tmp_path / part.name)
    with pytest.raises(DownloadError, match="lost"):
        found.read()
    found.wait()
    assert not found.unverified


def test_what_cannot_be_verified_at_first_does_not_fail_a_download(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "WHOLE", 10_000)
    monkeypatch.setattr(parts, "LEAST", 10_000)
    folder = tmp_path / "repository"
    folder.mkdir()
    save_file({f"w{number}": torch.full((4_000,), float(number)) for number in range(4)}, folder / SHARDS[0])
    hub.models[NAME] = folder
    header = read_header(folder / SHARDS[0])
    found = RemoteFiles({SHARDS[0]: header}, Transfer(list_model(NAME, None)), {}, tmp_path / "out.source")
    found.claim(10**6)
    first, *others = header.tensors.values()
    found.gather([first])
    read, failures = found._read_runs, [DownloadError("cannot be downloaded: lost", file="moe")]

    def once(*arguments: Any) -> Iterator[bytes | memoryview]:
        for number, piece in enumerate(read(*arguments)):
            yield piece
            if number == 0 and failures:
                raise failures.pop()

    monkeypatch.setattr(found, "_read_runs", once)
    found.expect([others])
    assert [found.raw(each).view(np.float32)[0] for each in others] == [1, 2, 3]
    found.clear()
    assert not failures and not found.notes
    found.close(remove=True)


def test_windows_waits_until_a_part_is_closed_before_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "WHOLE", 1000)
    monkeypatch.setattr(parts, "LEAST", 1000)
    monkeypatch.setattr(sums, "KEEPS_REMOVED", False)
    content, begun, proceed = bytes(3072), threading.Event(), threading.Event()
    blocks = sums._blocks

    def held(stream: Any) -> Iterator[bytes | memoryview]:
        begun.set()
        assert proceed.wait(LONG)
        yield from blocks(stream)

    monkeypatch.setattr(sums, "_blocks", held)
    found, (first, *_), _ = _sums(content, lambda part: None)
    (tmp_path / first.name).write_bytes(content[: first.size])
    found.add(first, tmp_path / first.name)
    reading, _ = in_thread(found.read)
    assert begun.wait(LONG)
    forgetting, _ = in_thread(found.forget, first)
    forgetting.join(0.3)
    assert forgetting.is_alive()
    proceed.set()
    ended(reading)
    ended(forgetting)


def test_results_of_threads_come_in_order() -> None:
    assert list(kept.at_once(None, lambda number: number * number, range(40))) == [n * n for n in range(40)]  # type: ignore[arg-type]

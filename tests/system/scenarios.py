"""What `simulated.py` does under the rules of another system. Each function gets the system and an empty folder."""

import gc
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from windows_files import REFUSED

import moepack
from fork_support import forked
from hub_support import serving, use
from moepack.errors import CheckpointError, CorruptionError, DiskError, MoepackError, ResumeError
from moepack.export import export
from moepack.format.atomic import write_file
from moepack.methods.qmoe.ternary import Ternary
from moepack.pipeline import solving
from moepack.pipeline.journal import Workspace
from moepack.system import files
from packed_support import contents
from places import TINY_MOE

TOKENS = torch.arange(8).view(1, -1)


def packed(work: Path, name: str = "packed") -> Path:
    """Pack the model that lies next to the folder."""
    moepack.compress(work.with_name("model"), work / name, method="finequant", calibration=None, threads=1)
    return work / name


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


@contextmanager
def refused(system: str, expected: type[BaseException] = DiskError) -> Iterator[None]:
    """Expect that a file in use is not replaced or removed on Windows, with the reason, and that it is elsewhere."""
    before = len(REFUSED)
    try:
        yield
        assert system != "win32", "nothing was refused"
    except expected as error:
        assert system == "win32" and len(REFUSED) > before
        assert "a program has the file open, or a loaded model is mapped from it" in str(error), error


def interrupted_jobs_continue(system: str, work: Path) -> None:
    append, written = Workspace.append, []

    def interrupt(self, shard):
        append(self, shard)
        written.append(shard.name)
        raise KeyboardInterrupt

    Workspace.append = interrupt  # type: ignore[method-assign]
    try:
        packed(work)
    except KeyboardInterrupt:
        assert written and not (work / "packed").exists()
    Workspace.append = append  # type: ignore[method-assign]
    packed(work)
    assert names(work) == {"packed"}


def killed_jobs_continue_to_the_same_bytes(system: str, work: Path) -> None:
    kinds = ("fsync", "rename", "replace", "unlink", "mkdir")
    moments = work / "moments"

    def armed(moment: int, name: str) -> int:
        left = [moment]

        def guard(function):
            def guarded(*arguments, **keywords):
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)
                return function(*arguments, **keywords)

            return guarded

        for kind in kinds:
            setattr(os, kind, guard(getattr(os, kind)))
        packed(work, name)
        return -left[0]

    assert forked(lambda: moments.write_text(str(armed(0, "reference")))) == 0
    reference, last = contents(work / "reference"), int(moments.read_text())
    for moment in sorted({1 + (last - 1) * step // 5 for step in range(6)}):
        assert forked(lambda moment=moment: armed(moment, "out")) == 9, moment
        if not (work / "out").exists():
            assert forked(lambda: packed(work, "out")) == 0, moment
        assert contents(work / "out") == reference, moment
        files.remove_tree(work / "out")
        # A kill between the rename and the end leaves the file of the lock, which the next job takes over.
        assert names(work) - {".out.partial.moepack-lock"} == {"reference", "moments"}, names(work)


def two_jobs_do_not_share_a_folder(system: str, work: Path) -> None:
    first = Workspace.open(work / "out.partial", {"method": "x"}, resume=True)
    try:
        Workspace.open(work / "out.partial", {"method": "x"}, resume=True)
        raise AssertionError("locked twice")
    except ResumeError as error:
        assert "another process" in str(error)
    first.close()
    Workspace.open(work / "out.partial", {"method": "x"}, resume=True).close()
    assert names(work) == {"out.partial"}


def mapped_models_are_not_replaced(system: str, work: Path) -> None:
    out = packed(work)
    model = moepack.load(out)
    with torch.no_grad():
        expected = model(TOKENS).logits
    shard, before = next(out.glob("*.safetensors")), contents(out)
    with refused(system):
        write_file(shard, shard.read_bytes())
    assert contents(out) == before
    with torch.no_grad():
        assert model(TOKENS).logits.equal(expected)
        assert torch.allclose(moepack.load(out, resident=True)(TOKENS).logits, expected, atol=1e-4)
    model.generate(TOKENS, max_new_tokens=2, do_sample=False)
    del model
    gc.collect()
    write_file(shard, shard.read_bytes())
    assert contents(out) == before


def models_of_other_processes_are_not_replaced(system: str, work: Path) -> None:
    from moepack.pipeline.library import Entry

    out = packed(work)
    ready, leave = os.pipe(), os.pipe()

    def serve() -> None:
        if system == "win32":
            hold()
        model = moepack.load(out)
        os.write(ready[1], b"1")
        os.read(leave[0], 1)
        assert model(TOKENS).logits.isfinite().all()

    server = threading.Thread(target=lambda: codes.append(forked(serve)))
    codes: list[int] = []
    server.start()
    os.read(ready[0], 1)
    shard, before = next(out.glob("*.safetensors")), contents(out)
    with refused(system):
        write_file(shard, shard.read_bytes())
    assert contents(out) == before
    if system == "win32":
        with refused(system, OSError):
            Entry(out, "packed", "1", 1, True).remove()
    os.write(leave[1], b"1")
    server.join()
    assert codes == [0]
    if out.exists():
        Entry(out, "packed", "1", 1, True).remove()
    assert not out.exists()


def hold() -> None:
    """Let other processes see what this one has open."""
    from windows_files import Rules

    Rules(Path(os.environ["XDG_CACHE_HOME"]).parent).join()


def loaded_models_are_saved(system: str, work: Path) -> None:
    out = packed(work)
    model = moepack.load(out)
    for _ in range(2):  # the second time, files are replaced
        model.save_pretrained(work / "saved")
        assert {**contents(out), **contents(work / "saved")} == contents(out)
    copy = moepack.load(shutil.copytree(out, work / "copied"))
    with refused(system):
        model.save_pretrained(work / "copied")
    assert not [name for name in names(work / "copied") if name.startswith(".")]
    assert copy(TOKENS).logits.equal(model(TOKENS).logits)


def exports_replace_files(system: str, work: Path) -> None:
    from moepack.export import gguf

    settings = {"bits": 4, "group_size": 32, "dense_bits": 8, "calibration": None}
    moepack.compress(TINY_MOE, work / "packed", method="finequant", threads=1, **settings)
    for _ in range(2):
        export(work / "packed", work / f"bf16-{_}", "bf16")
    blocks, calls = gguf.blocks, []

    def fails(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise DiskError("the disk is full")
        return blocks(*arguments)

    gguf.blocks = fails
    try:
        export(work / "packed", work / "model.gguf", "gguf")
        raise AssertionError("nothing failed")
    except DiskError as error:
        assert "the disk is full" in str(error)
    gguf.blocks = blocks
    assert names(work) == {"packed", "bf16-0", "bf16-1"}
    export(work / "packed", work / "model.gguf", "gguf")


def calibrated_jobs_publish(system: str, work: Path) -> None:
    """Hidden states lie in files of the unfinished directory, as they do with a larger text."""
    solving.in_file = lambda *_: True
    text = work / "text.txt"
    text.write_text("".join(f"Line {i} of a text that nobody wrote.\n" for i in range(200)), encoding="utf-8")
    seen = {"calibration": str(text), "samples": 2, "sequence_length": 32}
    for method, settings in (
        ("auto", {"bits_per_weight": 6.0, **seen}),
        ("qmoe", seen),
        ("floe", seen),
        ("finequant", seen),
    ):
        moepack.compress(work.with_name("model"), work / method, method=method, threads=1, **settings)
    assert names(work) == {"text.txt", "auto", "qmoe", "floe", "finequant"}


def models_of_the_hub_stream(system: str, work: Path) -> None:
    import pytest

    import tiny_models

    model = tiny_models.build("qwen3_moe", work / "model", max_shard_size="60KB")
    largest = max(file.stat().st_size for file in model.glob("*.safetensors"))
    with pytest.MonkeyPatch.context() as patch, serving({"someone/moe": model}) as server:
        use(server, Path(tempfile.mkdtemp()), patch)  # the Hub's client locks its cache as on Linux
        moepack.compress("someone/moe", work / "streamed", method=Ternary(), disk_budget=4 * largest)
        moepack.compress("someone/moe", work / "kept", method=Ternary(), keep_source=True)
    moepack.compress(model, work / "packed", method=Ternary())
    for name in ("streamed", "kept"):
        files_of = contents(work / name)
        for each, data in contents(work / "packed").items():
            assert each == "recipe.yaml" or files_of[each] == data, each
    assert names(work) == {"model", "streamed", "kept", "packed"}


def scanners_delay_a_job(system: str, work: Path) -> None:
    files.PATIENCE, stop, opened = 5.0, threading.Event(), []

    def scan() -> None:
        """Open new files, and keep them open: all until a rename was refused, afterwards each for 50 ms."""
        known: set[Path] = set()
        with ExitStack() as kept:
            while not stop.is_set():
                for path in [path for path in work.rglob("*") if path not in known]:
                    known.add(path)
                    if path.name.startswith("tmp"):  # nobody else can open a file of `tempfile` there
                        continue
                    with suppress(OSError):
                        opened.append(kept.enter_context(path.open("rb")))
                if REFUSED or system != "win32":
                    time.sleep(0.05)
                    kept.close()
                time.sleep(0.005)

    scanner = threading.Thread(target=scan)
    scanner.start()
    try:
        packed(work)
    finally:
        stop.set()
        scanner.join()
    assert names(work) == {"packed"} and opened
    assert REFUSED or system != "win32"


def devices_are_no_names(system: str, work: Path) -> None:
    for name in ("NUL", "aux.packed", "a:b", "trailing."):
        try:
            packed(work, name)
            assert system != "win32", name
        except MoepackError as error:
            assert system == "win32" and "Windows" in str(error), error
            assert not names(work)
    if system != "win32":
        return
    out = packed(work)
    index = out / "moepack.json"
    shard = next(out.glob("*.safetensors")).name
    for name in ("C:evil.safetensors", "nul.safetensors", "model.safetensors:stream.safetensors"):
        manifest = index.read_text(encoding="utf-8")
        index.write_text(manifest.replace(shard, name), encoding="utf-8", newline="\n")
        try:
            moepack.load(out)
            raise AssertionError(f"{name} was accepted")
        except (CorruptionError, CheckpointError):
            index.write_text(manifest, encoding="utf-8", newline="\n")
    moepack.load(out)


SCENARIOS: dict[str, Callable[[str, Path], None]] = {
    scenario.__name__: scenario
    for scenario in (
        interrupted_jobs_continue,
        killed_jobs_continue_to_the_same_bytes,
        two_jobs_do_not_share_a_folder,
        mapped_models_are_not_replaced,
        models_of_other_processes_are_not_replaced,
        loaded_models_are_saved,
        exports_replace_files,
        calibrated_jobs_publish,
        models_of_the_hub_stream,
        scanners_delay_a_job,
        devices_are_no_names,
    )
}

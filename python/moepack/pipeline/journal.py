"""The journal of an unfinished `compress`: which job a partial directory belongs to, and which shards are finished.

`journal.jsonl` is in the partial directory. The first line is the job's fingerprint. The second line holds the file
system's stamps of the model's files, because a fingerprint that samples may miss a change. Each further line is a
finished shard with its manifest entries. A line is appended and flushed after its shard was published, so the journal
never claims more than the disk holds, no matter when the process is killed. A torn last line marks a shard that must be
redone. If a job fails because of its checkpoint, it also records digests of its shards' inputs; if only the model's
fingerprint differs, a later run keeps the shards whose inputs are unchanged.

Only one process works in a directory at a time. It holds a lock that the kernel releases when the process ends.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepack.errors import CorruptionError, DiskError, ResumeError
from moepack.format.atomic import disk_errors, is_temporary, write_file
from moepack.format.directory import read_manifest
from moepack.format.manifest import MANIFEST, FileRecord, TensorRecord
from moepack.system import files, locks

JOURNAL = "journal.jsonl"

PARTIAL = ".partial"
"""Suffix of the working directory."""

_MADE_OF = "made_of"
_STAMPS = "stamps"

Fingerprint = Mapping[str, str]

Digests = Callable[[Iterable[str]], Mapping[str, str]]
"""Maps names of shards to digests of their inputs."""


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard: its file and its tensors."""

    name: str
    file: FileRecord
    tensors: Mapping[str, TensorRecord]

    def to_line(self) -> bytes:
        """Return the journal line."""
        tensors = {name: record.to_json() for name, record in self.tensors.items()}
        return _line({"shard": self.name, "size": self.file.size, "sha256": self.file.sha256, "tensors": tensors})

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "ShardRecord":
        """Parse the content of a line; raises `ValueError` or `KeyError` if it is not a shard record."""
        if not isinstance(content["shard"], str) or Path(content["shard"]).name != content["shard"]:
            raise ValueError(f"{content['shard']!r} is not a file name")
        file = FileRecord.from_json({"size": content["size"], "sha256": content["sha256"]})
        tensors = {name: TensorRecord.from_json(record) for name, record in content["tensors"].items()}
        return cls(content["shard"], file, tensors)


def _line(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, sort_keys=True) + "\n").encode()


class Workspace:
    """A partial directory, locked for this process.

    Attributes:
        path: the directory.
        done: the finished shards by name.
        complete: whether everything is written and only publication is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, ShardRecord] = {}
        self.complete = False
        self._lock: locks.Lock | None = None
        self._made_of: Mapping[str, str] = {}
        self._stamps: Mapping[str, str] = {}

    @classmethod
    def open(
        cls,
        path: Path,
        fingerprint: Fingerprint,
        resume: bool,
        digests: Digests = lambda files: {},
        stamps: Mapping[str, str] | None = None,
    ) -> "Workspace":
        """Create `path`, or continue in it if it belongs to the same job.

        Args:
            path: the partial directory.
            fingerprint: identity of the job.
            resume: False starts over, even if the directory belongs to another job.
            digests: computes the current digests of shard inputs, to compare with those that `note` recorded.
            stamps: file system stamps of the model's files.

        Raises:
            ResumeError: the directory belongs to another job, another process or another program, or files of the model
                were modified since.
            DiskError: the directory cannot be created.
        """
        existed = path.exists()
        workspace = cls(path)
        try:
            with disk_errors(path, "create"):
                path.mkdir(parents=True, exist_ok=True)
            workspace._claim(fingerprint, resume, digests, stamps or {})
        except BaseException:
            if not existed and workspace._lock is not None:  # without the lock, it may be another process's
                workspace.discard()
            workspace.close()
            raise
        return workspace

    @classmethod
    @contextmanager
    def fresh(cls, path: Path, command: str) -> Iterator["Workspace"]:
        """Create `path` for work that cannot be resumed. An exception in the context removes the directory.

        Leftovers of a killed run of the same command are removed; another job's unfinished work is not.

        Raises:
            ResumeError, DiskError: as for `open`.
        """
        workspace = cls.open(path, {"method": command}, resume=True)
        try:
            workspace.sweep(())
            yield workspace
        except BaseException:
            workspace.discard()
            raise
        finally:
            workspace.close()

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            locks.unlock(self._lock)
            self._lock = None

    def append(self, shard: ShardRecord) -> None:
        """Record a published shard as finished."""
        self._append(shard.to_line())
        self.done[shard.name] = shard

    def note(self, made_of: Mapping[str, str]) -> None:
        """Record digests of the inputs of shards."""
        self._append(_line({_MADE_OF: dict(made_of)}))

    def _append(self, line: bytes) -> None:
        file = self.path / JOURNAL
        with disk_errors(file), open(file, "ab") as stream:
            stream.write(line)
            stream.flush()
            files.sync(stream.fileno())

    def discard(self) -> None:
        """Remove the directory and its contents."""
        files.remove_tree(self.path, ignore_errors=True)

    def reserve(self, need: int) -> None:
        """Check that `need` bytes are free before the work starts.

        Raises:
            DiskError: too few bytes are free. If no shard is finished, the directory is removed.
        """
        free = shutil.disk_usage(self.path).free
        if need > free:
            if not self.done:
                self.discard()
            raise DiskError(f"needs up to {need:,} bytes, but {free:,} are free", file=self.path.parent)

    def sweep(self, keep: Collection[str]) -> None:
        """Remove files that are neither in `keep` nor the journal, such as copies of removed source files."""
        with disk_errors(self.path, "clear"):
            for entry in self.path.iterdir():
                if entry.is_dir():
                    _sweep_folder(entry, keep)
                elif entry.name not in keep and entry.name != JOURNAL:
                    files.remove(entry)

    def publish(self, target: Path) -> None:
        """Remove the journal and rename the directory to `target`.

        `target` must not exist: the kernel silently replaces an empty directory.
        """
        with disk_errors(target, "publish"):
            files.remove(self.path / JOURNAL, missing_ok=True)
            files.sync_directory(self.path)
            files.rename(self.path, target)
            files.sync_directory(target.parent)

    def _claim(self, fingerprint: Fingerprint, resume: bool, digests: Digests, stamps: Mapping[str, str]) -> None:
        self._take_lock()
        names = sorted(entry.name for entry in self.path.iterdir() if not is_temporary(entry.name))
        if names and JOURNAL not in names and MANIFEST not in names:
            raise ResumeError(f"exists and was not created by moepack: it holds '{names[0]}'", file=self.path)
        if names and resume:
            self._continue(fingerprint, digests, stamps)
        else:
            self._clear()
        if not self.complete:
            lines = [
                _line(fingerprint),
                _line({_STAMPS: dict(stamps)}),
                *(record.to_line() for record in self.done.values()),
            ]
            lines += [_line({_MADE_OF: dict(self._made_of)})] if self._made_of else []
            write_file(self.path / JOURNAL, b"".join(lines))

    def _take_lock(self) -> None:
        try:
            with disk_errors(self.path, "lock"):
                self._lock = locks.lock_directory(self.path)
        except DiskError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
            raise ResumeError("another process is using it", file=self.path) from error

    def _continue(self, fingerprint: Fingerprint, digests: Digests, stamps: Mapping[str, str]) -> None:
        journal = self.path / JOURNAL
        if not journal.exists():
            try:
                found = read_manifest(self.path).fingerprint
            except CorruptionError as error:
                raise ResumeError(f"cannot be continued: {error}", file=self.path) from error
            _compare(found, fingerprint, self.path)
            self.complete = True
            return
        first, *rest = journal.read_bytes().split(b"\n")
        found = _parse_fingerprint(first, journal)
        self._read(rest)
        same = found == fingerprint
        if self._made_of and {**found, "model": fingerprint["model"]} == fingerprint:
            # The model was repaired, or is another model. Its fingerprint cannot tell, and may even miss a change
            # because it samples. So a shard is kept only if all its inputs are unchanged.
            now = digests(self.done)
            kept = {name: now.get(name) == self._made_of.get(name, now.get(name) if same else "") for name in self.done}
            if same or any(kept.values()):
                self.done = {name: record for name, record in self.done.items() if kept[name]}
                self._made_of = {name: now[name] for name in self.done if name in self._made_of}
                return
        _compare(found, fingerprint, self.path)
        if changed := sorted(name for name in {*stamps, *self._stamps} if stamps.get(name) != self._stamps.get(name)):
            names = ", ".join(changed)
            message = f"cannot be resumed: files of the checkpoint were modified after the interrupted run ({names})"
            raise ResumeError(f"{message}; start over with --no-resume (resume=False)", file=self.path)

    def _read(self, lines: Iterable[bytes]) -> None:
        """Load the finished shards that still exist; a torn line ends the journal."""
        for line in lines:
            try:
                content = json.loads(line)
                if _STAMPS in content:
                    self._stamps = {str(name): str(stamp) for name, stamp in content[_STAMPS].items()}
                    continue
                if _MADE_OF in content:
                    self._made_of = {str(name): str(digest) for name, digest in content[_MADE_OF].items()}
                    continue
                record = ShardRecord.from_json(content)
            except (ValueError, KeyError, TypeError, AttributeError):
                break
            if _intact(self.path / record.name, record.file):
                self.done[record.name] = record

    def _clear(self) -> None:
        """Empty the directory. The journal goes last, because it marks the directory as moepack's."""
        with disk_errors(self.path, "clear"):
            for entry in sorted(self.path.iterdir(), key=lambda entry: entry.name == JOURNAL):
                files.remove_tree(entry) if entry.is_dir() else files.remove(entry)


def _sweep_folder(folder: Path, keep: Collection[str]) -> None:
    """Remove the files of a folder that are not in `keep`, and folders that become empty."""
    for place, _, names in os.walk(folder, topdown=False):
        for file in (Path(place) / name for name in names):
            if file.relative_to(folder.parent).as_posix() not in keep:
                files.remove(file)
        if not any(os.scandir(place)):
            files.remove_empty(place)


def _parse_fingerprint(line: bytes, journal: Path) -> dict[str, str]:
    try:
        found = json.loads(line)
        if isinstance(found, dict):
            return found
    except ValueError:
        pass
    raise ResumeError("cannot be continued: its first line is damaged", file=journal)


def _compare(found: Fingerprint, expected: Fingerprint, path: Path) -> None:
    differing = sorted(key for key in {*found, *expected} if found.get(key) != expected.get(key))
    if differing:
        changes = "; ".join(f"{key} was {found.get(key)}, is {expected.get(key)}" for key in differing)
        message = f"is unfinished work of another job ({changes})"
        raise ResumeError(f"{message}; remove it, or start over with --no-resume (resume=False)", file=path)


def _intact(file: Path, record: FileRecord) -> bool:
    """Return whether a finished shard still has its checksum; reading it is cheap compared to recomputing it."""
    try:
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == record.sha256
    except (OSError, ValueError):  # a damaged journal may hold a name that no file can have
        return False

"""The journal of an unfinished `compress`: whose work a partial directory is, and which shards in it are done.

`journal.jsonl` lies in the partial directory. Its first line is the job's fingerprint, its second what the file system
said of the model's files, for a fingerprint that samples may miss a change; each further line is a finished shard with
everything that the manifest will say about it. A line is appended and flushed after its shard was published, so
whatever moment a process is killed at, the journal never claims more than the disk holds. A torn last line is a shard
that must be done again. A job that failed by its checkpoint adds what its shards were made of: where only the model's
fingerprint differs, a later run keeps the shards that it would make of the same.

One process works in a directory at a time: it holds a lock that the kernel drops with the process.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepack.errors import CorruptionError, DiskError, ResumeError
from moepack.format.atomic import disk_errors, is_temporary, sync_directory, write_file
from moepack.format.directory import read_manifest
from moepack.format.manifest import MANIFEST, FileRecord, TensorRecord

JOURNAL = "journal.jsonl"

_MADE_OF = "made_of"
_STAMPS = "stamps"

Fingerprint = Mapping[str, str]

Digests = Callable[[Iterable[str]], Mapping[str, str]]
"""Digests of what shards are made of, by the names of the shards."""


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard: its file and the tensors in it."""

    name: str
    file: FileRecord
    tensors: Mapping[str, TensorRecord]

    def to_line(self) -> bytes:
        """Return the journal's line."""
        tensors = {name: record.to_json() for name, record in self.tensors.items()}
        return _line({"shard": self.name, "size": self.file.size, "sha256": self.file.sha256, "tensors": tensors})

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "ShardRecord":
        """Read the content of a line; `ValueError` or `KeyError` if it is none."""
        if not isinstance(content["shard"], str) or Path(content["shard"]).name != content["shard"]:
            raise ValueError(f"{content['shard']!r} is not the name of a file")
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
        complete: whether everything is written and only the publication is missing.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.done: dict[str, ShardRecord] = {}
        self.complete = False
        self._lock = lock
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
        """Create `path`, or continue in it if it is the work of the same job.

        Args:
            path: the partial directory.
            fingerprint: identity of the job.
            resume: False starts over, whatever job the directory belongs to.
            digests: what shards are made of now, to be compared with what `note` kept of a model since mended.
            stamps: what the file system says of each of the model's files.

        Raises:
            ResumeError: another job's work, another process at work, a directory that moepack did not make, or files of
                the model that were written to since.
            DiskError: it cannot be created.
        """
        with disk_errors(path, "create"):
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        workspace = cls(path, lock)
        try:
            workspace._claim(fingerprint, resume, digests, stamps or {})
        except BaseException:
            workspace.close()
            raise
        return workspace

    @classmethod
    def fresh(cls, path: Path, command: str) -> "Workspace":
        """Create `path` for work that is never continued.

        What a killed run of the same command left there is removed; another job's unfinished work is not.

        Raises:
            ResumeError, DiskError: as for `open`.
        """
        workspace = cls.open(path, {"method": command}, resume=True)
        workspace.sweep(())
        return workspace

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def append(self, shard: ShardRecord) -> None:
        """Record a published shard as done."""
        self._append(shard.to_line())
        self.done[shard.name] = shard

    def note(self, made_of: Mapping[str, str]) -> None:
        """Record digests of what shards were made of."""
        self._append(_line({_MADE_OF: dict(made_of)}))

    def _append(self, line: bytes) -> None:
        file = self.path / JOURNAL
        with disk_errors(file), open(file, "ab") as stream:
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())

    def discard(self) -> None:
        """Remove the directory and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def reserve(self, need: int) -> None:
        """Refuse to begin what may not fit into `need` bytes: a full disk after hours of work helps nobody.

        Raises:
            DiskError: fewer bytes are free. Where nothing was done yet, the directory is removed.
        """
        free = shutil.disk_usage(self.path).free
        if need > free:
            if not self.done:
                self.discard()
            raise DiskError(f"needs up to {need:,} bytes, {free:,} are free", file=self.path.parent)

    def sweep(self, keep: Collection[str]) -> None:
        """Remove what is neither in `keep` nor the journal: copies of what the source lost since an earlier run."""
        with disk_errors(self.path, "clear"):
            for entry in self.path.iterdir():
                if entry.is_dir():
                    _sweep_folder(entry, keep)
                elif entry.name not in keep and entry.name != JOURNAL:
                    entry.unlink()

    def publish(self, target: Path) -> None:
        """Drop the journal and give the directory its final name.

        `target` must not exist: the kernel replaces an empty directory without asking.
        """
        with disk_errors(target, "publish"):
            (self.path / JOURNAL).unlink(missing_ok=True)
            sync_directory(self.path)
            self.path.rename(target)
            sync_directory(target.parent)

    def _claim(self, fingerprint: Fingerprint, resume: bool, digests: Digests, stamps: Mapping[str, str]) -> None:
        self._take_lock()
        names = sorted(entry.name for entry in self.path.iterdir() if not is_temporary(entry.name))
        if names and JOURNAL not in names and MANIFEST not in names:
            raise ResumeError(f"exists and is not the work of moepack: it holds '{names[0]}'", file=self.path)
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
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ResumeError("another process is at work in it", file=self.path) from error

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
            # The model was mended, or is another one. Its fingerprint cannot tell, and may even miss a change, for it
            # samples; a shard is kept if everything that it follows from is what it was.
            now = digests(self.done)
            kept = {name: now.get(name) == self._made_of.get(name, now.get(name) if same else "") for name in self.done}
            if same or any(kept.values()):
                self.done = {name: record for name, record in self.done.items() if kept[name]}
                self._made_of = {name: now[name] for name in self.done if name in self._made_of}
                return
        _compare(found, fingerprint, self.path)
        if changed := sorted(name for name in {*stamps, *self._stamps} if stamps.get(name) != self._stamps.get(name)):
            message = f"is unfinished work on files that were written to since ({', '.join(changed)})"
            raise ResumeError(f"{message}; --no-resume starts over", file=self.path)

    def _read(self, lines: Iterable[bytes]) -> None:
        """Take over what the journal says was done and is still there; a torn line ends it."""
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
        """Empty the directory, the journal last: without it the rest would not be known as moepack's."""
        with disk_errors(self.path, "clear"):
            for entry in sorted(self.path.iterdir(), key=lambda entry: entry.name == JOURNAL):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _sweep_folder(folder: Path, keep: Collection[str]) -> None:
    """Remove the files of a folder that are not in `keep`, and folders that are empty then."""
    for place, _, files in os.walk(folder, topdown=False):
        for file in (Path(place) / name for name in files):
            if file.relative_to(folder.parent).as_posix() not in keep:
                file.unlink()
        if not any(os.scandir(place)):
            os.rmdir(place)


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
        raise ResumeError(f"is unfinished work of another job ({changes}); remove it to start over", file=path)


def _intact(file: Path, record: FileRecord) -> bool:
    """Say whether a finished shard is what it was; reading it again is cheap beside computing it again."""
    try:
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == record.sha256
    except OSError:
        return False

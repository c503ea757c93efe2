"""Files that appear whole or not at all.

A file is written under a temporary name in its own directory, flushed to the disk and renamed; then the directory is
flushed. Whoever is killed in between leaves at most a temporary file (`TEMPORARY`), never a short one under its name.
Every refusal of the disk becomes a `DiskError` that names the file.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile

from moepack.errors import DiskError, MoepackError, OutputExistsError

TEMPORARY = ".{name}.moepack-tmp"
"""How a file is called while it is written. One process writes a directory at a time, so the name needs no number."""


def is_temporary(name: str) -> bool:
    """Say whether `name` is what a killed writer left behind."""
    return name.startswith(".") and name.endswith(".moepack-tmp")


@contextmanager
def disk_errors(path: Path, action: str = "write") -> Iterator[None]:
    """Turn the `OSError`s of the block into a `DiskError` that names `path`."""
    try:
        yield
    except MoepackError:
        raise
    except OSError as error:
        failure = DiskError(f"cannot {action}: {error.strerror or error}", file=path)
        failure.errno = error.errno
        raise failure from error


def refuse_existing(path: Path) -> None:
    """Do nothing, unless there is something at `path`.

    Raises:
        OutputExistsError: there is.
    """
    if os.path.lexists(path):
        raise OutputExistsError("exists; choose another place or remove it", file=path)


def try_creating(path: Path) -> None:
    """Find out whether `path` could be created, before hours of work for it. Nothing is left behind.

    Raises:
        DiskError: the nearest directory above it that exists refuses.
    """
    nearest = next(above for above in path.absolute().parents if os.path.lexists(above))
    with disk_errors(path, "create"), TemporaryFile(dir=nearest) as file:
        file.write(b"0")


def sync_directory(path: Path) -> None:
    """Flush a directory's entries, so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def publish_file(path: Path) -> Iterator[FileIO]:
    """Open a file that is renamed to `path` when the block ends well and removed when it does not.

    The file is unbuffered: `write_all` hands large buffers to the kernel without a copy.

    Raises:
        DiskError: the disk refused a write, the flush or the rename.
    """
    temporary = path.with_name(TEMPORARY.format(name=path.name))
    with disk_errors(path):
        try:
            with open(temporary, "wb", buffering=0) as file:
                yield file
                os.fsync(file.fileno())
            os.rename(temporary, path)
            sync_directory(path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def write_all(file: FileIO, data: memoryview) -> None:
    """Write every byte of `data` (flat, of bytes): an unbuffered file may take less than it is given."""
    while data:
        data = data[file.write(data) :]


def write_file(path: Path, data: bytes) -> None:
    """Publish `data` as the file `path`."""
    with publish_file(path) as file:
        write_all(file, memoryview(data))


def write_inside(directory: Path, name: str, data: bytes) -> None:
    """Publish `data` as the file `name` of a directory; `name` may lead through folders, which are made."""
    path = directory / name
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, data)

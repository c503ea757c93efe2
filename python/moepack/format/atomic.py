"""Writes files atomically.

A file is written under a temporary name in its own directory, flushed to the disk and renamed; then the directory is
flushed. A killed process leaves at most a temporary file (`TEMPORARY`), never a truncated file under the final name.
Every `OSError` becomes a `DiskError` that names the file.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile

from moepack.errors import DiskError, MoepackError, OutputExistsError
from moepack.system import files
from moepack.system.names import is_usable

TEMPORARY = ".{name}.moepack-tmp"
"""Temporary name of a file. Only one process writes a directory at a time, so the name needs no number."""


def is_temporary(name: str) -> bool:
    """Return whether `name` is a temporary file of an interrupted write."""
    return name.startswith(".") and name.endswith(".moepack-tmp")


@contextmanager
def disk_errors(path: Path, action: str = "write") -> Iterator[None]:
    """Convert an `OSError` of the block to a `DiskError` that names `path`."""
    try:
        yield
    except MoepackError:
        raise
    except OSError as error:
        failure = DiskError(f"cannot {action}: {error.strerror or error}", file=path)
        failure.errno = error.errno
        raise failure from error


def refuse_existing(path: Path) -> None:
    """Check that `path` does not exist.

    Raises:
        OutputExistsError: it exists.
    """
    if os.path.lexists(path):
        raise OutputExistsError("exists; choose another name or remove it", file=path)


def try_creating(path: Path) -> None:
    """Check that `path` can be created, before hours of work. Leaves nothing behind.

    Raises:
        DiskError: the nearest existing parent directory is not writable, or Windows reserves the name.
    """
    if not is_usable(path.name):
        raise DiskError("cannot create: Windows reserves this name; choose another", file=path)
    nearest = next(above for above in path.absolute().parents if os.path.lexists(above))
    with disk_errors(path, "create"), TemporaryFile(dir=nearest) as file:
        file.write(b"0")


@contextmanager
def publish_file(path: Path) -> Iterator[FileIO]:
    """Open a file that is renamed to `path` if the block succeeds and removed if it raises.

    The file is unbuffered: `write_all` passes large buffers to the kernel without a copy.

    Raises:
        DiskError: a write, the flush or the rename failed.
    """
    temporary = path.with_name(TEMPORARY.format(name=path.name))
    with disk_errors(path):
        try:
            with open(temporary, "wb", buffering=0) as file:
                yield file
                files.sync(file.fileno())
            files.replace(temporary, path)
            files.sync_directory(path.parent)
        except BaseException:
            with suppress(OSError):
                files.remove(temporary, missing_ok=True)
            raise


def write_all(file: FileIO, data: memoryview) -> None:
    """Write all of `data` (a flat buffer of bytes). An unbuffered file may write less than requested."""
    while data:
        data = data[file.write(data) :]


def write_file(path: Path, data: bytes) -> None:
    """Write `data` atomically to `path`."""
    with publish_file(path) as file:
        write_all(file, memoryview(data))


def write_inside(directory: Path, name: str, data: bytes) -> None:
    """Write `data` atomically to the file `name` in a directory, creating the folders in `name`."""
    path = directory / name
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, data)

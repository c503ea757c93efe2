"""Names in a file system: opening, replacing, removing and flushing them.

Windows differs from the others in three ways. A file that is open or mapped cannot be replaced, renamed or removed, and
neither can a directory that holds such a file. Virus scanners and indexers open new files for a moment, so these
operations are repeated for `PATIENCE` seconds. Directories cannot be flushed; NTFS journals renames itself.
"""

import gc
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = [
    "KEEPS_REMOVED",
    "link",
    "open_descriptor",
    "refer",
    "remove",
    "remove_empty",
    "remove_tree",
    "rename",
    "replace",
    "sync",
    "sync_directory",
]

PATIENCE = 2.0
"""Seconds for which Windows repeats an operation on a file that is in use."""

_IN_USE = "a program has the file open, or a loaded model is mapped from it"

KEEPS_REMOVED = sys.platform != "win32"
"""Whether a file that is open or mapped can be removed or replaced. Its bytes then stay readable."""


if sys.platform == "win32":
    _READ = os.O_RDONLY | os.O_BINARY | os.O_NOINHERIT

    def _persistently(action: Callable[[], None]) -> None:
        """Repeat an action while it fails because a file is in use."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return action()
            except PermissionError as error:
                if time.monotonic() > end:
                    raise PermissionError(error.errno, _IN_USE, error.filename) from error
            gc.collect()  # an unreachable map keeps its file in use until it is collected
            time.sleep(0.05)

    def _sync(descriptor: int) -> None:
        os.fsync(descriptor)  # FlushFileBuffers

    def _sync_directory(path: Path) -> None:
        pass

else:
    _READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK

    def _persistently(action: Callable[[], None]) -> None:
        action()

    if sys.platform == "darwin":
        import fcntl

        def _sync(descriptor: int) -> None:
            try:  # fsync leaves the bytes in the drive's cache
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            except OSError:  # some network file systems
                os.fsync(descriptor)

    else:

        def _sync(descriptor: int) -> None:
            os.fsync(descriptor)

    def _sync_directory(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_descriptor(file: str | os.PathLike[str]) -> int:
    """Open a file for reading without waiting, even if it is a pipe. Child processes do not inherit the descriptor."""
    return os.open(file, _READ)


def replace(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a file, replacing `target` atomically.

    Raises:
        PermissionError: on Windows, one of them is still in use.
    """
    _persistently(lambda: os.replace(source, target))


def rename(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a directory to a name that does not exist; errors as for `replace`.

    On Linux and macOS, an empty directory of this name is replaced.
    """
    _persistently(lambda: os.rename(source, target))


def remove(path: str | os.PathLike[str], *, missing_ok: bool = False) -> None:
    """Remove a file; errors as for `replace`."""
    _persistently(lambda: Path(path).unlink(missing_ok=missing_ok))


def remove_empty(path: str | os.PathLike[str]) -> None:
    """Remove an empty directory; errors as for `replace`."""
    _persistently(lambda: os.rmdir(path))


def remove_tree(path: str | os.PathLike[str], *, ignore_errors: bool = False) -> None:
    """Remove a directory and its contents; errors as for `replace`."""
    with suppress(*([OSError] if ignore_errors else [])):
        _persistently(lambda: shutil.rmtree(path))


def link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Create a hard link. Not every file system supports it."""
    os.link(source, target)


def refer(source: Path, target: Path) -> None:
    """Create a symbolic link to a file. Windows allows it only to some users; others get a hard link or a copy."""
    try:
        target.symlink_to(source)
    except OSError:
        if KEEPS_REMOVED:
            raise
        try:
            os.link(source, target)
        except OSError:  # another drive
            shutil.copyfile(source, target)


def sync(descriptor: int) -> None:
    """Flush the bytes of an open file to the disk."""
    _sync(descriptor)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries, so that a rename in it survives a power failure."""
    _sync_directory(path)

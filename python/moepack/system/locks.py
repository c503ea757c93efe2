"""Exclusive locks on directories, which the system releases when the process ends.

Linux and macOS lock the directory itself. Windows can lock only bytes of files, and a file that is open keeps its
directory from being renamed, so the locked file lies next to the directory.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["Lock", "lock_directory", "unlock"]

Lock = tuple[int, Path | None]
"""The open descriptor, and the file to remove."""


if sys.platform == "win32":
    import msvcrt

    def _lock(path: Path) -> Lock:
        file = path.with_name(f".{path.name}.moepack-lock")
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_BINARY | os.O_NOINHERIT)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            os.close(descriptor)
            raise BlockingIOError(error.errno, "another process holds the lock", str(path)) from error
        return descriptor, file

else:
    import fcntl

    def _lock(path: Path) -> Lock:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor, None


def lock_directory(path: Path) -> Lock:
    """Lock a directory for this process.

    Raises:
        BlockingIOError: another process, or another lock of this process, holds it.
        OSError: it cannot be opened, or its file system has no locks.
    """
    return _lock(path)


def unlock(lock: Lock) -> None:
    """Release a lock. The directory may have been renamed or removed meanwhile."""
    descriptor, file = lock
    os.close(descriptor)
    if file is not None:
        with suppress(OSError):  # another process has opened it to lock it
            file.unlink()

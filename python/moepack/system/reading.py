"""Positional reads of files, past the page cache if the system supports it.

Linux has O_DIRECT, macOS F_NOCACHE and Windows FILE_FLAG_NO_BUFFERING. Direct reads need offsets, lengths and addresses
that are multiples of a page.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["forget", "open_buffered", "open_direct", "read_at"]


if sys.platform == "win32":
    import ctypes
    import msvcrt

    from moepack.system.kernel32 import Overlapped, checked, function

    _GENERIC_READ, _SHARE_ALL, _OPEN_EXISTING = 0x8000_0000, 7, 3
    _NO_BUFFERING = 0x2000_0000
    _INVALID_HANDLE = ctypes.c_void_p(-1).value
    _END_OF_FILE = 38

    def _open(file: Path, flags: int) -> int:
        handle = function("CreateFileW")(str(file), _GENERIC_READ, _SHARE_ALL, None, _OPEN_EXISTING, flags, None)
        checked(handle != _INVALID_HANDLE)
        return msvcrt.open_osfhandle(handle, os.O_RDONLY | os.O_BINARY | os.O_NOINHERIT)

    def _open_buffered(file: Path) -> int:
        return _open(file, 0)

    def _open_direct(file: Path) -> int:
        return _open(file, _NO_BUFFERING)

    def _read_at(descriptor: int, into: memoryview, place: int) -> int:
        offset = Overlapped(Offset=place & 0xFFFF_FFFF, OffsetHigh=place >> 32)
        count = ctypes.c_uint32()
        address = ctypes.addressof(ctypes.c_char.from_buffer(into))
        length = min(into.nbytes, 1 << 30)
        handle = msvcrt.get_osfhandle(descriptor)
        done = function("ReadFile")(handle, address, length, ctypes.byref(count), ctypes.byref(offset))
        if not done and ctypes.get_last_error() == _END_OF_FILE:
            return 0
        checked(done)
        return count.value

    def _forget(descriptor: int, place: int, count: int) -> None:
        pass

else:

    def _open_buffered(file: Path) -> int:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    def _read_at(descriptor: int, into: memoryview, place: int) -> int:
        return os.preadv(descriptor, [into], place)

    if sys.platform == "darwin":
        import fcntl

        def _open_direct(file: Path) -> int:
            descriptor = _open_buffered(file)
            try:
                fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
            except OSError:
                os.close(descriptor)
                raise
            return descriptor

        def _forget(descriptor: int, place: int, count: int) -> None:
            pass

    else:

        def _open_direct(file: Path) -> int:
            return os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

        def _forget(descriptor: int, place: int, count: int) -> None:
            os.posix_fadvise(descriptor, place, count, os.POSIX_FADV_DONTNEED)


def open_buffered(file: Path) -> int:
    """Open a file for `read_at`. Others may rename or remove it meanwhile, also on Windows."""
    return _open_buffered(file)


def open_direct(file: Path) -> int | None:
    """Open a file for reads that bypass the page cache; None if its file system does not support them."""
    with suppress(OSError):
        return _open_direct(file)
    return None


def read_at(descriptor: int, into: memoryview, place: int) -> int:
    """Read bytes from offset `place` to writable memory; return their number, which is 0 at the end of the file."""
    return _read_at(descriptor, into, place)


def forget(descriptor: int, place: int = 0, count: int = 0) -> None:
    """Drop a range of a file from the page cache, by default all of it. Mapped pages remain. Only Linux can do it."""
    with suppress(OSError):
        _forget(descriptor, place, count)

"""The rules of a Windows file system, enforced on this process for everything below one folder.

Refused, as by NTFS through Python's functions:

- replacing, renaming or removing a file that a process has open or mapped, under any of its names, and renaming a
  directory that holds such a file;
- renaming to a name that exists, except a file to a file by `os.replace`;
- opening a directory, and flushing a descriptor that cannot write;
- symbolic links, which take a privilege;
- names with characters that Windows forbids, of devices, or that end in a dot or a space;
- a second name that differs from the first only in case;
- maps that start at no multiple of 64 KiB, and maps made with flags of Unix.

Files opened by `shared` may be removed and renamed, but not replaced. Other processes count if they have called
`enforce` with the same folder.
"""

import errno
import fcntl
import mmap
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REFUSED: list[str] = []
"""Files that were in use when this process wanted to replace, rename or remove them."""

GRANULARITY = 1 << 16
_FORBIDDEN = re.compile(r'[<>:"|?*\\\x00-\x1f]|[. ]$|^(con|prn|aux|nul|com\d|lpt\d)\s*(\.|$)', re.IGNORECASE)
_SHARED: set[int] = set()
_open, _rename, _replace, _fsync, _lexists = os.open, os.rename, os.replace, os.fsync, os.path.lexists
_Map = mmap.mmap

Identity = tuple[int, int]
"""Device and inode of a file."""


def shared(file: str) -> int:
    """Open a file for reading as CreateFileW does with FILE_SHARE_DELETE; return the descriptor."""
    descriptor = _open(file, os.O_RDONLY)
    _SHARED.add(descriptor)
    return descriptor


def open_files(process: str, replacing: bool) -> Iterator[Identity]:
    """Yield the files that a process has open, without those that it shares, unless they are to be replaced."""
    try:
        descriptors = [int(entry) for entry in os.listdir(f"/proc/{process}/fd")]
    except OSError:  # it has ended
        return
    for descriptor in descriptors:
        if not replacing and process == "self" and descriptor in _SHARED:
            continue
        try:
            status = os.stat(f"/proc/{process}/fd/{descriptor}")
        except OSError:
            continue
        yield status.st_dev, status.st_ino


def mapped_files(process: str) -> Iterator[Identity]:
    """Yield the files that a process has mapped."""
    try:
        lines = Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        device, inode = line.split(maxsplit=5)[3:5]
        major, minor = (int(part, 16) for part in device.split(":"))
        yield os.makedev(major, minor), int(inode)


class Rules:
    """The rules for the files below `root`."""

    def __init__(self, root: Path) -> None:
        self.root, self._local = str(root), threading.local()
        self._processes = root.with_name(f"{root.name}.processes")
        self._processes.mkdir(exist_ok=True)

    def join(self) -> None:
        """Let other processes see what this one has open."""
        (self._processes / str(os.getpid())).touch()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Check an operation: an audit hook."""
        if event not in ("os.rename", "os.remove", "open", "os.mkdir") or getattr(self._local, "busy", False):
            return
        self._local.busy = True
        try:
            given = [os.fsdecode(each) for each in arguments[:2] if isinstance(each, str | bytes | os.PathLike)]
            paths = [path for path in map(os.path.abspath, given) if path.startswith(f"{self.root}/")]
            for number, path in enumerate(paths):
                self._check_name(path, creates=event in ("os.rename", "os.mkdir") or is_writing(event, arguments))
                if event == "open" and arguments[1] is None and os.path.isdir(path):  # by `os.open`
                    raise PermissionError(errno.EACCES, "Permission denied", path)
                if event in ("os.rename", "os.remove"):
                    self._check_use(path, replacing=number == 1)
        finally:
            self._local.busy = False

    def _check_name(self, path: str, creates: bool) -> None:
        names = path.removeprefix(f"{self.root}/").split("/")
        if any(_FORBIDDEN.search(name) for name in names):
            raise OSError(errno.EINVAL, "The filename, directory name, or volume label syntax is incorrect", path)
        folder, name = os.path.split(path)
        if creates and not _lexists(path) and os.path.isdir(folder):
            same = [other for other in os.listdir(folder) if other.casefold() == name.casefold()]
            assert not same, f"{path} would overwrite {same}"

    def _check_use(self, path: str, replacing: bool) -> None:
        if not _lexists(path):
            return
        wanted = identities(path)
        processes = {"self", *(entry.name for entry in self._processes.iterdir())} - {str(os.getpid())}
        for process in processes:
            if not wanted.isdisjoint((*open_files(process, replacing), *mapped_files(process))):
                REFUSED.append(path)
                raise PermissionError(errno.EACCES, "Access is denied", path)


def is_writing(event: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether an operation opens a file that it may create."""
    if event != "open":
        return False
    mode, flags = arguments[1:3]
    return bool(flags & os.O_CREAT) if mode is None else not str(mode).startswith("r")


def identities(path: str) -> set[Identity]:
    """Return the identities of a file, or of all files in a directory."""
    places = [path]
    for place, _, names in os.walk(path):
        places += [os.path.join(place, name) for name in names]
    found = set()
    for place in places:
        try:
            status = os.lstat(place)
        except OSError:  # removed meanwhile
            continue
        found.add((status.st_dev, status.st_ino))
    return found


class WindowsMap(_Map):
    """`mmap.mmap` as Windows has it."""

    def __new__(cls, fileno, length, tagname=None, access=mmap.ACCESS_DEFAULT, offset=0):
        if offset % GRANULARITY:
            raise OSError(errno.EINVAL, "The base address or the file offset specified does not have the alignment")
        return super().__new__(cls, fileno, length, access=access, offset=offset)

    @property
    def madvise(self):
        raise AttributeError("madvise")


def enforce(root: Path) -> Rules:
    """Enforce the rules below `root` in this process, until it ends."""
    rules = Rules(root)

    def below(path: Any) -> bool:
        return os.path.abspath(os.fsdecode(path)).startswith(f"{root}/")

    def rename(source, target, **keywords):
        if below(target) and _lexists(target):
            raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", str(target))
        _rename(source, target, **keywords)

    def replace(source, target, **keywords):
        if below(target) and _lexists(target) and (os.path.isdir(source) or os.path.isdir(target)):
            raise PermissionError(errno.EACCES, "Access is denied", str(target))
        _replace(source, target, **keywords)

    def fsync(descriptor):
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        _fsync(descriptor)

    def symlink(source, target, *arguments, **keywords):
        raise OSError(errno.EINVAL, "A required privilege is not held by the client", str(target))

    os.rename, os.replace, os.fsync, os.symlink = rename, replace, fsync, symlink
    mmap.mmap, mmap.ALLOCATIONGRANULARITY = WindowsMap, GRANULARITY  # type: ignore[misc]
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    sys.addaudithook(rules)
    rules.join()
    return rules

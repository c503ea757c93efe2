"""Runs scenarios under the rules of another system, each in a process of its own.

Usage: `simulated.py win32|darwin WORK [SCENARIO ...]`, by `fork_support.run_script`. Modules of `moepack.system` are
reloaded: `sys.platform` is the other system's name while they select their implementations, with fakes of the modules
and functions that only that system has. Then the names that the system lacks are removed from `os` and `mmap`, and on
Windows `windows_files` enforces the rules of its file system.

Prints a JSON object: the traceback of each scenario, or an empty string if it passed.
"""

import ctypes
import fcntl
import importlib
import json
import mmap
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fastapi  # noqa: F401
import huggingface_hub.file_download  # noqa: F401
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401
import uvicorn.protocols.http.auto  # noqa: F401
import windows_files

import tiny_models
from fork_support import forked
from moepack.system import (
    files,
    folders,
    libraries,
    locks,
    maps,
    memory,
    names,
    processes,
    processors,
    reading,
    sockets,
)

LINUX = {
    **{name: os for name in ("preadv", "sched_getaffinity", "register_at_fork", "posix_fadvise", "O_DIRECT")},
    **{name: mmap for name in ("MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_RANDOM", "MADV_DONTNEED")},
}
UNIX = {name: os for name in ("O_DIRECTORY", "fork", "umask", "sysconf")}
PREADV, MAP = os.preadv, mmap.mmap


class Kernel32:
    """The functions of kernel32 that `moepack.system` calls."""

    def __init__(self) -> None:
        self.last = 0
        self.ranges: list[mmap.mmap] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(type(self), f"_{name}", lambda *_: 0)

        def function(*arguments: Any) -> Any:
            return call(self, *arguments)

        return function

    def _CreateFileW(self, name, access, share, security, disposition, flags, template):
        return windows_files.shared(name)

    def _ReadFile(self, handle, address, length, count, offset):
        place = offset._obj.Offset | offset._obj.OffsetHigh << 32
        got = PREADV(handle, [(ctypes.c_char * length).from_address(address)], place)
        count._obj.value, self.last = got, 0 if got else 38
        return int(got > 0)

    def _VirtualAlloc(self, at, size, kind, protection):
        self.ranges.append(MAP(-1, size))
        return ctypes.addressof(ctypes.c_char.from_buffer(self.ranges[-1]))

    def _VirtualFree(self, address, size, kind):
        return 1

    def _GetCurrentProcess(self):
        return 1

    def _GlobalMemoryStatusEx(self, found):
        found._obj.ullTotalPhys, found._obj.ullAvailPhys = 8 << 30, 4 << 30
        return 1

    def _K32GetProcessMemoryInfo(self, process, found, size):
        found._obj.WorkingSetSize, found._obj.PeakWorkingSetSize, found._obj.PrivateUsage = 3 << 20, 4 << 20, 2 << 20
        return 1


def fake_windows() -> None:
    """Provide the modules and functions of Windows that `moepack.system` uses."""
    import signal

    def locking(descriptor: int, mode: int, count: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    descriptors = {"get_osfhandle": lambda fd: fd, "open_osfhandle": lambda handle, flags: handle}
    sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=locking, **descriptors)  # type: ignore[assignment]
    sys.modules["winreg"] = types.ModuleType("winreg")
    library = Kernel32()
    ctypes.WinDLL = lambda name, use_last_error=False: library
    ctypes.get_last_error = lambda: library.last
    ctypes.WinError = lambda code: OSError(code, "a Windows error")
    os.O_BINARY = os.O_NOINHERIT = 0
    signal.SIGBREAK = signal.SIGUSR1
    rebind("TemporaryFile", tempfile.NamedTemporaryFile)  # as there


def fake_macos() -> None:
    """Provide the commands of macOS's `fcntl`."""
    fcntl.F_FULLFSYNC, fcntl.F_NOCACHE = 51, 48
    real = fcntl.fcntl
    fcntl.fcntl = lambda fd, command, value=0: os.fsync(fd) if command in (48, 51) else real(fd, command, value)


def rebind(name: str, value: object) -> None:
    """Replace a name where modules of the package have imported it."""
    for module in [module for each, module in sys.modules.items() if each.split(".")[0] == "moepack"]:
        if hasattr(module, name):
            setattr(module, name, value)


def become(system: str, work: Path) -> None:
    """Load `moepack.system` as on another system, and remove what that system lacks."""
    hidden = {}
    if system == "win32":
        fake_windows()
        removed = {**LINUX, **UNIX}
        hidden = {name: sys.modules.pop(name) for name in ("fcntl", "resource") if name in sys.modules}
        sys.modules |= dict.fromkeys(("fcntl", "resource"))  # type: ignore[arg-type]
    else:
        fake_macos()
        removed = {name: module for name, module in LINUX.items() if name != "preadv"}
    sys.platform = system
    for module in (files, folders, libraries, locks, maps, memory, names, processes, processors, reading, sockets):
        importlib.reload(module)
    sys.platform = "linux"
    rebind("KEEPS_REMOVED", files.KEEPS_REMOVED)
    sys.modules |= hidden
    for name, module in removed.items():
        delattr(module, name)
    if system == "win32":
        files.PATIENCE = 0.3
        windows_files.enforce(work)
    else:  # there is no mach
        memory._filled = lambda *_: False
        memory._system = lambda: types.SimpleNamespace(sysctlbyname=lambda *_: -1)


def main(system: str, work: Path, wanted: Sequence[str]) -> None:
    """Run scenarios; all if none is wanted."""
    os.environ |= {"XDG_CACHE_HOME": str(work / "cache"), "XDG_DATA_HOME": str(work / "data")}
    tiny_models.build("mixtral", work / "model")
    become(system, work)
    import scenarios

    outcomes = {}
    for name in wanted or scenarios.SCENARIOS:
        scenario = scenarios.SCENARIOS[name]
        folder = work / name
        folder.mkdir()
        failure = work.with_name(f"{work.name}.failure")

        def run(scenario=scenario, folder=folder, failure=failure) -> None:
            try:
                scenario(system, folder)
            except BaseException:
                failure.write_text(traceback.format_exc())
                raise

        code = forked(run)
        outcomes[name] = "" if code == 0 else failure.read_text() if failure.exists() else f"it exited with {code}"
        failure.unlink(missing_ok=True)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])

"""Runs as a program: compresses, loads, resumes and replaces a model under the rules of another system.

Usage: `simulated.py win32|darwin WORK`. Third-party packages are imported first. Then the names that the system lacks
are removed, `sys.platform` is its name while `moepack.system` selects its implementations, and an audit hook refuses
what Windows refuses: replacing or removing what this process has open or mapped, opening directories, and forbidden
file names.
"""

import ctypes
import fcntl
import mmap
import os
import sys
import tempfile
import types
from pathlib import Path

import fastapi  # noqa: F401
import huggingface_hub  # noqa: F401
import torch
import transformers
import uvicorn.protocols.http.auto  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
LINUX = {
    **{name: os for name in ("preadv", "sched_getaffinity", "register_at_fork", "posix_fadvise", "O_DIRECT")},
    **{name: mmap for name in ("MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_RANDOM", "MADV_DONTNEED")},
}
UNIX = {name: os for name in ("O_CLOEXEC", "O_DIRECTORY", "O_NONBLOCK", "fork", "umask", "sysconf")}
REFUSED: list[str] = []


def in_use() -> set[str]:
    """Files that this process has open or mapped."""
    maps = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    found = {line[5].rstrip() for line in maps if len(line) == 6}
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found.add(str(descriptor.readlink()))
        except OSError:
            continue
    return found


def windows_rules(work: Path) -> None:
    busy = [False]

    def hook(event: str, arguments: tuple) -> None:
        if busy[0] or event not in ("os.rename", "os.remove", "open"):
            return
        paths = [os.fsdecode(each) for each in arguments[:2] if isinstance(each, str | bytes | os.PathLike)]
        paths = [path for path in map(os.path.abspath, paths) if path.startswith(str(work))]
        busy[0] = True
        try:
            for path in paths:
                if set(path[1:]) & set('<>:"|?*\\'):
                    raise OSError(22, "Invalid argument", path)
                if event == "open" and arguments[1] is None and os.path.isdir(path):  # by os.open
                    raise PermissionError(13, "Permission denied", path)
                if event != "open" and any(f"{used}/".startswith(f"{path}/") for used in in_use()):
                    REFUSED.append(path)
                    raise PermissionError(13, "Sharing violation", path)
        finally:
            busy[0] = False

    rename = os.rename

    def new_only(source, target, **keywords):
        if os.path.lexists(target):
            raise FileExistsError(17, "File exists", target)
        rename(source, target, **keywords)

    os.rename = new_only
    sys.addaudithook(hook)


def fake_modules() -> None:
    """The modules of Windows that `moepack.system` imports, on top of Linux."""

    def locking(descriptor: int, mode: int, count: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    descriptors = {"get_osfhandle": lambda fd: fd, "open_osfhandle": lambda handle, flags: handle}
    sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=locking, **descriptors)  # type: ignore[assignment]
    sys.modules["winreg"] = types.ModuleType("winreg")
    preadv, real_open, last = os.preadv, os.open, [0]

    class Function:
        def __init__(self, call):
            self.call = call

        def __call__(self, *arguments):
            return self.call(*arguments)

    def create(name, access, share, security, disposition, flags, template):
        return real_open(name, os.O_RDONLY)

    def read(handle, address, length, count, offset):
        place = offset._obj.Offset | offset._obj.OffsetHigh << 32
        got = preadv(handle, [(ctypes.c_char * length).from_address(address)], place)
        count._obj.value, last[0] = got, 0 if got else 38
        return int(got > 0)

    def allocate(at, size, kind, protection):
        memory = mmap.mmap(-1, size)
        ranges.append(memory)
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def status(found):
        found._obj.ullTotalPhys, found._obj.ullAvailPhys = 8 << 30, 4 << 30
        return 1

    def counters(process, found, size):
        found._obj.WorkingSetSize, found._obj.PeakWorkingSetSize, found._obj.PrivateUsage = 3 << 20, 4 << 20, 2 << 20
        return 1

    ranges: list[mmap.mmap] = []
    calls = {
        "CreateFileW": create,
        "ReadFile": read,
        "VirtualAlloc": allocate,
        "VirtualFree": lambda *_: 1,
        "DiscardVirtualMemory": lambda *_: 0,
        "GetCurrentProcess": lambda: 1,
        "K32GetProcessMemoryInfo": counters,
        "GlobalMemoryStatusEx": status,
        "GetProcessAffinityMask": lambda *_: 0,
    }
    library = types.SimpleNamespace(**{name: Function(call) for name, call in calls.items()})
    ctypes.WinDLL = lambda name, use_last_error=False: library
    ctypes.get_last_error = lambda: last[0]
    ctypes.WinError = lambda code: OSError(code, "a Windows error")
    os.O_BINARY = os.O_NOINHERIT = 0


def become(system: str, work: Path) -> None:
    if system == "win32":
        tempfile.TemporaryFile = tempfile.NamedTemporaryFile  # as there
        fake_modules()
        removed = {**LINUX, **UNIX}
        for name in ("fcntl", "resource"):
            sys.modules[name] = None  # type: ignore[assignment]
        import signal

        signal.SIGBREAK = signal.SIGUSR1
    else:
        fcntl.F_FULLFSYNC, fcntl.F_NOCACHE = 51, 48
        real, preadv = fcntl.fcntl, os.preadv
        fcntl.fcntl = lambda fd, command, value=0: os.fsync(fd) if command in (48, 51) else real(fd, command, value)
        removed = {name: module for name, module in LINUX.items() if name != "preadv"}
        assert preadv
    sys.platform = system
    import moepack.system
    from moepack.system import files, folders, libraries, locks, maps, memory, processes, processors, reading, sockets

    sys.platform = "linux"
    without_fakes()
    for name, module in removed.items():
        delattr(module, name)
    if system == "win32":
        files.PATIENCE = 0.2
        windows_rules(work)
    else:  # mach is not to be had
        memory._filled = lambda *_: False
        memory._system = lambda: types.SimpleNamespace(sysctlbyname=lambda *_: -1)
    assert moepack.system and (folders, libraries, locks, maps, memory, processes, processors, reading, sockets)


def without_fakes() -> None:
    """Import what other packages import late, as on Linux."""
    hidden = {name: sys.modules.pop(name) for name in ("fcntl", "resource") if name in sys.modules}
    library = ctypes.__dict__.get("WinDLL")
    if library:
        del ctypes.WinDLL

    sys.modules.update(hidden)
    if library:
        ctypes.WinDLL = library


def main(system: str, work: Path) -> None:
    become(system, work)
    import moepack
    from moepack.cli import app
    from moepack.errors import DiskError, ResumeError
    from moepack.format.atomic import write_file
    from moepack.pipeline import job
    from moepack.pipeline.journal import Workspace

    assert app
    out, source = work / "packed", ROOT / "examples" / "tiny-moe"
    append, written = Workspace.append, []

    def interrupted(self, shard):
        append(self, shard)
        written.append(shard.name)
        raise KeyboardInterrupt

    Workspace.append = interrupted
    try:
        job.compress(source, out, method="finequant", calibration="none", threads=1)
    except KeyboardInterrupt:
        assert written and not out.exists()
    Workspace.append = append
    moepack.compress(source, out, method="finequant", calibration="none", threads=1)
    assert {entry.name for entry in work.iterdir()} == {"packed"}, [*work.iterdir()]

    other = Workspace.open(work / "other.partial", {"method": "x"}, resume=True)
    try:
        Workspace.open(work / "other.partial", {"method": "x"}, resume=True)
        raise AssertionError("locked twice")
    except ResumeError as error:
        assert "another process" in str(error)
    other.close()

    tokens = torch.arange(8).view(1, -1)
    model = moepack.load(out)
    with torch.no_grad():
        expected = model(tokens).logits
    shard = next(out.glob("*.safetensors"))
    try:
        write_file(shard, shard.read_bytes())
        assert system != "win32"
    except DiskError as error:
        assert system == "win32" and "has the file open, or a loaded model is mapped from it" in str(error)
    model.generate(tokens, max_new_tokens=2, do_sample=False)
    with torch.no_grad():
        resident = moepack.load(out, resident=True)
        assert torch.allclose(resident(tokens).logits, expected, atol=1e-4)
    assert transformers.__version__
    print("refused", len(REFUSED))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

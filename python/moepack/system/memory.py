"""Used and free memory of the process and the machine."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "ProcessMemory",
    "available_bytes",
    "group_limits",
    "huge_pages",
    "process_memory",
    "release_unused",
    "total_bytes",
]


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of a process in bytes.

    Attributes:
        peak: peak resident size, including mapped files.
        resident: current resident size: the sum of the next two, and a little shared memory.
        anonymous: anonymous pages, which the system cannot drop; on Windows, the committed ones up to `resident`.
        mapped: pages of mapped files, for example packed weights, which the system can drop.
    """

    peak: int = 0
    resident: int = 0
    anonymous: int = 0
    mapped: int = 0


if sys.platform == "win32":
    from moepack.system.kernel32 import checked, function

    class _Counters(ctypes.Structure):
        """PROCESS_MEMORY_COUNTERS_EX."""

        _fields_ = (
            ("cb", ctypes.c_uint32),
            ("PageFaultCount", ctypes.c_uint32),
            ("PeakWorkingSetSize", ctypes.c_size_t),
            ("WorkingSetSize", ctypes.c_size_t),
            ("others", ctypes.c_size_t * 6),
            ("PrivateUsage", ctypes.c_size_t),
        )

    class _Status(ctypes.Structure):
        """MEMORYSTATUSEX."""

        _fields_ = (
            ("dwLength", ctypes.c_uint32),
            ("dwMemoryLoad", ctypes.c_uint32),
            ("ullTotalPhys", ctypes.c_uint64),
            ("ullAvailPhys", ctypes.c_uint64),
            ("others", ctypes.c_uint64 * 5),
        )

    def _process() -> ProcessMemory:
        found = _Counters(cb=ctypes.sizeof(_Counters))
        process = function("GetCurrentProcess")()
        checked(function("K32GetProcessMemoryInfo")(process, ctypes.byref(found), found.cb))
        resident, private = found.WorkingSetSize, min(found.PrivateUsage, found.WorkingSetSize)
        return ProcessMemory(found.PeakWorkingSetSize, resident, private, resident - private)

    def _machine() -> _Status:
        found = _Status(dwLength=ctypes.sizeof(_Status))
        checked(function("GlobalMemoryStatusEx")(ctypes.byref(found)))
        return found

    def _available() -> int | None:
        return int(_machine().ullAvailPhys)

    def _total() -> int | None:
        return int(_machine().ullTotalPhys)

    def _release() -> None: ...

elif sys.platform == "darwin":

    class _Task(ctypes.Structure):
        """The first fields of task_vm_info."""

        _pack_ = 4
        _fields_ = (
            ("virtual_size", ctypes.c_uint64),
            ("region_count", ctypes.c_int32),
            ("page_size", ctypes.c_int32),
            ("resident_size", ctypes.c_uint64),
            ("resident_size_peak", ctypes.c_uint64),
            ("device", ctypes.c_uint64 * 2),
            ("internal", ctypes.c_uint64),
            ("internal_peak", ctypes.c_uint64),
            ("external", ctypes.c_uint64),
            ("others", ctypes.c_uint64 * 10),
        )

    class _Host(ctypes.Structure):
        """The first fields of vm_statistics64, and room for the others."""

        _fields_ = (
            ("free_count", ctypes.c_uint32),
            ("active_count", ctypes.c_uint32),
            ("inactive_count", ctypes.c_uint32),
            ("others", ctypes.c_uint32 * 61),
        )

    _TASK_VM_INFO, _HOST_VM_INFO64 = 22, 4

    def _system() -> ctypes.CDLL:
        return ctypes.CDLL(None)

    def _filled(function: str, of: str, kind: int, found: ctypes.Structure) -> bool:
        """Call a function of mach that fills a structure; return whether it succeeded."""
        count = ctypes.c_uint32(ctypes.sizeof(found) // 4)
        system = _system()
        subject = ctypes.c_uint32.in_dll(system, "mach_task_self_") if of == "task" else system.mach_host_self()
        return bool(getattr(system, function)(subject, kind, ctypes.byref(found), ctypes.byref(count)) == 0)

    def _process() -> ProcessMemory:
        found = _Task()
        if not _filled("task_info", "task", _TASK_VM_INFO, found):
            return ProcessMemory()
        return ProcessMemory(found.resident_size_peak, found.resident_size, found.internal, found.external)

    def _available() -> int | None:
        found = _Host()
        if not _filled("host_statistics64", "host", _HOST_VM_INFO64, found):
            return None
        return int(found.free_count + found.inactive_count) * os.sysconf("SC_PAGE_SIZE")

    def _total() -> int | None:
        found, size = ctypes.c_uint64(), ctypes.c_size_t(8)
        done = _system().sysctlbyname(b"hw.memsize", ctypes.byref(found), ctypes.byref(size), None, 0)
        return found.value if done == 0 else None

    def _release() -> None: ...

else:
    _FIELDS = {"VmHWM": "peak", "VmRSS": "resident", "RssAnon": "anonymous", "RssFile": "mapped"}

    def _kilobytes(file: str) -> dict[str, int]:
        """Read the fields `NAME: SIZE kB` of a file in /proc, in bytes; empty if it does not exist."""
        try:
            text = Path(file).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return {}
        lines = [line.partition(":") for line in text.splitlines()]
        return {name: int(value.split()[0]) << 10 for name, _, value in lines if value.endswith(" kB")}

    def _process() -> ProcessMemory:
        found = _kilobytes("/proc/self/status")
        return ProcessMemory(**{field: found[name] for name, field in _FIELDS.items() if name in found})

    def _available() -> int | None:
        system = _kilobytes("/proc/meminfo").get("MemAvailable")
        return None if system is None else min([system, *group_limits()])

    def _total() -> int | None:
        system = _kilobytes("/proc/meminfo").get("MemTotal")
        return None if system is None else min([system, *(limit for limit, _ in _groups(_GROUPS))])

    def _release() -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
        if trim is not None:
            trim(ctypes.c_size_t(0))


_GROUPS = Path("/sys/fs/cgroup")


def process_memory() -> ProcessMemory:
    """Return the memory of this process; zeros if the system cannot tell."""
    return _process()


def release_unused() -> None:
    """Return freed memory to the system, which the C library of Linux otherwise keeps between live allocations."""
    _release()


def available_bytes() -> int | None:
    """Return the memory available to this process in bytes: the minimum over the system and its control groups.

    The page cache counts as available. Return None if the system cannot tell.
    """
    return _available()


def total_bytes() -> int | None:
    """Return the total memory in bytes: the minimum over this machine and the process's control groups.

    Return None if the system cannot tell.
    """
    return _total()


def group_limits(root: Path = _GROUPS) -> Iterator[int]:
    """Yield the available bytes in each control group of this process that has a limit (Linux)."""
    for limit, group in _groups(root):
        with suppress(OSError, ValueError):
            used = int((group / "memory.current").read_text(encoding="ascii"))
            statistics = (line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            cached = sum(int(value) for name, value in statistics if name in ("active_file", "inactive_file"))
            yield max(0, limit - used + cached)


def _groups(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield limit and directory of each control group (version 2) of this process that has a limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for group in (root / path, *(root / path).parents):
        if not group.is_relative_to(root):
            return
        with suppress(OSError, ValueError):  # no version 2 group, or "max": no limit
            yield int((group / "memory.max").read_text(encoding="ascii")), group


def huge_pages() -> str | None:
    """Return the mode of Linux's transparent huge pages, which the file marks by brackets; None elsewhere."""
    try:
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return None
    return modes[modes.find("[") + 1 : modes.find("]")]

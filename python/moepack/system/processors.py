"""The processors that this process may use."""

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["model", "usable"]


if sys.platform == "win32":
    import ctypes
    import winreg

    from moepack.system.kernel32 import function

    def _usable() -> int | None:
        own, machine = ctypes.c_uint64(), ctypes.c_uint64()
        process = function("GetCurrentProcess")()
        # The mask is zero for a process in several groups of 64 processors.
        found = function("GetProcessAffinityMask")(process, ctypes.byref(own), ctypes.byref(machine))
        return own.value.bit_count() if found and own.value else None

    def _model() -> str | None:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()

elif sys.platform == "darwin":
    import ctypes

    def _usable() -> int | None:
        return None  # macOS binds no process to processors

    def _model() -> str | None:
        name, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
        system = ctypes.CDLL(None)
        done = system.sysctlbyname(b"machdep.cpu.brand_string", name, ctypes.byref(size), None, 0)
        return name.value.decode() if done == 0 else None

else:

    def _usable() -> int | None:
        return len(os.sched_getaffinity(0))

    def _model() -> str | None:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def usable() -> int:
    """Return the number of processors that this process may run on."""
    return _usable() or os.cpu_count() or 1


def model() -> str:
    """Return the name of the processor, or of its architecture if the system does not tell."""
    with suppress(OSError):
        if name := _model():
            return name
    return platform.machine()

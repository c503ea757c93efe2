"""Functions of Windows' kernel32 with their prototypes. Import it on Windows only."""

import ctypes
import sys
from ctypes import POINTER, Structure, c_size_t, c_uint32, c_uint64, c_void_p, c_wchar_p
from functools import cache
from typing import Any

assert sys.platform == "win32"

__all__ = ["Overlapped", "checked", "function"]


class Overlapped(Structure):
    """OVERLAPPED: the offset of a positional read."""

    _fields_ = (
        ("Internal", c_void_p),
        ("InternalHigh", c_void_p),
        ("Offset", c_uint32),
        ("OffsetHigh", c_uint32),
        ("hEvent", c_void_p),
    )


_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "CreateFileW": (c_void_p, c_wchar_p, c_uint32, c_uint32, c_void_p, c_uint32, c_uint32, c_void_p),
    "ReadFile": (c_uint32, c_void_p, c_void_p, c_uint32, POINTER(c_uint32), POINTER(Overlapped)),
    "VirtualAlloc": (c_void_p, c_void_p, c_size_t, c_uint32, c_uint32),
    "VirtualFree": (c_uint32, c_void_p, c_size_t, c_uint32),
    "DiscardVirtualMemory": (c_uint32, c_void_p, c_size_t),
    "GetCurrentProcess": (c_void_p,),
    "K32GetProcessMemoryInfo": (c_uint32, c_void_p, c_void_p, c_uint32),
    "GlobalMemoryStatusEx": (c_uint32, c_void_p),
    "GetProcessAffinityMask": (c_uint32, c_void_p, POINTER(c_uint64), POINTER(c_uint64)),
}
"""The type of the result, then those of the arguments."""


@cache
def function(name: str) -> Any:
    """Return a function of kernel32."""
    found = getattr(ctypes.WinDLL("kernel32", use_last_error=True), name)
    found.restype, *found.argtypes = _PROTOTYPES[name]
    return found


def checked(result: Any) -> Any:
    """Return the result of a call; raise the `OSError` of the last error if it is zero."""
    if not result:
        raise ctypes.WinError(ctypes.get_last_error())
    return result

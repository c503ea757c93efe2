"""File names that every system can keep.

Windows refuses some characters and device names, drops trailing dots and spaces, and reads `C:name` and `name:stream`
as something else: a file of another folder, and a hidden part of a file.
"""

import sys

__all__ = ["is_portable", "is_usable", "made_portable"]

_FORBIDDEN = frozenset('<>:"|?*\\' + "".join(map(chr, range(32))))
_DEVICES = frozenset(
    ["con", "prn", "aux", "nul", "conin$", "conout$"]
    + [f"{device}{number}" for device in ("com", "lpt") for number in "123456789¹²³"]
)


def is_portable(name: str) -> bool:
    """Return whether each part of a relative path with `/` is a name that every system can keep."""
    return all(_is_portable_part(part) for part in name.split("/"))


def _is_portable_part(part: str) -> bool:
    if not part or part[-1] in ". " or _FORBIDDEN.intersection(part):
        return False
    return part.split(".")[0].rstrip().lower() not in _DEVICES


_ALL_USABLE = sys.platform != "win32"


def is_usable(name: str) -> bool:
    """Return whether this system can keep a file of this name, a relative path with `/`, inside of the folder."""
    return _ALL_USABLE or is_portable(name)


def made_portable(name: str) -> str:
    """Return a name without `/` in which everything that some system refuses is replaced by `_`."""
    replaced = "".join("_" if letter in _FORBIDDEN or letter == "/" else letter for letter in name)
    stem = replaced.rstrip(". ") or "_"
    return stem if is_portable(stem) else f"_{stem}"

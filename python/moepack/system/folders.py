"""Folders of the user for data that programs keep.

Linux and macOS follow the XDG variables; Windows has one folder for all.
"""

import os
import sys
from pathlib import Path

__all__ = ["cache_folder", "data_folder"]


if sys.platform == "win32":

    def _default(below_home: str) -> Path:
        local = os.environ.get("LOCALAPPDATA")
        return Path(local) if local else Path.home() / "AppData" / "Local"

else:

    def _default(below_home: str) -> Path:
        return Path.home() / below_home


def cache_folder() -> Path:
    """Return moepack's folder for what can be made again: `~/.cache/moepack`, or the one below `XDG_CACHE_HOME`."""
    return _below("XDG_CACHE_HOME", ".cache")


def data_folder() -> Path:
    """Return moepack's folder for the user's data: `~/.local/share/moepack`, or the one below `XDG_DATA_HOME`."""
    return _below("XDG_DATA_HOME", ".local/share")


def _below(variable: str, below_home: str) -> Path:
    home = os.environ.get(variable)
    return (Path(home) if home else _default(below_home)) / "moepack"

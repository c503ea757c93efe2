"""The packed models that `moepack run` keeps in the user's data directory.

The folder is `moepack/models` below `XDG_DATA_HOME`, or `~/.local/share`. A model is a packed directory called
`ORGANIZATION--NAME--SIZE`; unfinished work has the suffixes of `compress`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from moepack.checkpoint.hub_model import hub_model
from moepack.pipeline.journal import PARTIAL
from moepack.pipeline.rewrite import STATE
from moepack.pipeline.source import SOURCE
from moepack.system import files
from moepack.system.folders import data_folder
from moepack.system.names import made_portable

__all__ = ["Entry", "entries", "library", "place_of", "title_of"]

_SEPARATOR = "--"
_COLON = "%3A"
"""Stands for the colon of `ORGANIZATION/NAME:Q8_0` in file names, because Windows does not allow it there."""

_UNFINISHED = (PARTIAL, STATE, SOURCE)


@dataclass(frozen=True)
class Entry:
    """A model of the library.

    Attributes:
        path: the packed directory, which does not exist if the work is unfinished.
        title: the Hub id, or the name of the original directory.
        size: the requested size, as text.
        nbytes: bytes on disk, including unfinished work.
        complete: whether the packed directory exists.
    """

    path: Path
    title: str
    size: str
    nbytes: int
    complete: bool

    def remove(self) -> None:
        """Delete the model and its unfinished work; raises OSError."""
        for path in (self.path, *(self.path.with_name(self.path.name + end) for end in _UNFINISHED)):
            if path.is_dir():
                files.remove_tree(path)
            else:
                files.remove(path, missing_ok=True)


def library() -> Path:
    """Return the folder of the library, which may not exist."""
    return data_folder() / "models"


def title_of(model: str) -> str:
    """Return the title of a model: its name on the Hub, or the directory's name with a digest of its path."""
    if hub_model(model) is not None:
        return model
    path = Path(model).absolute()
    return f"{made_portable(path.name)}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def place_of(title: str, size: str) -> Path:
    """Return the directory of a model in the library."""
    name = title.replace("/", _SEPARATOR).replace(":", _COLON)
    return library() / f"{name}{_SEPARATOR}{size}"


def entries(title: str | None = None) -> list[Entry]:
    """Return the models of the library by title and size, complete or not; only those of one title if it is given."""
    folder = library()
    found = {_bare(path.name) for path in folder.iterdir()} if folder.is_dir() else set()
    listed = [_entry(folder / name) for name in sorted(found) if _SEPARATOR in name]
    return [entry for entry in listed if title is None or entry.title == title]


def _bare(name: str) -> str:
    return next((name.removesuffix(end) for end in _UNFINISHED if name.endswith(end)), name)


def _entry(path: Path) -> Entry:
    name, _, size = path.name.rpartition(_SEPARATOR)
    places = (path, *(path.with_name(path.name + end) for end in _UNFINISHED))
    nbytes = sum(file.stat().st_size for place in places for file in (place, *place.rglob("*")) if file.is_file())
    title = name.replace(_SEPARATOR, "/").replace(_COLON, ":")
    return Entry(path, title, size, nbytes, path.is_dir())

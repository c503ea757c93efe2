"""Names of models on the Hugging Face Hub, as users write them.

| form | model |
|---|---|
| `ORGANIZATION/NAME` | the weights in the root of the repository |
| `ORGANIZATION/NAME@REVISION` | the same at a branch, tag or commit |
| `ORGANIZATION/NAME[@REVISION]/FILE.gguf` | a GGUF file, or any part of a split one |
| `ORGANIZATION/NAME[@REVISION]:KIND` | the only GGUF file with this quantization in its name, such as `Q8_0` |
"""

import os
import re
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from moepack.checkpoint.gguf.files import SUFFIX
from moepack.errors import CheckpointError

__all__ = ["HubModel", "hub_id", "hub_model"]

_MODEL = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(?:(?:@(?P<of_file>[^/:]+))?/(?P<file>[^:]+\.gguf)|(?:@(?P<revision>[^:]+))?(?::(?P<kind>[A-Za-z0-9][\w.-]*))?)",
    re.ASCII,
)


@dataclass(frozen=True)
class HubModel:
    """The name of a model on the Hub.

    Attributes:
        name: `ORGANIZATION/NAME`.
        revision: a branch, tag or commit; None for the default branch.
        file: a GGUF file of the repository; None if it is not named.
        kind: the quantization of a GGUF file; None if it is not named.
    """

    name: str
    revision: str | None = None
    file: str | None = None
    kind: str | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether the name says that the model is a GGUF file."""
        return self.file is not None or self.kind is not None

    @property
    def title(self) -> str:
        """The name without the revision."""
        return self.name + (f"/{self.file}" if self.file else f":{self.kind}" if self.kind else "")

    @property
    def repository(self) -> str:
        """The name and the revision of the repository."""
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def hub_model(model: str | PathLike[str]) -> HubModel | None:
    """Return the parts of a model's name; None for any other value, which is a path. An existing path takes precedence.

    Raises:
        CheckpointError: `model` is the root of a model's Hub cache.
    """
    given = fspath(model)
    _refuse_cache(Path(given))
    found = None if os.path.exists(given) else _MODEL.fullmatch(given)
    if found is None or (found["file"] is None and given.endswith(SUFFIX)):
        return None
    return HubModel(found["name"], found["revision"] or found["of_file"], found["file"], found["kind"])


def hub_id(model: str | PathLike[str]) -> tuple[str, str | None] | None:
    """Return the name and the revision of a model on the Hub that is not named as a GGUF file; None for others.

    Raises:
        CheckpointError: `model` is the root of a model's Hub cache.
    """
    found = hub_model(model)
    return None if found is None or found.is_gguf else (found.name, found.revision)


def _refuse_cache(path: Path) -> None:
    """Reject the cache folder of a Hub model, which is easily mistaken for one of the snapshots in it."""
    if os.path.isdir(path / "snapshots") and not (path / "config.json").exists():
        found = sorted(str(each) for each in (path / "snapshots").iterdir())
        holds = f"give one of its snapshots: {', '.join(found)}" if found else "it holds no snapshot"
        raise CheckpointError(f"is the Hub cache of a model, not a model; {holds}", file=path)

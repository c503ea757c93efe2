"""A GGUF model: the headers of all its parts, and its metadata."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moepack.checkpoint.gguf.header import GgufHeader, read_gguf
from moepack.errors import CheckpointError, UnsupportedModelError
from moepack.format.header import Header

__all__ = ["GgufModel", "model_of", "read_model"]


class GgufModel:
    """The headers of a model.

    Attributes:
        files: its parts in order.
        headers: their headers.
        architecture: llama.cpp's name of the architecture.
        kinds: name of each tensor's type.
        shapes: shape of each tensor.
    """

    def __init__(self, files: Sequence[Path], headers: Sequence[GgufHeader]) -> None:
        self.files, self.headers, self._metadata = list(files), list(headers), headers[0].metadata
        self.kinds: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for header in headers:
            for name in header.kinds:
                if name in self.kinds:
                    raise CheckpointError("is also in another part", file=header.header.file, tensor=name)
            self.kinds |= header.kinds
            self.shapes |= header.shapes
        self.architecture = self.plain("general.architecture", str)

    @property
    def shards(self) -> dict[str, Header]:
        """The places of the tensors' bytes, by the names of the parts."""
        return {header.header.file.name: header.header for header in self.headers}

    @property
    def file(self) -> Path:
        """The first part, for error messages."""
        return self.files[0]

    def has(self, name: str) -> bool:
        """Return whether the model has a tensor."""
        return name in self.kinds

    def plain(self, key: str, kind: type = int, default: Any = None) -> Any:
        """Return an entry of the metadata by its whole key.

        A list of equal numbers, one per layer, counts as the number.

        Raises:
            UnsupportedModelError: it is missing and there is no default, has another type, or differs between layers.
        """
        found = self._metadata.get(key, default)
        if isinstance(found, list) and found and all(each == found[0] for each in found) and kind is not list:
            found = found[0]
        if found is None:
            raise UnsupportedModelError(f"has no metadata '{key}'", file=self.file)
        number = kind is float and isinstance(found, int)
        if not isinstance(found, kind) and not number:
            message = f"the metadata '{key}' is no {kind.__name__}, or not the same in all layers"
            raise UnsupportedModelError(message, file=self.file)
        return float(found) if number else found

    def optional(self, key: str, kind: type = int) -> Any:
        """Return an entry by its whole key, or None; errors as for `plain`."""
        return self.plain(key, kind) if key in self._metadata else None

    def get(self, key: str, kind: type = int, default: Any = None) -> Any:
        """Return an entry of the architecture, as `plain` does."""
        return self.plain(f"{self.architecture}.{key}", kind, default)

    def find(self, key: str, kind: type = int) -> Any:
        """Return an entry of the architecture, or None; errors as for `plain`."""
        return self.optional(f"{self.architecture}.{key}", kind)


def read_model(files: Sequence[Path]) -> GgufModel:
    """Read the headers of a model's parts. No tensor is read.

    Raises:
        CheckpointError, UnsupportedModelError: as for `read_gguf`; or the parts do not belong together.
    """
    return model_of([read_gguf(file) for file in files])


def model_of(headers: Sequence[GgufHeader]) -> GgufModel:
    """Return the model of the headers of its parts, in order.

    Raises:
        CheckpointError: the parts do not belong together.
    """
    files = [header.header.file for header in headers]
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        place = header.metadata.get("split.no", 0), header.metadata.get("split.count", len(files))
        if place != (number, len(files)):
            message = f"is part {place[0]!r} of {place[1]!r} by its metadata, {number} of {len(files)} by its name"
            raise CheckpointError(message, file=file)
    total, found = headers[0].metadata.get("split.tensors.count"), sum(len(header.kinds) for header in headers)
    if len(files) > 1 and total not in (None, found):
        raise CheckpointError(f"the parts have {found} tensors, {total} by the metadata", file=files[0])
    return GgufModel(files, headers)

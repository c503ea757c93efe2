"""The manifest `moepack.json`: the contents of a packed directory with checksums.

It is the root of trust of `verify`. It lists every other file with size and SHA-256, and contains the SHA-256 of its
own canonical text. The text is canonical (sorted keys, fixed indentation, one final newline), and readers reject any
other form, so every bit is protected.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from moepack.errors import CorruptionError
from moepack.format.header import DTYPES
from moepack.format.regular import parse_json
from moepack.format.side import is_safe_name

T = TypeVar("T")

MANIFEST = "moepack.json"
FORMAT = "moepack"
VERSION = 1
"""Format version that this code writes, and the newest that it reads."""

MAX_MANIFEST = 1 << 28
"""Largest accepted manifest in bytes, enough for about 700,000 tensors."""

DENSE = "dense"
BEYOND = "beyond"
"""The detail that marks packed experts of layers outside transformers' model."""
RESIDUALS = "residuals"
"""The projection that stores residuals by channels, which are added to gate rows and down columns."""


@dataclass(frozen=True)
class TensorRecord:
    """A tensor of the directory.

    Attributes:
        file: name of the safetensors file that holds it.
        kind: `dense` (copied from the source, dtype and shape as in the file) or a packed kind such as `ternary`.
        dtype: safetensors dtype of a dense tensor; `U8` for packed ones.
        shape: shape in elements. For a packed tensor, the shape of its weights: [experts, rows, columns], or
            [rows, columns] for a linear layer outside the experts.
        nbytes: bytes in the file.
        crc32: CRC-32 of those bytes. It locates damage; the file's SHA-256 is authoritative.
        module, projection: for a packed tensor, the module path in transformers and the projection; "weight" for a
            linear layer.
        source_bytes: for a packed tensor, the bytes of its weights in the source checkpoint.
        details: for a packed tensor, details given by its method (`code`, `nonzeros` for ternary).
    """

    file: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    crc32: int
    module: str = ""
    projection: str = ""
    source_bytes: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def packed(self) -> bool:
        """Whether the tensor is packed."""
        return self.kind != DENSE

    @property
    def beyond(self) -> bool:
        """Whether the tensor holds packed experts of a layer outside transformers' model."""
        return bool(self.details.get(BEYOND))

    @property
    def experts(self) -> bool:
        """Whether the tensor holds packed experts, and not a single matrix."""
        return self.packed and len(self.shape) == 3

    @property
    def weights(self) -> int:
        """Number of weights; zero for residuals, whose weights the coarse tensors already count."""
        return 0 if self.projection == RESIDUALS else math.prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """Return the record for the manifest. Fields of packed tensors are omitted for dense ones."""
        names = ["file", "kind", "dtype", "nbytes", "crc32"]
        names += ["module", "projection", "source_bytes"] if self.packed else []
        record: dict[str, Any] = {name: getattr(self, name) for name in names}
        record["shape"] = list(self.shape)
        if self.packed:
            record["details"] = dict(self.details)
        return record

    @classmethod
    def from_json(cls, record: Any) -> "TensorRecord":
        """Check and convert a record; `ValueError` describes the error."""
        record = _object(record, "a tensor's record")
        packed = record.get("kind") != DENSE
        text = ["file", "kind", "dtype", *(["module", "projection"] if packed else [])]
        numbers = ["nbytes", "crc32", *(["source_bytes"] if packed else [])]
        _expect_keys(record, {*text, *numbers, "shape", *(["details"] if packed else [])})
        _expect(all(type(record[name]) is str for name in text), f"{', '.join(text)} must be strings")
        _expect(_is_sizes([record[name] for name in numbers]), f"{', '.join(numbers)} must be non-negative integers")
        _expect(_is_sizes(record["shape"]), "shape must be a list of non-negative integers")
        _expect(record["dtype"] in DTYPES, f"unknown dtype {record['dtype']!r}")
        if packed:
            _object(record["details"], "details")
            _expect(
                record["dtype"] == "U8" and len(record["shape"]) in (2, 3),
                "a packed tensor is U8 with a 2-D or 3-D shape",
            )
        return cls(**{**record, "shape": tuple(record["shape"])})


@dataclass(frozen=True)
class FileRecord:
    """A file of the directory: size in bytes and SHA-256 in hex."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> "FileRecord":
        """Return the record of a file with the content `data`."""
        return cls(len(data), hashlib.sha256(data).hexdigest())

    @classmethod
    def from_json(cls, record: Any) -> "FileRecord":
        """Check and convert a record; `ValueError` describes the error."""
        record = _object(record, "a file's record")
        _expect_keys(record, {"size", "sha256"})
        _expect(_is_sizes([record["size"]]), "size must be a non-negative integer")
        digest = record["sha256"]
        _expect(isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest) is not None, "sha256 must be 64 hex")
        return cls(**record)


@dataclass(frozen=True)
class Manifest:
    """The content of `moepack.json`.

    Attributes:
        method: name of the compression method.
        settings: settings of the method, as JSON values.
        architecture: `model_type` of the source model.
        fingerprint: identity of the job that made the directory: model, method, settings and versions.
        tensors: every tensor by name.
        files: every file of the directory by name, except the manifest itself.
        version: format version.
    """

    method: str
    settings: Mapping[str, Any]
    architecture: str
    fingerprint: Mapping[str, str]
    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, FileRecord]
    version: int = VERSION

    def packed(self) -> dict[str, TensorRecord]:
        """Return the packed tensors by name, in the order of layers as stored (sorted by file, then name)."""
        found = [(name, record) for name, record in self.tensors.items() if record.packed]
        return dict(sorted(found, key=lambda item: (item[1].file, item[0])))

    def to_bytes(self) -> bytes:
        """Return the canonical text with its checksum."""
        return _canonical(self._content())

    def _content(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": self.version,
            "method": self.method,
            "settings": dict(self.settings),
            "architecture": self.architecture,
            "fingerprint": dict(self.fingerprint),
            "tensors": {name: record.to_json() for name, record in self.tensors.items()},
            "files": {name: {"size": record.size, "sha256": record.sha256} for name, record in self.files.items()},
        }

    @classmethod
    def parse(cls, data: bytes, file: str | PathLike[str]) -> "Manifest":
        """Parse a manifest.

        Raises:
            CorruptionError: the text is damaged or inconsistent, or has a newer version than this code supports.
        """
        try:
            content = parse_json(data, Path(file), CorruptionError)
            _check_version(content)
            checksum = content.pop("checksum", None)
            _expect(checksum == _checksum(content), "the checksum of the manifest is wrong")
            manifest = cls._from_content(content)
        except CorruptionError:
            raise
        except (ValueError, RecursionError) as error:
            raise CorruptionError(str(error), file=file) from error
        if manifest.to_bytes() != data:
            raise CorruptionError("the manifest is not in canonical form", file=file)
        return manifest

    @classmethod
    def _from_content(cls, content: dict[str, Any]) -> "Manifest":
        maps = {"settings", "fingerprint", "tensors", "files"}
        _expect_keys(content, {"format", "version", "method", "architecture", *maps})
        for name in maps:
            _object(content[name], name)
        _expect(isinstance(content["method"], str), "method must be a string")
        _expect(isinstance(content["architecture"], str), "architecture must be a string")
        tensors = {name: _named(TensorRecord.from_json, name, value) for name, value in content["tensors"].items()}
        files = {name: _named(FileRecord.from_json, name, value) for name, value in content["files"].items()}
        for name in files:
            _expect_safe_name(name)
        for name, record in tensors.items():
            _expect("/" not in record.file, f"tensor '{name}' is in '{record.file}', which is not a plain file name")
            _expect(record.file in files, f"tensor '{name}' is in '{record.file}', which files does not list")
        known = {name: content[name] for name in ("method", "settings", "architecture", "fingerprint", "version")}
        return cls(**known, tensors=tensors, files=files)


def _check_version(content: dict[str, Any]) -> None:
    _expect(content.get("format") == FORMAT, f"format is {content.get('format')!r}, expected '{FORMAT}'")
    version: Any = content.get("version")
    _expect(type(version) is int and version >= 1, f"version is {version!r}, expected a positive integer")
    _expect(version <= VERSION, f"the directory is of format version {version}; this moepack reads up to {VERSION}")


def _canonical(content: dict[str, Any]) -> bytes:
    return _dump({**content, "checksum": _checksum(content)})


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(_dump(content)).hexdigest()


def _dump(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _expect_safe_name(name: str) -> None:
    """Check that a listed file is inside the directory and not the manifest itself."""
    _expect(name != MANIFEST and is_safe_name(name), f"bad file name {name!r}")


def _named(convert: Callable[[Any], T], name: str, value: Any) -> T:
    try:
        return convert(value)
    except ValueError as error:
        raise ValueError(f"'{name}': {error}") from error


def _object(value: Any, what: str) -> dict[str, Any]:
    _expect(isinstance(value, dict), f"{what} must be a JSON object")
    result: dict[str, Any] = value
    return result


def _expect_keys(record: dict[str, Any], names: set[str]) -> None:
    _expect(set(record) == names, f"fields must be {sorted(names)}, found {sorted(record)}")


def _is_sizes(value: Any) -> bool:
    """Return whether `value` is a list of non-negative integers that fit into 63 bits."""
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)

"""Opens packed directories for reading.

Opening checks the manifest, the existence and size of every shard, and that its header agrees with the manifest. No
tensor is read. Packed tensors are mapped (in huge pages if memory can hold them all), so they take only address space
until a kernel accesses them. Their bytes are checked by `verify` (checksums) and by the reader of each blob
(structure). Files that a model does not need to run (a model card, a license) may be absent, because transformers
downloads only the files that it reads. `verify` requires all of them.

Invariant: `tensors()` are slices of read-only mappings, 64-byte aligned, inside their files. Accessing a file that was
truncated while mapped kills the process, as with any mapped file. Never write into an open directory.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moepack.errors import CorruptionError, LoadError
from moepack.format.header import Header, read_header
from moepack.format.manifest import MANIFEST, MAX_MANIFEST, Manifest, TensorRecord
from moepack.format.regular import read_json
from moepack.format.shard import ALIGNMENT, DTYPE_NAMES
from moepack.mapping import map_file
from moepack.memory import available_bytes
from moepack.registry import OpenTensor, kinds, open_tensor


@dataclass(frozen=True)
class PackedDirectory:
    """An open packed directory.

    Attributes:
        path: the directory.
        manifest: the parsed manifest.
        config: the content of config.json.
    """

    path: Path
    manifest: Manifest
    config: Mapping[str, Any]
    _tensors: Mapping[str, npt.NDArray[np.uint8]]

    @classmethod
    def open(cls, path: str | PathLike[str]) -> "PackedDirectory":
        """Open and validate a packed directory. Tensors are mapped, not read.

        Raises:
            LoadError: `path` is not a directory, or not a packed one.
            CorruptionError: a shard is missing, has a wrong size or contradicts the manifest, or the format version is
                newer than this code supports.
        """
        path = Path(path)
        manifest = read_manifest(path)
        packed = manifest.packed()
        tensors: dict[str, npt.NDArray[np.uint8]] = {}
        available = available_bytes()
        fits = available is not None and sum(record.nbytes for record in packed.values()) < available
        for file in sorted({record.file for record in manifest.tensors.values()}):
            check_size(path / file, manifest.files[file].size)
            header = check_header(path / file, manifest)
            names = [name for name, record in packed.items() if record.file == file]
            tensors.update(map_tensors(path / file, header, names, huge=fits))
        return cls(path, manifest, read_config(path), tensors)

    def tensors(self) -> dict[str, npt.NDArray[np.uint8]]:
        """Return the packed tensors by name: flat mapped uint8 arrays, read-only and 64-byte aligned."""
        return dict(self._tensors)

    def tensor(self, name: str) -> npt.NDArray[np.uint8]:
        """Return one packed tensor; `KeyError` if it does not exist."""
        return self._tensors[name]

    def blob(self, name: str) -> OpenTensor:
        """Open the packed tensor `name`, checking its metadata against its bytes and the manifest.

        Raises:
            CorruptionError: the blob's header, sizes or row table contradict each other or the manifest.
        """
        return open_blob(self._tensors[name], name, self.manifest.tensors[name], self.path)


def read_manifest(path: Path) -> Manifest:
    """Read and check `path`/moepack.json.

    Raises:
        LoadError: the directory or its manifest does not exist.
        CorruptionError: the manifest is damaged or has a newer version.
    """
    file = path / MANIFEST
    if not path.is_dir():
        raise LoadError("no such directory", file=path)
    if not file.is_file():
        raise LoadError(f"not a packed directory: there is no {MANIFEST} in it", file=path)
    try:
        with open(file, "rb") as stream:
            data = stream.read(MAX_MANIFEST + 1)
    except OSError as error:
        raise CorruptionError(f"cannot be read: {error.strerror}", file=file) from error
    if len(data) > MAX_MANIFEST:
        raise CorruptionError(f"longer than {MAX_MANIFEST} bytes", file=file)
    return Manifest.parse(data, file)


def read_config(path: Path) -> dict[str, Any]:
    """Read `path`/config.json; `CorruptionError` if it is missing or not a JSON object."""
    return read_json(path / "config.json", CorruptionError)


def check_size(file: Path, size: int) -> None:
    """Check that a file exists and has `size` bytes; `CorruptionError` otherwise."""
    if not file.is_file():
        raise CorruptionError("missing", file=file)
    found = file.stat().st_size
    if found != size:
        raise CorruptionError(f"has {found} bytes, but the manifest lists {size}", file=file)


def check_listed(files: Iterable[Path], manifest: Manifest) -> None:
    """Check that the manifest lists the files that transformers opens; `CorruptionError` names a file that is not."""
    for file in files:
        if file.name not in manifest.files:
            message = f"would be opened by transformers, but {MANIFEST} does not list it"
            raise CorruptionError(f"{message}: remove it, it belongs to another model", file=file)


def check_header(file: Path, manifest: Manifest) -> Header:
    """Read a shard's header and compare it with the manifest; `CorruptionError` names the first difference."""
    header = read_header(file, CorruptionError)
    expected = {name: record for name, record in manifest.tensors.items() if record.file == file.name}
    for name in sorted(header.tensors.keys() ^ expected.keys()):
        where = "the manifest" if name in header.tensors else "the file"
        raise CorruptionError(f"{where} does not know it", file=file, tensor=name)
    for name, record in expected.items():
        info = header.tensors[name]
        shape = (record.nbytes,) if record.packed else record.shape
        if (DTYPE_NAMES[info.dtype], info.shape, info.nbytes) != (record.dtype, shape, record.nbytes):
            raise CorruptionError("dtype, shape or size differ from the manifest's", file=file, tensor=name)
        if record.packed and info.offset % ALIGNMENT:
            message = f"starts at byte {info.offset}, which is not a multiple of {ALIGNMENT}"
            raise CorruptionError(message, file=file, tensor=name)
    return header


def map_tensors(file: Path, header: Header, names: list[str], *, huge: bool = True) -> dict[str, npt.NDArray[np.uint8]]:
    """Map the bytes of some tensors of a shard read-only; `CorruptionError` if the file cannot be mapped."""
    if not names:
        return {}
    try:
        mapped = map_file(file, huge=huge)
    except (OSError, ValueError) as error:
        raise CorruptionError(f"cannot be mapped: {error}", file=file) from error
    slices = {name: header.tensors[name] for name in names}
    return {name: mapped[info.offset : info.offset + info.nbytes] for name, info in slices.items()}


def open_blob(data: npt.NDArray[np.uint8], name: str, record: TensorRecord, path: Path) -> OpenTensor:
    """Parse a packed blob's metadata and compare it with its record; `CorruptionError` if they differ."""
    file = path / record.file
    if record.kind not in kinds():
        raise CorruptionError(f"unknown kind of packed tensor '{record.kind}'", file=file, tensor=name)
    try:
        blob = open_tensor(data, file=file, tensor=name)
    except LoadError as error:
        raise CorruptionError(error.detail, file=file, tensor=name) from error
    found = {**blob.details(), "kind": blob.kind, "shape": blob.shape[-blob.ndim :]}
    for key, said in {**record.details, "kind": record.kind, "shape": record.shape}.items():
        if key in found and found[key] != said:
            raise CorruptionError(f"{key} is {found[key]}, but the manifest lists {said}", file=file, tensor=name)
    return blob

"""`verify`: finds any damage to a packed directory, down to one flipped bit.

There are three passes, all of which always run:
1. compare every byte of every file with the SHA-256 in the manifest (the manifest with its own checksum); if a file
   differs, the CRC-32 of its tensors locates the damage;
2. compare every shard's header, config.json and the index with the manifest;
3. decode every packed tensor: each offset, length and code.

The first pass finds all accidental damage. The third also finds errors of a faulty writer.

Files that neither weights nor vocabulary depend on (a model card, a chat template, a license) may be added, edited or
removed. They are listed separately as side files and do not count as damage.
"""

import hashlib
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from moepack.errors import CorruptionError
from moepack.format.directory import check_header, open_blob, read_manifest
from moepack.format.header import Header, read_header
from moepack.format.hub import CONFIG, INDEX, contradictions
from moepack.format.manifest import MANIFEST, Manifest
from moepack.format.regular import leads_out, read_json
from moepack.format.side import SideFile, files_below, is_editable, is_small, side_names
from moepack.mapping import map_file

TRANSPORT = frozenset({".gitattributes", ".git", ".cache"})
"""Entries that the Hub and git add to a directory. Nothing reads them, so they are not faults."""

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Fault:
    """Damage at one place of a directory.

    Attributes:
        file: name of the file, relative to the directory.
        what: description of the damage.
        tensor: name of the damaged tensor, or None.
        offset: offset of that tensor in the file, or None.
    """

    file: str
    what: str
    tensor: str | None = None
    offset: int | None = None

    def __str__(self) -> str:
        tensor = "" if self.tensor is None else f": tensor '{self.tensor}'"
        offset = "" if self.offset is None else f" (from byte {self.offset})"
        return f"{self.file}{tensor}{offset}: {self.what}"


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`.

    Attributes:
        path: the directory.
        faults: the faults in the order found; empty if the directory is intact.
        side: side files that changed after packing. They are not faults.
        files: number of files read, including the manifest.
        tensors: number of packed tensors decoded.
        nbytes: bytes read.
        seconds: time taken.
    """

    path: Path
    faults: tuple[Fault, ...]
    side: tuple[SideFile, ...]
    files: int
    tensors: int
    nbytes: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether no fault was found. Side files do not count."""
        return not self.faults


def verify(path: str | PathLike[str]) -> VerifyReport:
    """Check every byte, offset and code of a packed directory.

    Damage is reported, not raised.

    Raises:
        LoadError: `path` is not a directory, or has no manifest.
    """
    directory, start = Path(path), time.perf_counter()
    try:
        manifest = read_manifest(directory)
    except CorruptionError as error:
        return VerifyReport(directory, (_fault(error, MANIFEST),), (), 1, 0, 0, time.perf_counter() - start)
    found = [*_listing(directory, manifest), *_checksums(directory, manifest)]
    found += [*_agreement(directory, manifest), *_blobs(directory, manifest)]
    faults = tuple(dict.fromkeys(fault for fault in found if isinstance(fault, Fault)))
    side = tuple(each for each in found if isinstance(each, SideFile))
    nbytes = sum(record.size for record in manifest.files.values())
    counts = 1 + len(manifest.files), len(manifest.packed()), nbytes
    return VerifyReport(directory, faults, side, *counts, time.perf_counter() - start)


def _fault(error: CorruptionError, file: str, offset: int | None = None) -> Fault:
    return Fault(file, error.detail, error.tensor, offset)


def _listing(directory: Path, manifest: Manifest) -> Iterator[Fault | SideFile]:
    """Find links and files that the manifest does not list. Missing files are found when they are read."""
    for entry in sorted(directory.iterdir()):
        if leads_out(entry):
            yield Fault(entry.name, f"is a link out of the directory, to {entry.resolve()}")
        elif entry.is_dir() and not entry.is_symlink() and entry.name not in TRANSPORT:
            yield from _folder(entry, manifest)
        elif entry.name not in manifest.files and entry.name != MANIFEST and entry.name not in TRANSPORT:
            small = is_small(entry)
            yield SideFile(entry.name, "added") if small else Fault(entry.name, "the manifest does not list it")


def _folder(folder: Path, manifest: Manifest) -> Iterator[Fault | SideFile]:
    """Find links and unlisted files in a folder."""
    listed = any(name.startswith(f"{folder.name}/") for name in manifest.files)
    if not listed and not side_names(folder):
        yield Fault(folder.name, "the manifest does not list it")
        return
    for name in files_below(folder):
        file = folder.parent / name
        if leads_out(file, folder.parent):
            yield Fault(name, f"is a link out of the directory, to {file.resolve()}")
        elif name not in manifest.files:
            yield SideFile(name, "added") if is_small(file) else Fault(name, "the manifest does not list it")


def _checksums(directory: Path, manifest: Manifest) -> Iterator[Fault | SideFile]:
    for name, record in sorted(manifest.files.items()):
        file = directory / name
        if not file.is_file():
            gone = is_editable(name) and not file.exists()
            yield SideFile(name, "missing") if gone else Fault(name, "missing")
            continue
        try:
            size, sha256 = file.stat().st_size, _sha256(file)
        except OSError as error:
            yield Fault(name, f"cannot be read: {error.strerror}")
            continue
        if is_editable(name):
            if (size, sha256) != (record.size, record.sha256):
                yield SideFile(name, "changed")
        elif size != record.size:
            yield Fault(name, f"has {size} bytes, but the manifest lists {record.size}")
        elif sha256 != record.sha256:
            yield from _locate(file, manifest)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _locate(file: Path, manifest: Manifest) -> Iterator[Fault]:
    """Yield the damaged tensors of a shard; the whole file if none differs or if it is not a shard."""
    tensors = {name: record for name, record in manifest.tensors.items() if record.file == file.name}
    whole = Fault(file.name, "the SHA-256 differs from the manifest's")
    header = _header(file) if tensors else None
    if header is None:
        yield whole
        return
    damaged = 0
    for name, info in header.tensors.items():
        if name in tensors and _crc32(file, info.offset, info.nbytes) != tensors[name].crc32:
            damaged += 1
            yield Fault(file.name, "the CRC-32 differs from the manifest's", name, info.offset)
    if not damaged:
        yield whole


def _header(file: Path) -> Header | None:
    try:
        return read_header(file, CorruptionError)
    except CorruptionError:
        return None


def _crc32(file: Path, offset: int, nbytes: int) -> int:
    crc32 = 0
    with open(file, "rb") as stream:
        stream.seek(offset)
        while nbytes > 0 and (chunk := stream.read(min(nbytes, _CHUNK))):
            crc32, nbytes = zlib.crc32(chunk, crc32), nbytes - len(chunk)
    return crc32


def _agreement(directory: Path, manifest: Manifest) -> Iterator[Fault]:
    """Compare headers, config.json and the index with the manifest."""
    for file in _shards(directory, manifest):
        try:
            check_header(file, manifest)
        except CorruptionError as error:
            yield _fault(error, file.name)
    parsed = {}
    for name in (CONFIG, INDEX):
        try:
            parsed[name] = read_json(directory / name, CorruptionError)
        except CorruptionError as error:
            yield _fault(error, name)
    if len(parsed) == 2:
        for name, what in contradictions(manifest, parsed[CONFIG], parsed[INDEX]).items():
            yield Fault(name, what)


def _shards(directory: Path, manifest: Manifest) -> Iterator[Path]:
    """Yield the existing shards."""
    for name in sorted({record.file for record in manifest.tensors.values()}):
        if (directory / name).is_file():
            yield directory / name


def _blobs(directory: Path, manifest: Manifest) -> Iterator[Fault]:
    """Decode every packed tensor in a shard with a valid header."""
    packed = manifest.packed()
    for file in _shards(directory, manifest):
        header = _header(file)
        if header is None:
            continue
        mapped = map_file(file)
        for name, info in header.tensors.items():
            if name not in packed or packed[name].file != file.name:
                continue
            try:
                data = mapped[info.offset : info.offset + info.nbytes]
                open_blob(data, name, packed[name], directory).verify()
            except ValueError as error:
                what = error.detail if isinstance(error, CorruptionError) else str(error)
                yield Fault(file.name, what, name, info.offset)

"""Gives a file of weights the form of a model directory: configuration and tokenizer beside links to the weights.

All other code reads model directories. That of a file lies in the user's cache (`~/.cache/moepack/files/NAME-DIGEST`)
and may be deleted at any time. Configuration and tokenizer come from the folder of the file if it has a config.json,
otherwise from the metadata of a GGUF file. A GGUF file of the Hub whose weights are read by ranges has a directory
without links.

Invariant: a directory in the cache is complete; it is built under another name and renamed.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moepack.checkpoint.gguf.config import configuration
from moepack.checkpoint.gguf.files import SUFFIX, gguf_files, is_gguf, parts_of
from moepack.checkpoint.gguf.model import GgufModel, read_model
from moepack.errors import CheckpointError, DiskError
from moepack.format.hub import CONFIG
from moepack.format.side import side_names
from moepack.format.weights import PICKLE, pickle_files, weight_files
from moepack.system.files import refer, remove, remove_tree, rename
from moepack.system.folders import cache_folder

__all__ = ["companion", "is_file", "sides_of"]

_NAMES = {".safetensors": "model.safetensors", ".bin": PICKLE}
"""Name of a model's only file of weights, by its suffix."""


def is_file(path: Path) -> bool:
    """Return whether a path is a file of weights, or a directory of a GGUF model without config.json."""
    if path.suffix in (SUFFIX, *_NAMES):
        return path.is_file()
    return is_gguf(path) or (not (path / CONFIG).exists() and bool(gguf_files(path)))


def companion(path: Path, config: Path | None = None) -> Path:
    """Return the model directory of a file, which is built on the first call.

    Args:
        path: a safetensors file, a PyTorch pickle, any part of a GGUF model, or the folder of one. A GGUF file may have
            any name.
        config: folder of config.json and tokenizer; None means the folder of the file if it has a config.json,
            otherwise the metadata of the GGUF file.

    Raises:
        CheckpointError, UnsupportedModelError: as for `read_model` and `configuration`, or there is no config.json.
        DiskError: the cache cannot be written.
    """
    links = {name: file.absolute() for name, file in _links(path).items()}
    first = next(iter(links.values()))
    folder = (config or first.parent).absolute()
    if config is None and _is_whole(folder, first, len(links)):
        return folder
    model, sides = None, []
    if (folder / CONFIG).is_file():
        sides = [name for entry in sorted(folder.iterdir()) for name in side_names(entry)]
    elif config is not None or not is_gguf(first):
        advice = "" if config is not None else ", which the model needs; --config DIR gives one of another folder"
        raise CheckpointError(f"has no {CONFIG}{advice}", file=folder)
    else:
        model = read_model(list(links.values()))
    target = _cache() / f"{first.stem}-{_digest(links.values(), [folder / name for name in sides])}"
    return _built(target, links, folder, sides, model)


def sides_of(model: GgufModel, entries: bytes, config: Path | None, folder: Path) -> Path:
    """Return the model directory of a GGUF file that is not on this machine. It has no weights.

    Args:
        model: its headers.
        entries: the bytes of the first part before the description of the first tensor.
        config: as for `companion`.
        folder: the small files of the repository, as they are in the folder of the file.

    Raises: as `companion`.
    """
    if config is not None and not (config / CONFIG).is_file():
        raise CheckpointError(f"has no {CONFIG}", file=config)
    if config is not None or (folder / CONFIG).is_file():
        return (config or folder).absolute()
    target = _cache() / f"{model.file.stem}-{hashlib.sha256(entries).hexdigest()[:16]}"
    return _built(target, {}, folder, [], model, entries)


def _built(
    target: Path,
    links: Mapping[str, Path],
    folder: Path,
    sides: Sequence[str],
    model: GgufModel | None,
    entries: bytes = b"",
) -> Path:
    """Return a directory of the cache, which is built if it does not exist."""
    if not target.is_dir():
        try:
            _build(target, links, folder, sides, model, entries)
        except OSError as cause:
            raise DiskError(f"cannot be written: {cause.strerror or cause}", file=target) from cause
    return target


def _links(path: Path) -> dict[str, Path]:
    """Return the files of a model by their names in its directory."""
    if path.suffix in _NAMES and path.is_file():
        return {_NAMES[path.suffix]: path}
    if path.is_file() and path.suffix != SUFFIX:
        return {f"{path.name}{SUFFIX}": path}
    return {part.name: part for part in (parts_of(path) if path.is_file() else gguf_files(path))}


def _is_whole(folder: Path, file: Path, parts: int) -> bool:
    """Return whether the folder of a file is the model directory that has this file and no other weights."""
    if not (folder / CONFIG).is_file():
        return False
    if file.suffix == SUFFIX:
        return len([*folder.glob(f"*{SUFFIX}")]) == parts
    return file.name in (weight_files(folder) or pickle_files(folder))


def _cache() -> Path:
    return cache_folder() / "files"


def _digest(parts: Iterable[Path], others: Iterable[Path]) -> str:
    """Return a digest of names, sizes and times of the files."""
    digest = hashlib.sha256()
    for file in (*parts, *others):
        status = file.stat()
        digest.update(f"{file}\n{status.st_size}\n{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _build(
    target: Path,
    links: Mapping[str, Path],
    folder: Path,
    sides: Sequence[str],
    model: GgufModel | None,
    entries: bytes,
) -> None:
    """Write a directory: links to the files, and the small files of a folder or those made from the metadata.

    Without a link, the tokenizer is made from a GGUF file that has the given entries and no tensor.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    try:
        for name, file in links.items():
            refer(file, partial / name)
        for name in sides:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, partial / name)
        if model is not None:
            config = configuration(model)
            name = next(iter(links), model.file.name)
            if entries:
                (partial / name).write_bytes(entries[:8] + bytes(8) + entries[16:])
            _write_tokenizer(partial, name)
            if entries:
                remove(partial / name)
            (partial / CONFIG).write_bytes(json.dumps(config, indent=2).encode() + b"\n")
        with suppress(FileExistsError):  # another process was faster
            rename(partial, target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        remove_tree(partial, ignore_errors=True)


def _write_tokenizer(folder: Path, file: str) -> None:
    """Write the tokenizer of a GGUF file in a folder, if transformers can convert it. Otherwise the folder has none."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
        tokenizer.save_pretrained(folder)
    except Exception:  # transformers raises several kinds for vocabularies that it does not convert
        return
    finally:
        transformers.logging.set_verbosity(verbosity)

"""Gives a GGUF file the form of a model directory: configuration and tokenizer beside links to the file's parts.

All other code reads model directories. The directory of a GGUF file lies in the user's cache
(`~/.cache/moepack/gguf/NAME-DIGEST`) and may be deleted at any time. Configuration and tokenizer come from the folder
of the file if it has a config.json, otherwise from the file's metadata.

Invariant: a directory in the cache is complete; it is built under another name and renamed.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moepack.checkpoint.gguf.config import configuration
from moepack.checkpoint.gguf.files import SUFFIX, gguf_files, parts_of
from moepack.checkpoint.gguf.model import GgufModel, read_model
from moepack.errors import CheckpointError, DiskError
from moepack.format.hub import CONFIG
from moepack.format.side import side_names

__all__ = ["companion", "is_gguf"]


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, or a directory of a GGUF model without config.json."""
    if path.suffix == SUFFIX and path.is_file():
        return True
    return not (path / CONFIG).exists() and bool(gguf_files(path))


def companion(path: Path, config: Path | None = None) -> Path:
    """Return the model directory of a GGUF file, which is built on the first call.

    Args:
        path: any part of the model, or its folder.
        config: folder of config.json and tokenizer; None means the folder of the file if it has a config.json,
            otherwise the file's metadata.

    Raises:
        CheckpointError, UnsupportedModelError: as for `read_model` and `configuration`.
        DiskError: the cache cannot be written.
    """
    parts = [part.absolute() for part in (parts_of(path) if path.is_file() else gguf_files(path))]
    folder = (config or parts[0].parent).absolute()
    if config is not None and not (folder / CONFIG).is_file():
        raise CheckpointError("has no config.json", file=config)
    if (folder / CONFIG).is_file():
        if folder == parts[0].parent and len([*folder.glob(f"*{SUFFIX}")]) == len(parts):
            return folder
        model, sides = None, [name for entry in sorted(folder.iterdir()) for name in side_names(entry)]
    else:
        model, sides = read_model(parts), []
    target = _cache() / f"{parts[0].stem}-{_digest(parts, [folder / name for name in sides])}"
    if not target.is_dir():
        try:
            _build(target, parts, folder, sides, model)
        except OSError as cause:
            raise DiskError(f"cannot be written: {cause.strerror or cause}", file=target) from cause
    return target


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "moepack" / "gguf"


def _digest(parts: Sequence[Path], others: Iterable[Path]) -> str:
    """Return a digest of names, sizes and times of the files."""
    digest = hashlib.sha256()
    for file in (*parts, *others):
        status = file.stat()
        digest.update(f"{file}\n{status.st_size}\n{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _build(target: Path, parts: Sequence[Path], folder: Path, sides: Sequence[str], model: GgufModel | None) -> None:
    """Write a directory: links to the parts, and the small files of their folder or those made from the metadata."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    try:
        for part in parts:
            (partial / part.name).symlink_to(part)
        for name in sides:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, partial / name)
        if model is not None:
            config = configuration(model)
            _write_tokenizer(partial, parts[0])
            (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        with suppress(FileExistsError):  # another process was faster
            partial.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_tokenizer(folder: Path, file: Path) -> None:
    """Write the tokenizer of a file, if transformers can convert it. Otherwise the folder has none."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
        tokenizer.save_pretrained(folder)
    except Exception:  # transformers raises several kinds for vocabularies that it does not convert
        return
    finally:
        transformers.logging.set_verbosity(verbosity)

"""Resolves a path or a Hugging Face Hub id to a model directory.

A Hub model is downloaded into the Hub's own cache, or found there; its files are links to the cache's blobs. Only the
files that moepack reads are downloaded: safetensors, configuration and tokenizer, but no copy of the weights in another
format. PyTorch pickles are downloaded if there are no safetensors.
"""

import importlib
import re
from contextlib import suppress
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from moepack.checkpoint.companion import companion, is_file
from moepack.checkpoint.gguf.files import SUFFIX
from moepack.errors import CheckpointError, DownloadError
from moepack.format.hub import CONFIG
from moepack.format.weights import pickle_files, weight_files

__all__ = ["configured", "hub_failures", "hub_id", "hub_reason", "resolve_model", "small_files"]

_TEMPLATES = "*.jinja"
_WEIGHTS = "*.safetensors"

WANTED = (
    *(_WEIGHTS, "*.json", "*.model", "*.model.*", "*.txt", "*.tiktoken", "*.bpe", "*.spm", "*.vocab"),
    *(_TEMPLATES, "*.py", "*.md", "LICENSE*", "NOTICE*", "USE_POLICY*", "USAGE_POLICY*"),
)
"""Patterns of files to download: weights, configuration, tokenizer, and small files copied to the packed directory.

Code that some tokenizers need is copied and never run.
"""

UNWANTED = (
    *(f"*/{pattern}" for pattern in WANTED if pattern != _TEMPLATES),
    *("consolidated*", "*.bin.index.json"),
)
"""Patterns of files to skip: folders hold other formats, except templates (`additional_chat_templates/`), and
`consolidated` files repeat the weights under other names."""

_PICKLES = ("pytorch_model*.bin", "pytorch_model.bin.index.json")

_HUB_FILE = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[^/]+))?/(?P<file>.+\.gguf)", re.ASCII
)

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(.+))?", re.ASCII)


def resolve_model(model: str | PathLike[str]) -> Path:
    """Return the directory of a model.

    Args:
        model: a directory, a file of weights, a Hub id `ORGANIZATION/NAME` or `ORGANIZATION/NAME@REVISION` (branch,
            tag or commit), or a GGUF file of the Hub, `ORGANIZATION/NAME/FILE.gguf`. An existing path takes precedence.
            Any other value is returned unchanged; opening it reports the error.

    Raises:
        CheckpointError: `model` is the root of a model's Hub cache, or a damaged GGUF file.
        UnsupportedModelError: a GGUF file of an architecture that is not supported.
        DownloadError: the Hub has no such model or revision, denies access, or cannot be reached and the cache does not
            hold the model.
    """
    found = hub_id(model)
    if found is None:
        path = _file(model)
        return Path(model) if path is None else companion(path)
    snapshot = _fetched(*found, WANTED)
    if weight_files(snapshot):
        return snapshot
    if (snapshot / CONFIG).is_file():
        snapshot = _fetched(*found, (*WANTED, *_PICKLES), UNWANTED[:-1])
    _refuse_gguf_only(snapshot, *found)
    return snapshot


def configured(model: str | PathLike[str], config: Path | None) -> str | PathLike[str]:
    """Return the model directory of a file of weights with the configuration and tokenizer of a folder.

    Without a folder, the model is returned unchanged.

    Raises:
        ValueError: the model is not a file.
        CheckpointError, UnsupportedModelError, DownloadError: as for `resolve_model`.
    """
    if config is None:
        return model
    path = _file(model)
    if path is None:
        raise ValueError("--config applies to files of weights; directories and models of the Hub have a config.json")
    return companion(path, config)


def _file(model: str | PathLike[str]) -> Path | None:
    """Return a file of weights, or the folder of a GGUF model; None for any other model.

    All parts of a GGUF file of the Hub are downloaded. The small files of its repository come along, because they may
    have a configuration.
    """
    given = fspath(model)
    if is_file(Path(given)):
        return Path(given)
    found = None if Path(given).exists() else _HUB_FILE.fullmatch(given)
    if found is None:
        return None
    parts = re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-*-of-\1.gguf", found["file"])
    small = [pattern for pattern in WANTED if pattern != _WEIGHTS]
    file = _fetched(found["name"], found["revision"], (*small, parts)) / found["file"]
    if not file.is_file():
        raise DownloadError(f"the model '{found['name']}' of the Hub has no such file", file=given)
    return file


def _refuse_gguf_only(snapshot: Path, name: str, revision: str | None) -> None:
    """Reject a repository whose only weights are GGUF files, and list them."""
    import huggingface_hub

    if weight_files(snapshot) or pickle_files(snapshot):
        return
    try:
        files = huggingface_hub.list_repo_files(name, revision=revision)
    except hub_failures():
        return
    if found := [file for file in files if file.endswith(SUFFIX)]:
        shown = ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
        title = name if revision is None else f"{name}@{revision}"
        message = f"has no weights but GGUF files ({shown}); name one of them, such as {title}/{found[0]}"
        raise CheckpointError(message, file=name)


def hub_id(model: str | PathLike[str]) -> tuple[str, str | None] | None:
    """Return the name and the revision of a model on the Hub; None for any other value, which is a path.

    Raises:
        CheckpointError: `model` is the root of a model's Hub cache.
    """
    given = fspath(model)
    _refuse_cache(Path(given))
    found = None if Path(given).exists() or given.endswith(SUFFIX) else _HUB_ID.fullmatch(given)
    return None if found is None else (found[1], found[2])


def small_files(name: str, revision: str | None, *more: str) -> Path:
    """Return the snapshot of a Hub model with all files but the weights; errors as for `resolve_model`.

    Args:
        name, revision: the model.
        more: further files, which are otherwise left out.
    """
    utils: Any = importlib.import_module("huggingface_hub.utils")
    shown = not utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        small = tuple(pattern for pattern in WANTED if pattern != _WEIGHTS)
        return _fetched(name, revision, (*small, *more), UNWANTED[:-1] if more else UNWANTED)
    finally:
        if shown:
            utils.enable_progress_bars()


def _refuse_cache(path: Path) -> None:
    """Reject the cache folder of a Hub model, which is easily mistaken for one of the snapshots in it."""
    if (path / "snapshots").is_dir() and not (path / "config.json").exists():
        found = sorted(str(each) for each in (path / "snapshots").iterdir())
        holds = f"give one of its snapshots: {', '.join(found)}" if found else "it holds no snapshot"
        raise CheckpointError(f"is the Hub cache of a model, not a model; {holds}", file=path)


def _fetched(name: str, revision: str | None, wanted: tuple[str, ...], unwanted: tuple[str, ...] = UNWANTED) -> Path:
    """Return the snapshot of a Hub model in the Hub's cache, with the files that match the patterns."""
    import huggingface_hub

    try:
        snapshot = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(wanted), ignore_patterns=list(unwanted)
        )
    except hub_failures() as error:
        of = "" if revision is None else f" at revision '{revision}'"
        message = f"neither a directory nor a model{of} that can be downloaded from the Hub: {hub_reason(error)}"
        raise DownloadError(message, file=name) from error
    return Path(snapshot)


def hub_reason(error: Exception) -> str:
    """Return the reason of an error of huggingface_hub in a few words, because its own messages have many lines."""
    unreachable = "the Hub cannot be reached, or HF_HUB_OFFLINE is set, and the cache"
    reasons = {
        "GatedRepoError": "it is gated; request access and log in (`hf auth login`)",
        "RepositoryNotFoundError": "it does not exist or is private (`hf auth login`)",
        "RevisionNotFoundError": "there is no such revision",
        "LocalEntryNotFoundError": f"{unreachable} does not hold it",
        "IncompleteSnapshotError": f"{unreachable} holds only part of it",
    }
    return reasons.get(type(error).__name__) or next(iter(str(error).splitlines()), type(error).__name__)


def hub_failures() -> tuple[type[Exception], ...]:
    """Return the exceptions of a failed request. The package of huggingface_hub's client depends on its version."""
    found: list[type[Exception]] = [OSError, ValueError]
    for name in ("httpx2", "httpx"):
        with suppress(ImportError):
            found.append(importlib.import_module(name).HTTPError)
    return tuple(found)

"""Resolves a path or a Hugging Face Hub id to a model directory.

A Hub model is downloaded into the Hub's own cache, or found there; its files are links to the cache's blobs. Only the
files that moepack reads are downloaded: safetensors, configuration and tokenizer, but no copy of the weights in another
format. PyTorch pickles are downloaded if there are no safetensors.
"""

import importlib
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from moepack.checkpoint.companion import companion, is_file
from moepack.checkpoint.gguf.files import gguf_models, is_kind
from moepack.checkpoint.hub_model import HubModel, hub_model
from moepack.errors import CheckpointError, DownloadError
from moepack.format.hub import CONFIG
from moepack.format.weights import pickle_files, weight_files

__all__ = ["NO_FILE", "chosen_gguf", "configured", "hub_failures", "hub_reason", "resolve_model", "small_files"]

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

NO_FILE = "--config applies to files of weights; directories and models of the Hub have a config.json"
"""Error message for a folder of a configuration that is not needed."""

MOST = 12
"""Maximum number of files in an error message."""


def resolve_model(model: str | PathLike[str]) -> Path:
    """Return the directory of a model.

    Args:
        model: a directory, a file of weights, or the name of a model on the Hub (`hub_model`). An existing path takes
            precedence. Any other value is returned unchanged; opening it reports the error.

    Raises:
        CheckpointError: `model` is the root of a model's Hub cache, a damaged GGUF file, or a repository of several
            GGUF files.
        UnsupportedModelError: a GGUF file of an architecture that is not supported.
        DownloadError: the Hub has no such model or revision, denies access, or cannot be reached and the cache does not
            hold the model.
    """
    found = hub_model(model)
    if found is None or found.is_gguf:
        path = _file(model, found)
        return Path(model) if path is None else companion(path)
    where = found.name, found.revision
    snapshot = _fetched(*where, WANTED)
    if weight_files(snapshot):
        return snapshot
    if (snapshot / CONFIG).is_file():
        snapshot = _fetched(*where, (*WANTED, *_PICKLES), UNWANTED[:-1])
    if weight_files(snapshot) or pickle_files(snapshot) or not gguf_models(names := _names(found, snapshot)):
        return snapshot
    return companion(_fetched_gguf(found, chosen_gguf(found, names)))


def configured(model: str | PathLike[str], config: Path | None) -> str | PathLike[str]:
    """Return the model directory of a file of weights with the configuration and tokenizer of a folder.

    Without a folder, the model is returned unchanged.

    Raises:
        ValueError: the model is not a file.
        CheckpointError, UnsupportedModelError, DownloadError: as for `resolve_model`.
    """
    if config is None:
        return model
    path = _file(model, hub_model(model))
    if path is None:
        raise ValueError(NO_FILE)
    return companion(path, config)


def _file(model: str | PathLike[str], found: HubModel | None) -> Path | None:
    """Return a file of weights, or the folder of a GGUF model; None for any other model."""
    if found is None:
        return Path(model) if is_file(Path(model)) else None
    if found.file is not None:
        return _fetched_gguf(found, [found.file])
    names = _names(found)
    return _fetched_gguf(found, chosen_gguf(found, names)) if found.is_gguf or gguf_models(names) else None


def _fetched_gguf(found: HubModel, names: Sequence[str]) -> Path:
    """Return a GGUF file of the Hub after downloading all its parts.

    The small files of its repository come along, because they may have a configuration.
    """
    parts = re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-*-of-\1.gguf", names[0])
    small = [pattern for pattern in WANTED if pattern != _WEIGHTS]
    file = _fetched(found.name, found.revision, (*small, parts)) / names[0]
    if not file.is_file():
        raise _no_such_file(found, names[0])
    return file


def _no_such_file(found: HubModel, name: str) -> DownloadError:
    return DownloadError(f"the model '{found.name}' of the Hub has no such file", file=f"{found.repository}/{name}")


def _names(found: HubModel, snapshot: Path | None = None) -> Sequence[str]:
    """Return the names of the files of a repository, or of those in a snapshot if the Hub cannot be reached."""
    import huggingface_hub

    try:
        return huggingface_hub.HfApi().list_repo_files(found.name, revision=found.revision)
    except hub_failures():
        folder = snapshot or _fetched(found.name, found.revision, (CONFIG,))
        return [file.relative_to(folder).as_posix() for file in folder.rglob("*")]


def chosen_gguf(found: HubModel, names: Iterable[str]) -> Sequence[str]:
    """Return the names of the parts of the GGUF model that a name means, in order.

    Args:
        found: the name.
        names: the names of the files of the repository.

    Raises:
        DownloadError: the repository has no such file, or lacks a part of it.
        CheckpointError: several files, or none, have the quantization; or there are several files and none is named.
    """
    names = list(names)
    models = gguf_models(names)
    if found.file is not None:
        fitting = [parts for parts in models if found.file in parts]
        if not fitting:
            raise _no_such_file(found, found.file)
    else:
        fitting = [parts for parts in models if found.kind is None or is_kind(parts[0], found.kind)]
    if len(fitting) != 1:
        has = "has no weights but GGUF files" if found.kind is None else f"has no GGUF file of '{found.kind}'"
        if found.kind is not None and fitting:
            has = f"has several GGUF files of '{found.kind}'"
        listed = [parts[0] for parts in fitting or models]
        shown = ", ".join(listed[:MOST]) + (f" and {len(listed) - MOST} more" if len(listed) > MOST else "")
        message = f"{has} ({shown}); name one of them, such as {found.repository}/{listed[0]}"
        raise CheckpointError(message if listed else f"{has}, nor any other", file=found.name)
    if missing := [name for name in fitting[0] if name not in names]:
        raise _no_such_file(found, missing[0])
    return fitting[0]


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

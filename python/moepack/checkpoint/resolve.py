"""From what a user calls a model to its directory: a path, or the id of a model on the Hugging Face hub.

A model of the hub is fetched into the hub's own cache, or found there; its files are links to the cache's blobs. Only
what moepack reads is fetched: safetensors, configuration and tokenizer, no second copy of the weights in another
format.
"""

import re
from os import PathLike, fspath
from pathlib import Path

from moepack.errors import CheckpointError

__all__ = ["resolve_model"]

_TEMPLATES = "*.jinja"

WANTED = (
    *("*.safetensors", "*.json", "*.model", "*.model.*", "*.txt", "*.tiktoken", "*.bpe", "*.spm", "*.vocab"),
    *(_TEMPLATES, "*.py", "*.md", "LICENSE*", "NOTICE*", "USE_POLICY*", "USAGE_POLICY*"),
)
"""Files to be fetched: weights, configuration and tokenizer, and the small ones that a packed directory takes over.
Code, which some tokenizers are loaded with, is copied and never run."""

UNWANTED = (
    *(f"*/{pattern}" for pattern in WANTED if pattern != _TEMPLATES),
    *("consolidated*", "*.bin.index.json"),
)
"""Files to be left: folders hold other formats, templates (`additional_chat_templates/`) excepted, and `consolidated`
files repeat the weights under other names."""

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(.+))?", re.ASCII)


def resolve_model(model: str | PathLike[str]) -> Path:
    """Return the directory of a model.

    Args:
        model: a directory; or `ORGANIZATION/NAME` of a model on the hub, a revision (branch, tag or commit) behind
            `@`. An existing path wins over an id. Anything that is neither comes back as it is, for whoever opens
            it to say what is wrong with it.

    Raises:
        CheckpointError: it is the root of a model's cache; or the hub has no such model or revision, refuses it, or
            cannot be reached and the cache does not hold it.
    """
    given = fspath(model)
    _refuse_cache(Path(given))
    found = None if Path(given).exists() else _HUB_ID.fullmatch(given)
    return Path(given) if found is None else _fetched(found[1], found[2])


def _refuse_cache(path: Path) -> None:
    """The hub keeps snapshots of a model below a folder of its own, which is easily taken for the model."""
    if (path / "snapshots").is_dir() and not (path / "config.json").exists():
        found = sorted(str(each) for each in (path / "snapshots").iterdir())
        holds = f"give one of its snapshots: {', '.join(found)}" if found else "it holds no snapshot"
        raise CheckpointError(f"is the hub's cache of a model and no model; {holds}", file=path)


def _fetched(name: str, revision: str | None) -> Path:
    """The snapshot of a model of the hub in the hub's cache."""
    import huggingface_hub

    try:
        snapshot = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED)
        )
    except (OSError, ValueError) as error:
        of = "" if revision is None else f" at the revision '{revision}'"
        message = f"there is no such directory, and the hub gives no model '{name}'{of}: {_reason(error)}"
        raise CheckpointError(message, file=name) from error
    return Path(snapshot)


def _reason(error: Exception) -> str:
    """What went wrong, in a few words: the hub's own messages have many lines."""
    unreachable = "the hub cannot be reached, or HF_HUB_OFFLINE is set, and the cache"
    reasons = {
        "GatedRepoError": "access to it must be granted first (`hf auth login`)",
        "RepositoryNotFoundError": "it does not exist or is private (`hf auth login`)",
        "RevisionNotFoundError": "there is no such revision",
        "LocalEntryNotFoundError": f"{unreachable} does not hold it",
        "IncompleteSnapshotError": f"{unreachable} holds only a part of it",
    }
    return reasons.get(type(error).__name__) or next(iter(str(error).splitlines()), type(error).__name__)

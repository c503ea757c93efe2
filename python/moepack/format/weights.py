"""Finds the weight files of a model directory: exactly the files that transformers opens.

These are the file named in config.json (`transformers_weights`); otherwise `model.safetensors` if it exists; otherwise
the shards listed in `model.safetensors.index.json`. All other files are ignored: weights in other formats, shards of an
earlier save, optimizer states, git-lfs pointers. All commands use this module, so they accept the same directories.

Invariant: returned names are plain file names inside the directory.
"""

from collections.abc import Callable
from pathlib import Path

from moepack.errors import CheckpointError, MoepackError
from moepack.format.hub import CONFIG, INDEX
from moepack.format.regular import read_json
from moepack.system.names import is_usable

__all__ = ["NAMED", "PICKLE", "pickle_files", "weight_files"]

NAMED = "transformers_weights"
"""The config.json key for the name of the weight file or its index."""

_SINGLE = "model.safetensors"
_SUFFIX = ".safetensors"

PICKLE = "pytorch_model.bin"
"""Name of a model's weights as a PyTorch pickle. Its shards and their index derive from it."""


def weight_files(
    directory: Path, error: type[MoepackError] = CheckpointError, present: Callable[[str], bool] | None = None
) -> dict[str, tuple[str, ...]]:
    """Return the weight files of a model in sorted order, each with the tensors that the index lists for it.

    The result is empty if no weights are stored as safetensors. Without an index, no tensors are listed.

    Args:
        directory: a model directory, packed or not.
        error: the exception class to raise.
        present: returns whether the model has a file of this name; None looks into the directory.

    Raises:
        error: the index is damaged, or it or config.json names a file that is missing or not a plain file name.
    """
    has = present or (lambda name: (directory / name).is_file())
    name = _named(directory, error, has) or (_SINGLE if has(_SINGLE) else INDEX)
    if name.endswith(_SUFFIX):
        return {name: ()}
    return _shards(directory / name, _SUFFIX, error, has)


def pickle_files(
    directory: Path, error: type[MoepackError] = CheckpointError, present: Callable[[str], bool] | None = None
) -> dict[str, tuple[str, ...]]:
    """Return the PyTorch pickles of a model, as `weight_files` does. They count only if that function finds none."""
    has = present or (lambda name: (directory / name).is_file())
    return {PICKLE: ()} if has(PICKLE) else _shards(directory / f"{PICKLE}.index.json", ".bin", error, has)


def _shards(
    index: Path, suffix: str, error: type[MoepackError], has: Callable[[str], bool]
) -> dict[str, tuple[str, ...]]:
    """Return the shards of an index in sorted order with their tensors; empty if there is no index."""
    if not index.exists():
        return {}
    found = read_json(index, error).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise error("has no weight_map", file=index)
    files: dict[str, list[str]] = {}
    for tensor, shard in found.items():
        _check_name(shard, suffix, index, tensor, error)
        files.setdefault(shard, []).append(tensor)
    for shard, tensors in files.items():
        if not has(shard):
            raise error(f"the shard {shard} does not exist", file=index, tensor=tensors[0])
    return {shard: tuple(files[shard]) for shard in sorted(files)}


def _check_name(shard: object, suffix: str, index: Path, tensor: str, error: type[MoepackError]) -> None:
    """Check that a shard is a plain file name, so that an index cannot make moepack open other files."""
    if not isinstance(shard, str) or not shard.endswith(suffix):
        raise error(f"the shard {shard!r} is not a {suffix.lstrip('.')} file", file=index, tensor=tensor)
    if not _is_plain(shard):
        raise error(f"the shard {shard!r} is not a plain file name in the directory", file=index, tensor=tensor)


def _is_plain(name: str) -> bool:
    """Return whether a name is that of a file in the directory itself, on this system."""
    return not set(name) & set("/\\\0") and is_usable(name)


def _named(directory: Path, error: type[MoepackError], has: Callable[[str], bool]) -> str:
    """Return the file named in config.json, or an empty string."""
    config = directory / CONFIG
    found = read_json(config, error).get(NAMED) if config.is_file() else None
    if found is None:
        return ""
    ends = (_SUFFIX, f"{_SUFFIX}.index.json")
    if not isinstance(found, str) or not found.endswith(ends) or not _is_plain(found):
        raise error(f"{NAMED} is {found!r}, not the name of a safetensors file or of its index", file=config)
    if not has(found):
        raise error(f"{NAMED} names {found}, which does not exist", file=config)
    return found

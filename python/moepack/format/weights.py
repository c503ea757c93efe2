"""The files of a model directory that hold its weights: exactly the files that transformers opens.

The file that config.json names (`transformers_weights`); otherwise `model.safetensors` if it is there; otherwise the
shards that `model.safetensors.index.json` names. Every other file,
whatever its name or content, is left alone by whoever reads the model: weights in another format, shards of an earlier
save, the state of an optimizer, a pointer that git-lfs left. All commands ask here, so that one does not refuse a
directory which another accepts.

Invariant: a name that comes from here is a plain file name inside the directory.
"""

from pathlib import Path

from moepack.errors import CheckpointError, MoepackError
from moepack.format.hub import CONFIG, INDEX
from moepack.format.regular import read_json

__all__ = ["NAMED", "weight_files"]

NAMED = "transformers_weights"
"""config.json's key for the name of the file of weights, or of its index."""

_SINGLE = "model.safetensors"
_SUFFIX = ".safetensors"


def weight_files(directory: Path, error: type[MoepackError] = CheckpointError) -> dict[str, tuple[str, ...]]:
    """The files that hold a model's weights, in sorted order, each with the tensors that the index expects in it.

    Empty if no weights are stored as safetensors; no tensors are listed where there is no index.

    Args:
        directory: a model directory, packed or not.
        error: the class to raise.

    Raises:
        error: the index is damaged, or it or config.json names a file that is missing or not a plain file name.
    """
    name = _named(directory, error) or (_SINGLE if (directory / _SINGLE).is_file() else INDEX)
    if name.endswith(_SUFFIX):
        return {name: ()}
    index = directory / name
    if not index.exists():
        return {}
    found = read_json(index, error).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise error("has no weight_map", file=index)
    files: dict[str, list[str]] = {}
    for tensor, shard in found.items():
        _check_name(shard, index, tensor, error)
        files.setdefault(shard, []).append(tensor)
    for shard, tensors in files.items():
        if not (directory / shard).is_file():
            raise error(f"the shard {shard} does not exist", file=index, tensor=tensors[0])
    return {shard: tuple(files[shard]) for shard in sorted(files)}


def _check_name(shard: object, index: Path, tensor: str, error: type[MoepackError]) -> None:
    """A shard is a plain file name: whoever wrote the index must not choose which files of this machine are opened."""
    if not isinstance(shard, str) or not shard.endswith(_SUFFIX):
        raise error(f"the shard {shard!r} is not a safetensors file", file=index, tensor=tensor)
    if any(mark in shard for mark in "/\\\0"):
        raise error(f"the shard {shard!r} is not a plain file name in the directory", file=index, tensor=tensor)


def _named(directory: Path, error: type[MoepackError]) -> str:
    """The file that config.json names; empty where it names none."""
    config = directory / CONFIG
    found = read_json(config, error).get(NAMED) if config.is_file() else None
    if found is None:
        return ""
    ends = (_SUFFIX, f"{_SUFFIX}.index.json")
    if not isinstance(found, str) or not found.endswith(ends) or set(found) & set("/\\\0"):
        raise error(f"{NAMED} is {found!r}, not the name of a safetensors file or of its index", file=config)
    if not (directory / found).is_file():
        raise error(f"{NAMED} names {found}, which does not exist", file=config)
    return found

"""Which files of a model directory hold its weights: those that transformers opens, and no others.

`model.safetensors` if it is there, otherwise the shards that `model.safetensors.index.json` names. Every other file,
whatever its name or content, is left alone by whoever reads the model: weights in another format, shards of an earlier
save, the state of an optimizer, a pointer that git-lfs left. All commands ask here, so that one does not refuse a
directory which another accepts.

Invariant: a name that comes from here is a plain file name inside the directory.
"""

from pathlib import Path

from moepack.errors import CheckpointError, MoepackError
from moepack.format.hub import INDEX
from moepack.format.regular import read_json

__all__ = ["weight_files"]

_SINGLE = "model.safetensors"


def weight_files(directory: Path, error: type[MoepackError] = CheckpointError) -> dict[str, tuple[str, ...]]:
    """The files that hold a model's weights, in sorted order, each with the tensors that the index expects in it.

    Empty if no weights are stored as safetensors; no tensors are listed where there is no index.

    Args:
        directory: a model directory, packed or not.
        error: the class to raise.

    Raises:
        error: the index is damaged, or names a file that is missing or not a plain file name.
    """
    if (directory / _SINGLE).is_file():
        return {_SINGLE: ()}
    index = directory / INDEX
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
    if not isinstance(shard, str) or not shard.endswith(".safetensors"):
        raise error(f"the shard {shard!r} is not a safetensors file", file=index, tensor=tensor)
    if any(mark in shard for mark in "/\\\0"):
        raise error(f"the shard {shard!r} points outside the directory", file=index, tensor=tensor)

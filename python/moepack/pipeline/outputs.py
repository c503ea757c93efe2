"""The output files of `compress`, planned before anything is written: shards, copies and their disk space.

Shards depend only on the checkpoint and on which linear layers the methods pack. A resumed job therefore plans the
same shards under the same names.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moepack.calibration import check_source
from moepack.calibration.stage import PackedLayer, layer_tensors
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.errors import CheckpointError, MoepackWarning
from moepack.format.hub import ADAPTER, CONFIG, INDEX, shard_name
from moepack.format.manifest import MANIFEST
from moepack.format.regular import IS_POINTER, is_pointer, leads_out
from moepack.format.side import is_small, may_hold_weights, side_names
from moepack.methods import Method
from moepack.pipeline.assignment import Assignment, PlannedAssignment
from moepack.pipeline.journal import JOURNAL

DENSE_SHARD = 2 << 30
"""Size in bytes at which a shard of dense tensors is closed."""


_OWN = (CONFIG, INDEX, MANIFEST, JOURNAL, ADAPTER)
"""Source files that are not copied: the packed directory has its own version, or must not contain the file. If an
adapter's configuration were copied, transformers would look for the adapter's weights in the packed directory."""


@dataclass(frozen=True)
class Shard:
    """A safetensors file to write: the packed tensors of `layer`, or the dense tensors `names`."""

    file: str
    layer: PackedLayer | None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outputs:
    """The output files of a job.

    Attributes:
        shards: in processing order: layers in execution order, the linear layers of a block before its experts, then
            dense tensors.
        copies: small source files to copy, as paths relative to the source directory.
        skipped: names in the source directory that are not copied.
        assignment: the method of each tensor, with or without the methods' plans.
    """

    shards: tuple[Shard, ...]
    copies: tuple[str, ...]
    skipped: tuple[str, ...]
    assignment: Assignment | PlannedAssignment


def check_text(method: Method) -> None:
    """Check that the calibration text exists before weights are read; raises CalibrationError."""
    if source := getattr(method, "calibration", None):
        check_source(source)


def plan_outputs(checkpoint: Checkpoint, model: MoeModel, assignment: Assignment | PlannedAssignment) -> Outputs:
    """Return the output files of a job.

    Raises:
        CheckpointError: the directory cannot be listed.
        ValueError: the assignment is inconsistent or does not fit the model.
    """
    layers = assignment.layers(model)
    packed = {name for layer in layers for weights in layer_tensors(layer).values() for name in weights.sources}
    groups = [*_dense_groups(checkpoint, (name for name in model.dense_names if name not in packed))]
    count = len(layers) + len(groups)
    shards = [Shard(shard_name(i, count), layer) for i, layer in enumerate(layers, 1)]
    first = len(shards) + 1
    shards += [Shard(shard_name(i, count), None, names) for i, names in enumerate(groups, first)]
    copies, skipped = _small_files(checkpoint.path)
    return Outputs(tuple(shards), copies, skipped, assignment)


def _dense_groups(checkpoint: Checkpoint, names: Iterable[str]) -> Iterable[tuple[str, ...]]:
    group: list[str] = []
    nbytes = 0
    for name in names:
        more = checkpoint.info(name).nbytes
        if group and nbytes + more > DENSE_SHARD:
            yield tuple(group)
            group, nbytes = [], 0
        group.append(name)
        nbytes += more
    if group:
        yield tuple(group)


def _small_files(source: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split the source's entries into small files to copy (tokenizer, templates, license, ...) and skipped entries.

    Weights, their indices, config.json (which is rewritten) and hidden files are in neither list. A link that leaves
    the directory is skipped with a warning, so that the model's author cannot choose which files of this machine are
    copied. A git-lfs pointer is skipped as well, because a tokenizer that is only a pointer would fail much later.
    """
    copies: list[str] = []
    skipped: list[str] = []
    try:
        for entry in sorted(source.iterdir()):
            if entry.name in _OWN or entry.name.startswith(".") or may_hold_weights(entry.name):
                continue
            outside = leads_out(entry)
            if outside and (is_small(entry) or entry.is_dir()):
                message = f"{entry}: links out of the model's directory, to {entry.resolve()}; it is not copied"
                warnings.warn(message, MoepackWarning, stacklevel=3)
            names = [] if outside else [name for name in side_names(entry) if not _is_pointer(source / name)]
            copies += names
            skipped += [] if names else [entry.name]
    except OSError as error:
        raise CheckpointError(f"cannot be listed: {error.strerror}", file=source) from error
    return tuple(copies), tuple(skipped)


def _is_pointer(file: Path) -> bool:
    """Return whether a file is a git-lfs pointer, and warn if so. Unreadable files are reported when copied."""
    try:
        if not is_pointer(file):
            return False
    except OSError:
        return False
    warnings.warn(f"{file}: not copied, because it {IS_POINTER}", MoepackWarning, stacklevel=4)
    return True


def space_bound(outputs: Outputs, checkpoint: Checkpoint, done: Iterable[str], goal: int | None) -> int:
    """Return the maximum number of bytes of the copies and of all shards not in `done`.

    A requested size `goal` bounds all shards together.
    """
    finished = set(done)
    total = 0
    for shard in outputs.shards:
        if shard.file in finished:
            continue
        if shard.layer is not None:
            total += outputs.assignment.bound(shard.layer)
        total += sum(checkpoint.info(name).nbytes for name in shard.names)
    copies = sum((checkpoint.path / name).stat().st_size for name in outputs.copies)
    headers = 1 << 20  # headers, config, index and manifest of any model with few tensors
    return min(total, goal or total) + copies + headers + 1024 * len(list(checkpoint.names()))

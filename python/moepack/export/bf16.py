"""An ordinary checkpoint with the values that the packed weights stand for, rounded to bfloat16."""

from collections.abc import Callable, Iterable, Iterator, Set
from functools import partial
from pathlib import Path

import torch

from moepack.export.directory import ModelWriter, dense_entries, tensor_entry
from moepack.export.names import Experts, experts_of
from moepack.format.directory import PackedDirectory
from moepack.format.shard import Entry
from moepack.integrations.decoding import projection_values

__all__ = ["export_bf16", "plain_shards"]


def export_bf16(directory: Path, out: Path) -> int:
    """Dequantize any packed directory; arguments and errors as for `export`.

    The tensors that were not packed keep their dtype; tied weights stay tied.
    """
    source = PackedDirectory.open(directory)
    shards = plain_shards(source)
    with ModelWriter(source, out, len(shards)) as writer:
        for shard in shards:
            writer.shard([*shard()])
        return writer.finish(None)


def plain_shards(source: PackedDirectory, without: Set[str] = frozenset()) -> list[Callable[[], Iterable[Entry]]]:
    """Return what makes the tensors of each shard of the ordinary checkpoint, decoded when they are asked for.

    Args:
        source: the packed directory.
        without: packed tensors that are left out.

    Raises:
        CorruptionError, UnsupportedModelError: as for `experts_of`.
    """
    shards: list[Callable[[], Iterable[Entry]]] = []
    for layer in experts_of(source):
        if without.isdisjoint(layer.packed.values()):
            shards += [partial(_expert_entries, source, layer, projections) for projections in layer.files()]
    for names in _linears(source):
        if left := [name for name in names if name not in without]:
            shards.append(partial(_linear_entries, source, left))
    return shards + [partial(iter, entries) for entries in dense_entries(source)]


def _linear_entries(source: PackedDirectory, names: list[str]) -> Iterator[Entry]:
    return (tensor_entry(name, _values(source, name)[0]) for name in names)


def _linears(source: PackedDirectory) -> list[list[str]]:
    """Names of the packed linear layers, shard by shard."""
    files: dict[str, list[str]] = {}
    for name, record in source.manifest.packed().items():
        if not record.experts:
            files.setdefault(record.file, []).append(name)
    return [*files.values()]


def _expert_entries(source: PackedDirectory, layer: Experts, projections: tuple[str, ...]) -> Iterator[Entry]:
    """One tensor for each expert, or one that stacks them (gate above up, or as transformers' module holds them)."""
    if layer.form is not None:
        values = {projection: _projection(source, layer, projection) for projection in projections}
        shape = layer.shapes[layer.form.places[projections[0]].parameter]
        yield tensor_entry(layer.name(projections[0], 0), layer.form.joined(values, shape))
        return
    if not layer.layout.stacked:
        (projection,) = projections
        for expert, matrix in enumerate(_projection(source, layer, projection)):
            yield tensor_entry(layer.name(projection, expert), matrix)
        return
    parts = [_projection(source, layer, projection) for projection in projections]
    yield tensor_entry(layer.name(projections[0], 0), torch.cat(parts, dim=1))


def _projection(source: PackedDirectory, layer: Experts, projection: str) -> torch.Tensor:
    """The values of a projection, `[E, R, C]` bfloat16."""
    return projection_values(lambda name: _values(source, layer.packed[name]), layer.packed, projection).bfloat16()


def _values(source: PackedDirectory, name: str) -> torch.Tensor:
    """The values of a packed tensor, `[E, R, C]` float32."""
    return torch.from_numpy(source.blob(name).dequantize())

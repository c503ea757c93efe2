"""An ordinary checkpoint with the values that the packed weights stand for, rounded to bfloat16."""

from collections.abc import Iterator
from pathlib import Path

import torch

from moepack.export.directory import ModelWriter, dense_entries, tensor_entry
from moepack.export.names import Experts, experts_of
from moepack.format.directory import PackedDirectory
from moepack.format.shard import Entry

__all__ = ["export_bf16"]


def export_bf16(directory: Path, out: Path) -> int:
    """Dequantize any packed directory; arguments and errors as for `export`.

    The tensors that were not packed keep their dtype; tied weights stay tied.
    """
    source = PackedDirectory.open(directory)
    layers = experts_of(source.manifest)
    linears = _linears(source)
    dense = [*dense_entries(source)]
    shards = sum(len([*layer.files()]) for layer in layers) + len(linears) + len(dense)
    with ModelWriter(source, out, shards) as writer:
        for layer in layers:
            for projections in layer.files():
                writer.shard([*_expert_entries(source, layer, projections)])
        for names in linears:
            writer.shard([tensor_entry(name, _values(source, name)[0]) for name in names])
        for entries in dense:
            writer.shard(entries)
        return writer.finish(None)


def _linears(source: PackedDirectory) -> list[list[str]]:
    """Names of the packed linear layers, shard by shard."""
    files: dict[str, list[str]] = {}
    for name, record in source.manifest.packed().items():
        if not record.experts:
            files.setdefault(record.file, []).append(name)
    return [*files.values()]


def _expert_entries(source: PackedDirectory, layer: Experts, projections: tuple[str, ...]) -> Iterator[Entry]:
    """One tensor for each expert, or one that stacks them (gate above up)."""
    if not layer.layout.stacked:
        (projection,) = projections
        for expert, matrix in enumerate(_values(source, layer.packed[projection])):
            yield tensor_entry(layer.name(projection, expert), matrix)
        return
    parts = [_values(source, layer.packed[projection]) for projection in projections]
    yield tensor_entry(layer.name(projections[0], 0), torch.cat(parts, dim=1))


def _values(source: PackedDirectory, name: str) -> torch.Tensor:
    """The values of a packed tensor, `[E, R, C]` bfloat16."""
    return torch.from_numpy(source.blob(name).dequantize("bfloat16")).view(torch.bfloat16)

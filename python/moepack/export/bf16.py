"""Exports an ordinary checkpoint with the decoded weights, rounded to bfloat16."""

from collections.abc import Callable, Iterable, Iterator, Set
from functools import partial
from pathlib import Path

import torch

from moepack.export.directory import ModelWriter, dense_entries, entry_tensor, tensor_entry
from moepack.export.merging import Adapter
from moepack.export.names import Experts, experts_of
from moepack.format.balance import SAME, Balance, balance_of
from moepack.format.directory import PackedDirectory
from moepack.format.shard import Entry
from moepack.integrations.decoding import projection_values

__all__ = ["export_bf16", "plain_shards"]


def export_bf16(directory: Path, out: Path, adapter: Path | None = None) -> int:
    """Dequantize any packed directory. Arguments and errors as for `export`.

    Tensors that are not packed keep their dtype. Tied weights stay tied. All weights are in the scales of the model's
    source, so that its adapters fit.
    """
    source = PackedDirectory.open(directory)
    merged = None if adapter is None else Adapter(source, adapter)
    shards = plain_shards(source, adapter=merged, balance=balance_of(directory), rounds=True)
    with ModelWriter.open(source, out, len(shards)) as writer:
        for shard in shards:
            writer.shard([*shard()])
        if merged is not None:
            merged.finish()
        return writer.finish(None)


def plain_shards(
    source: PackedDirectory,
    without: Set[str] = frozenset(),
    adapter: Adapter | None = None,
    balance: Balance = SAME,
    rounds: bool = False,
) -> list[Callable[[], Iterable[Entry]]]:
    """Return a function per shard of the ordinary checkpoint that decodes the tensors of the shard.

    Args:
        source: the packed directory.
        without: packed tensors to omit.
        adapter: adapter to merge.
        balance: factors of the directory, to return all weights to the scales of its source; `SAME` keeps the scales.
        rounds: round linear layers and embeddings to bfloat16, as experts are; otherwise they are float32.

    Raises:
        CorruptionError, UnsupportedModelError: as for `experts_of`.
    """
    shards: list[Callable[[], Iterable[Entry]]] = []
    for layer in experts_of(source):
        if without.isdisjoint(layer.packed.values()):
            shards += [
                partial(_expert_entries, source, layer, projections, adapter, balance) for projections in layer.files()
            ]
    for names in _linears(source):
        if left := [name for name in names if name not in without]:
            shards.append(partial(_linear_entries, source, left, adapter, balance, rounds))
    return shards + [partial(_dense_entries, entries, adapter, balance) for entries in dense_entries(source)]


def _linear_entries(
    source: PackedDirectory, names: list[str], adapter: Adapter | None, balance: Balance, rounds: bool
) -> Iterator[Entry]:
    for name in names:
        values = balance.restored(name, _values(source, name)[0])
        if adapter is not None:
            values = adapter.merged(f"{source.manifest.tensors[name].module}.weight", values)
        yield tensor_entry(name, values.bfloat16() if rounds else values)


def _dense_entries(entries: Iterable[Entry], adapter: Adapter | None, balance: Balance) -> Iterator[Entry]:
    """Yield the tensors that are not packed: mapped, unless an adapter or other scales change them."""
    changed = {} if adapter is None else adapter.dense()
    for entry in entries:
        if entry.name not in changed and entry.name not in balance:
            yield entry
            continue
        values = balance.restored(entry.name, entry_tensor(entry))
        if adapter is not None and entry.name in changed:
            values = adapter.merged(changed[entry.name], values)
        yield tensor_entry(entry.name, values)


def _linears(source: PackedDirectory) -> list[list[str]]:
    """Return the names of the packed linear layers, per shard."""
    files: dict[str, list[str]] = {}
    for name, record in source.manifest.packed().items():
        if not record.experts:
            files.setdefault(record.file, []).append(name)
    return [*files.values()]


def _expert_entries(
    source: PackedDirectory, layer: Experts, projections: tuple[str, ...], adapter: Adapter | None, balance: Balance
) -> Iterator[Entry]:
    """Yield one tensor per expert, or one that stacks them (gate above up, or in transformers' layout)."""
    if layer.form is not None:
        values = {projection: _projection(source, layer, projection, adapter, balance) for projection in projections}
        shape = layer.shapes[layer.form.places[projections[0]].parameter]
        yield tensor_entry(layer.name(projections[0], 0), layer.form.joined(values, shape))
        return
    if not layer.layout.stacked:
        (projection,) = projections
        for expert, matrix in enumerate(_projection(source, layer, projection, adapter, balance)):
            yield tensor_entry(layer.name(projection, expert), matrix)
        return
    parts = [_projection(source, layer, projection, adapter, balance) for projection in projections]
    yield tensor_entry(layer.name(projections[0], 0), torch.cat(parts, dim=1))


def _projection(
    source: PackedDirectory, layer: Experts, projection: str, adapter: Adapter | None, balance: Balance
) -> torch.Tensor:
    """Decode a projection to bfloat16, shape (E, R, C)."""
    values = projection_values(lambda name: _values(source, layer.packed[name]), layer.packed, projection)
    values = balance.restored(f"{layer.module}.{projection}", values)
    return (values if adapter is None else adapter.merged_experts(layer.module, projection, values)).bfloat16()


def _values(source: PackedDirectory, name: str) -> torch.Tensor:
    """Decode a packed tensor to float32, shape (E, R, C)."""
    return torch.from_numpy(source.blob(name).dequantize())

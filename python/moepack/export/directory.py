"""Writes a Hugging Face model directory shard by shard, and publishes it with one rename."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch

from moepack.errors import CorruptionError
from moepack.format.atomic import write_inside
from moepack.format.directory import PackedDirectory
from moepack.format.header import DTYPES, read_header
from moepack.format.hub import BALANCE, CONFIG, INDEX, PREDICTORS, shard_name
from moepack.format.manifest import MANIFEST
from moepack.format.shard import DTYPE_NAMES, Entry, write_shard
from moepack.mapping import map_file
from moepack.pipeline.journal import PARTIAL, Workspace

__all__ = ["ModelWriter", "dense_entries", "entry_tensor", "tensor_entry"]


class ModelWriter:
    """Writes a model directory in a working directory. `open` makes one and publishes its directory."""

    def __init__(self, source: PackedDirectory, workspace: Workspace, shards: int) -> None:
        """Write to `workspace` the small files of `source` and `shards` shards."""
        self.source, self.shards, self.written = source, shards, 0
        self._workspace = workspace
        self._weight_map: dict[str, str] = {}
        self._total = 0

    @classmethod
    @contextmanager
    def open(cls, source: PackedDirectory, out: Path, shards: int) -> Iterator[Self]:
        """Start writing `out`, which must not exist. Leaving the context publishes it, or removes it after an error.

        Raises:
            DiskError: the directory cannot be created or published.
            ResumeError: it holds the unfinished work of another command.
        """
        out = Path(os.path.abspath(out))
        with Workspace.fresh(out.with_name(out.name + PARTIAL), "export") as workspace:
            yield cls(source, workspace, shards)
            workspace.publish(out)

    def shard(self, entries: Sequence[Entry]) -> None:
        """Write the next shard."""
        name = shard_name(len(set(self._weight_map.values())) + 1, self.shards)
        self.written += write_shard(self._workspace.path / name, entries, {"format": "pt"}).size
        self._weight_map |= dict.fromkeys((entry.name for entry in entries), name)
        self._total += sum(entry.nbytes for entry in entries)

    def finish(self, quantization: Mapping[str, Any] | None) -> int:
        """Write config.json, the index and the small files; return the total bytes written.

        Args:
            quantization: config.json's `quantization_config`, or None.
        """
        config = {key: value for key, value in self.source.config.items() if key != "quantization_config"}
        if quantization is not None:
            config["quantization_config"] = dict(quantization)
        index = {"metadata": {"total_size": self._total}, "weight_map": self._weight_map}
        files = {CONFIG: _json(config), INDEX: _json(index), **dict(_small_files(self.source))}
        for name, data in files.items():
            write_inside(self._workspace.path, name, data)
            self.written += len(data)
        return self.written


def tensor_entry(name: str, tensor: torch.Tensor) -> Entry:
    """Return an entry for a tensor in memory."""
    flat: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return Entry(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), lambda: memoryview(flat))


def entry_tensor(entry: Entry) -> torch.Tensor:
    """Return a copy of an entry's tensor."""
    return torch.frombuffer(bytearray(entry.data()), dtype=DTYPES[entry.dtype]).view(entry.shape)


def dense_entries(source: PackedDirectory) -> Iterator[list[Entry]]:
    """Yield the mapped tensors that are not packed, one list per shard that holds any."""
    records = source.manifest.tensors
    for file in sorted({record.file for record in records.values() if not record.packed}):
        header = read_header(source.path / file, CorruptionError)
        mapped = map_file(source.path / file)
        entries = []
        for name, record in records.items():
            if record.file == file and not record.packed:
                info = header.tensors[name]
                data = mapped[info.offset : info.offset + info.nbytes]
                entries.append(Entry(name, record.dtype, record.shape, lambda data=data: memoryview(data)))  # type: ignore[misc]
        yield entries


def _small_files(source: PackedDirectory) -> Iterator[tuple[str, bytes]]:
    """Yield the files that the packed directory copied from its source: tokenizer, generation config, model card."""
    tensors = {record.file for record in source.manifest.tensors.values()}
    for name in source.manifest.files:
        path = source.path / name
        if name not in tensors | {BALANCE, CONFIG, INDEX, MANIFEST, PREDICTORS} and path.is_file():
            yield name, path.read_bytes()


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()

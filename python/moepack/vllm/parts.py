"""What a rank of vLLM holds of packed modules: slices of packed tensors, cut from mapped files.

vLLM splits layers at any row and column. Packed tensors can be cut only at certain ones (`moepack.slices`), so a
`Slab` holds the smallest slice that contains a rank's part. It feeds zeros to the other columns and drops the outputs
of the other rows. Formats that cannot be cut at all are held whole, which the log says.

Invariant: the sum of all ranks' outputs, or their concatenation, is the output of the whole layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from moepack.checkpoint.resolve import resolve_model
from moepack.errors import LoadError
from moepack.format.directory import PackedDirectory
from moepack.format.header import DTYPES
from moepack.format.shard import Entry
from moepack.integrations.transformers import LINEAR
from moepack.modules.linear import PackedLinear
from moepack.registry import open_tensor
from moepack.slices import Grain, Selection, cut, enclosing, grain_of
from moepack.stores.base import Shape
from moepack.stores.mapped import MappedStore
from moepack.stores.module import PackedModule
from moepack.stores.uploaded import DeviceStore

__all__ = ["Part", "Slab", "Source", "directory_of", "values_of"]


@dataclass(frozen=True)
class Part:
    """A module of the checkpoint.

    Attributes:
        tensors: tensor names by projection.
        shapes: shapes (E, R, C) by projection. A linear layer has E = 1.
        packed: whether its tensors are packed. Others are parts of merged layers that are packed otherwise.
        pairs: features of a head of which vLLM's model expects the even ones before the odd ones, because it rotates
            halves and the checkpoint's model pairs; 0 if it expects the order of the checkpoint.
    """

    tensors: Mapping[str, str]
    shapes: Mapping[str, Shape]
    packed: bool = True
    pairs: int = 0


@dataclass
class Source:
    """A packed directory that is being loaded on one device.

    Attributes:
        directory: the directory.
        device: where packed bytes go.
        dense: its tensors that are not packed, by name.
        taken: names of the tensors that were loaded.
        whole: names of the tensors that the rank holds whole although it needs a part.
        by_experts: names of the tensors whose experts ranks divide although vLLM splits each of them.
    """

    directory: PackedDirectory
    device: torch.device
    dense: Mapping[str, Entry]
    taken: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    by_experts: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._store = MappedStore() if self.device.type == "cpu" else DeviceStore(self.device)

    def place(self, name: str) -> dict[str, str]:
        """Return the file and the name of a tensor, for messages."""
        return {"file": str(self.directory.path / self.directory.manifest.tensors[name].file), "tensor": name}

    def grain(self, name: str) -> Grain:
        """Return where a packed tensor can be cut.

        Raises:
            CorruptionError, LoadError: its bytes cannot be opened.
        """
        data = self.directory.tensor(name)
        open_tensor(data, **self.place(name))
        return grain_of(data)

    def cut(self, name: str, selection: Selection) -> Any:
        """Return the bytes of a slice; errors as of `moepack.slices.cut`."""
        self.taken.add(name)
        return cut(self.directory.tensor(name), selection, **self.place(name))

    def attach(self, module: PackedModule, projection: str, name: str, selection: Selection) -> None:
        """Give a slice to a projection of a module.

        Raises:
            CorruptionError, LoadError: the tensor cannot be opened, or not be cut there.
            DeviceError, DeviceMemoryError: the device cannot hold it.
        """
        self._store.put(module, projection, self.cut(name, selection), **self.place(name))

    def values(self, name: str) -> torch.Tensor:
        """Return a tensor that is not packed."""
        self.taken.add(name)
        return values_of(self.dense[name])


class Slab(nn.Module):
    """The rows and columns of a linear layer that a rank computes.

    Args:
        part: the layer.
        rows: the outputs of the rank.
        columns: the inputs of the rank.
    """

    def __init__(self, part: Part, rows: range, columns: range) -> None:
        super().__init__()
        self.part, self.rows, self.columns = part, rows, columns
        self.held_rows, self.held_columns = rows, columns
        self.product: nn.Module | None = None

    @property
    def name(self) -> str:
        """The name of the tensor."""
        return self.part.tensors[LINEAR]

    def load(self, source: Source, dtype: torch.dtype) -> None:
        """Read the rank's part of the layer; errors as of `Source.attach`."""
        if not self.part.packed:
            values = source.values(self.name)[self.rows.start : self.rows.stop, self.columns.start : self.columns.stop]
            product = nn.Linear(len(self.columns), len(self.rows), bias=False, device="meta")
            product.weight = nn.Parameter(values.to(source.device, dtype).contiguous(), requires_grad=False)
            self.product = product
            return
        _, rows, columns = self.part.shapes[LINEAR]
        grain = source.grain(self.name)
        self.held_rows = enclosing(self.rows, rows, grain.rows, grain.least)
        self.held_columns = enclosing(self.columns, columns, grain.columns, grain.least)
        held = self.held_rows, self.held_columns
        if held == (range(rows), range(columns)) and held != (self.rows, self.columns):
            source.whole.add(self.name)
        packed = PackedLinear(len(self.held_rows), len(self.held_columns))
        source.attach(packed, *PackedLinear.projections, self.name, Selection([0], self.held_rows, self.held_columns))
        self.product = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply activations (..., columns) to outputs (..., rows), in the same dtype."""
        if self.product is None:
            raise LoadError("packed weights have no bytes: load the model first", tensor=self.name)
        if self.held_columns != self.columns:
            before, after = self.columns.start - self.held_columns.start, self.held_columns.stop - self.columns.stop
            x = functional.pad(x, (before, after))
        y: torch.Tensor = self.product(x)
        if self.held_rows != self.rows:
            y = y.narrow(-1, self.rows.start - self.held_rows.start, len(self.rows))
        if self.part.pairs:
            y = y.view(*y.shape[:-1], -1, self.part.pairs // 2, 2).transpose(-1, -2).flatten(-3)
        return y


def values_of(entry: Entry) -> torch.Tensor:
    """Return the values of a tensor that is not packed, as a copy."""
    return torch.frombuffer(bytearray(entry.data()), dtype=DTYPES[entry.dtype]).view(entry.shape)


def directory_of(model_config: Any) -> Path:
    """Return the directory of the model that vLLM loads; errors as for `resolve_model`."""
    name, revision = model_config.model, getattr(model_config, "revision", None)
    return resolve_model(name if revision is None else f"{name}@{revision}")

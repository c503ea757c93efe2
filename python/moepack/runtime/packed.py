"""Modules that compute from packed bytes: what experts and linear layers have in common.

Invariants:
- A module asks its store for matrices at each call, and the backend of the activations' device for the products; where
  bytes lie and how a device multiplies are none of its business.
- Gradients pass through packed weights (`moepack.runtime.gradients`), which have none themselves.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from moepack.arrays import AnyTensor
from moepack.checkpoint.experts import ExpertsForm
from moepack.errors import LoadError
from moepack.format.directory import PackedDirectory
from moepack.registry import open_tensor
from moepack.runtime.backends import Matrix
from moepack.runtime.compute import ComputingModule
from moepack.runtime.store import ExpertStore, MappedStore, Shape

__all__ = ["PackedModule", "Shape"]


class PackedModule(ComputingModule):
    """A module whose projections are packed; a subclass computes.

    Attributes:
        takes_adapters: whether the parameters that it stands for can have low-rank adapters (`runtime.adapters`).
        form, stock: how the experts module that it stands for holds its experts, and the shapes of the parameters that
            are packed; None and nothing where it stands for no experts, or for modules of a linear layer each.
        store: where their bytes are.
        shapes: the projections' shapes, in the order of the computation.
        places: where their bytes come from, for messages.
        readers: the store's notes.
        home: where the bytes are, if activations may come from elsewhere: they are brought there, and products back.
            None where activations must be where the bytes are.
    """

    projections: tuple[str, ...]
    takes_adapters = False
    form: ExpertsForm | None = None
    stock: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    home: torch.device | None = None

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        super().__init__()
        self.shapes = {name: shapes[name] for name in self.projections}
        self.places: dict[str, dict[str, Any]] = {}
        self.readers: dict[str, tuple[int, Matrix]] = {}
        self.store: ExpertStore = MappedStore()

    def stand_for(self, original: Any, form: ExpertsForm) -> None:
        """Note what an experts module of transformers, of a known form, holds in its parameters."""
        self.form = form
        self.stock = {name: tuple(original.get_parameter(name).shape) for name in form.parameters}
        self.is_transposed = getattr(original, "is_transposed", False)  # what peft asks experts for

    @property
    def qweight(self) -> torch.Tensor:
        """A tensor where the module computes, by the name under which peft looks for where a quantized layer is."""
        buffers = (self._buffers.get(projection) for projection in self.projections)
        there = next((buffer for buffer in buffers if buffer is not None), None)
        return torch.empty(0, dtype=torch.uint8, device=self.home) if there is None else there

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(buffer.numel() for buffer in self.buffers(recurse=False))

    def attach(self, projection: str, data: AnyTensor, **place: Any) -> None:
        """Give a projection its bytes; arguments and errors as for `ExpertStore.put`."""
        self.store.put(self, projection, data, **place)

    def matrix(self, projection: str) -> Matrix:
        """Return a projection on the CPU; errors as for `ExpertStore.fetch`."""
        matrices = self.store.fetch(self, None, torch.device("cpu"))
        return matrices[self.projections.index(projection)]

    def values(self, projection: str) -> torch.Tensor:
        """The values `[E, R, C]` of a projection, float32 on the CPU.

        They are decoded from the bytes, where these are in the CPU's memory, or else from the file that they came from.

        Raises:
            LoadError, CorruptionError: neither can be read.
        """
        data, place = self._buffers.get(projection), self.places.get(projection, {})
        if data is not None and data.device.type == "cpu":
            return torch.from_numpy(open_tensor(data.numpy(), **place).dequantize())
        if not place.get("file"):
            raise LoadError(f"the packed bytes of {projection} are neither in memory nor in a known file")
        directory = PackedDirectory.open(Path(place["file"]).parent)
        return torch.from_numpy(directory.blob(place["tensor"]).dequantize())

    def packed_bytes(self) -> list[torch.Tensor] | None:
        """The bytes of all projections, in order; None where a store keeps them elsewhere."""
        buffers = [self._buffers.get(projection) for projection in self.projections]
        return None if any(buffer is None for buffer in buffers) else buffers  # type: ignore[return-value]

    def brought_home(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The inputs where the bytes are, if the module has a home."""
        return inputs if self.home is None else tuple(tensor.to(self.home) for tensor in inputs)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the store and its readers out of copies and pickles, which have their bytes in ordinary memory."""
        return {**self.__dict__, "readers": {}, "store": MappedStore()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the files of bytes that a store kept elsewhere, which are in no copy.

        Raises:
            LoadError, CorruptionError: a file is gone, or is another.
        """
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for projection, place in self.places.items():
            if self._is_kept_elsewhere(projection) and place.get("file"):
                directory = PackedDirectory.open(Path(place["file"]).parent)
                self.attach(projection, directory.tensors()[place["tensor"]], **place)

    def _is_kept_elsewhere(self, projection: str) -> bool:
        """Whether a projection has bytes that are no buffer of the module."""
        return self._buffers.get(projection) is None

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        """Adopt the given bytes instead of writing them into the buffer, which may be a read-only map."""
        missing_keys, error_messages = arguments[2], arguments[4]
        for projection in self.projections:
            tensor = state_dict.get(prefix + projection)
            if tensor is None:
                missing_keys.append(prefix + projection)
                continue
            try:
                self.attach(projection, tensor, tensor=prefix + projection)
            except (LoadError, ValueError, TypeError) as error:
                error_messages.append(f"{prefix}{projection}: {error}")

    def extra_repr(self) -> str:
        """The projections with their shapes and formats."""
        parts = []
        for name, shape in self.shapes.items():
            entry = self.readers.get(name)
            parts.append(f"{name}={shape}" + (f" {entry[1].format}" if entry else ""))
        return ", ".join(parts)

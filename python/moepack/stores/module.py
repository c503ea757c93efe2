"""The base class of modules that compute from packed bytes: experts, linear layers and embeddings.

Invariants:
- On every call, a module asks its store for matrices, and the backend of the activations' device for the products. It
  does not know where the bytes are or how a device multiplies.
- Gradients pass through packed weights (`moepack.modules.gradients`), which have no gradients of their own.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from moepack.arrays import AnyTensor
from moepack.backends import Matrix
from moepack.backends.compute import ComputingModule
from moepack.checkpoint.experts import ExpertsForm
from moepack.errors import LoadError
from moepack.format.balance import balance_of
from moepack.format.directory import PackedDirectory, read_manifest
from moepack.registry import open_tensor
from moepack.stores.base import ExpertStore, Shape
from moepack.stores.mapped import MappedStore

__all__ = ["PackedModule", "Shape"]


class PackedModule(ComputingModule):
    """A module with packed projections; subclasses implement the computation.

    Attributes:
        takes_adapters: whether the parameters that it replaces support low-rank adapters (`modules.adapters`).
        is_shared: whether its calls run through `ExpertStore.summed`, so that a store may divide them among devices.
        can_overlap: whether products of other experts may run while a chosen one is copied (`tiers.Device.overlaps`).
        form, stock: the layout of the replaced experts module, and the shapes of its packed parameters; None and empty
            if it does not replace experts, or if the experts are separate linear layers.
        store: holds the bytes.
        shapes: the projections' shapes, in order of computation.
        places: the origin of the bytes, for messages.
        readers: open matrices, managed by the store.
        multiplied: by what inputs are multiplied, [C], because they are in the scales of the model's source; None if
            they are in those of the packed model.
        home: the device of the bytes, if activations may be on another device: they are copied there, and products
            back. None if activations must be on the device of the bytes.
    """

    projections: tuple[str, ...]
    takes_adapters = False
    is_shared = False
    can_overlap = False
    form: ExpertsForm | None = None
    stock: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    multiplied: torch.Tensor | None = None
    home: torch.device | None = None

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        super().__init__()
        self.shapes = {name: shapes[name] for name in self.projections}
        self.places: dict[str, dict[str, Any]] = {}
        self.readers: dict[str, tuple[int, Matrix]] = {}
        self.store: ExpertStore = MappedStore()
        self._scales: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]] = {}

    def stand_for(self, original: Any, form: ExpertsForm) -> None:
        """Record the parameters of the transformers experts module that this module replaces."""
        self.form = form
        self.stock = {name: tuple(original.get_parameter(name).shape) for name in form.parameters}
        self.is_transposed = getattr(original, "is_transposed", False)  # read by peft

    @property
    def qweight(self) -> torch.Tensor:
        """A tensor on the module's device. By this name, peft finds the device of a quantized layer."""
        buffers = (self._buffers.get(projection) for projection in self.projections)
        there = next((buffer for buffer in buffers if buffer is not None), None)
        return torch.empty(0, dtype=torch.uint8, device=self.home) if there is None else there

    @property
    def nbytes(self) -> int:
        """Size of the packed weights in bytes."""
        return sum(buffer.numel() for buffer in self.buffers(recurse=False))

    def attach(self, projection: str, data: AnyTensor, **place: Any) -> None:
        """Set the bytes of a projection; arguments and errors as in `ExpertStore.put`."""
        self.store.put(self, projection, data, **place)

    def matrix(self, projection: str) -> Matrix:
        """Return a projection on the CPU; errors as in `ExpertStore.fetch`."""
        matrices = self.store.fetch(self, None, torch.device("cpu"))
        return matrices[self.projections.index(projection)]

    def values(self, projection: str) -> torch.Tensor:
        """Decode a projection to `[E, R, C]` float32 on the CPU.

        The bytes are read from CPU memory if they are there, otherwise from their file.

        Raises:
            LoadError, CorruptionError: the bytes are neither in memory nor in a readable file.
        """
        data, place = self._buffers.get(projection), self.places.get(projection, {})
        if data is not None and data.device.type == "cpu":
            return torch.from_numpy(open_tensor(data.numpy(), **place).dequantize())
        if not place.get("file"):
            raise LoadError(f"the packed bytes of {projection} are neither in memory nor in a known file")
        directory = PackedDirectory.open(Path(place["file"]).parent)
        return torch.from_numpy(directory.blob(place["tensor"]).dequantize())

    def scales(self, projection: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return by what the rows of a projection were multiplied, and its columns divided, when it was packed.

        Args:
            projection: a projection, also one that is stored together with another.

        Returns:
            [E or 1, R] and [E or 1, C] float32 on the CPU; None for 1.

        Raises:
            LoadError, CorruptionError: the directory of the bytes cannot be read.
        """
        if projection not in self._scales:
            self._scales[projection] = self._read_scales(projection)
        return self._scales[projection]

    def _read_scales(self, projection: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        place = next((place for place in self.places.values() if place.get("file")), None)
        if place is None or not (balance := balance_of(path := Path(place["file"]).parent)):
            return None, None
        record = read_manifest(path).tensors[place["tensor"]]
        key = f"{record.module}.{projection}" if record.experts else place["tensor"]
        rows, columns = balance.rows(key), balance.columns(key)
        return (
            None if rows is None else rows.reshape(-1, rows.shape[-1]),
            None if columns is None else columns.reshape(-1, columns.shape[-1]),
        )

    def restored(self, projection: str, values: torch.Tensor) -> torch.Tensor:
        """Return decoded values [E, R, C] of a projection in the scales of the model's source."""
        rows, columns = self.scales(projection)
        if rows is not None:
            values = values / rows[..., None].to(values.device)
        return values if columns is None else values * columns[:, None].to(values.device)

    def keep_scales(self) -> None:
        """Read the factors of all projections now; errors as of `scales`."""
        names = () if self.form is None else self.form.shapes
        for projection in dict.fromkeys([*self.projections, *names]):
            self.scales(projection)

    def enter_source_scales(self) -> None:
        """Take inputs in the scales of the model's source from now on.

        Raises:
            LoadError, CorruptionError: see `scales`.
        """
        columns = self.scales(self.projections[0])[1]
        self.multiplied = None if columns is None else columns[0]

    def leave_source_scales(self) -> None:
        """Take inputs in the scales of the packed model again."""
        self.multiplied = None

    def __call__(self, x: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        """Run the module; see `forward`."""
        if self.multiplied is not None:
            x = (x.float() * self.multiplied.to(x.device)).to(x.dtype)
        return super().__call__(x, *arguments, **settings)

    def packed_bytes(self) -> list[torch.Tensor] | None:
        """The bytes of all projections, in order; None if a store keeps them elsewhere."""
        buffers = [self._buffers.get(projection) for projection in self.projections]
        return None if any(buffer is None for buffer in buffers) else buffers  # type: ignore[return-value]

    def brought_home(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copy the inputs to the device of the bytes, if the module has a home."""
        return inputs if self.home is None else tuple(tensor.to(self.home) for tensor in inputs)

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the store and its readers from copies and pickles, whose bytes are in ordinary memory."""
        return {**self.__dict__, "readers": {}, "store": MappedStore()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the files of bytes that a store kept elsewhere, because copies do not include them.

        Raises:
            LoadError, CorruptionError: a file is missing or has changed.
        """
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for projection, place in self.places.items():
            if self._is_kept_elsewhere(projection) and place.get("file"):
                directory = PackedDirectory.open(Path(place["file"]).parent)
                self.attach(projection, directory.tensors()[place["tensor"]], **place)

    def _is_kept_elsewhere(self, projection: str) -> bool:
        """Whether a projection's bytes are not a buffer of the module."""
        return self._buffers.get(projection) is None

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        """Adopt the tensors instead of copying into the buffers, which may be read-only maps."""
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
        """The projections' shapes and formats."""
        parts = []
        for name, shape in self.shapes.items():
            entry = self.readers.get(name)
            parts.append(f"{name}={shape}" + (f" {entry[1].format}" if entry else ""))
        return ", ".join(parts)

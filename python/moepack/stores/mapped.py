"""The default store: packed bytes stay where they are, usually in mapped files."""

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from moepack.arrays import AnyTensor, as_bytes
from moepack.backends import Matrix, backend_for
from moepack.errors import LoadError
from moepack.stores.base import ExpertStore, Layer, Matrices

__all__ = ["MappedStore", "matrix_over"]

_open: WeakValueDictionary[tuple[torch.device, int], Matrix] = WeakValueDictionary()
"""Open matrices by device and address. A matrix keeps its bytes alive, so no address is reused while it is open."""


def matrix_over(data: Tensor, **place: Any) -> Matrix:
    """Return the matrix that is open over packed bytes; open one if necessary.

    Args:
        data: flat uint8 on a device that has a backend.
        **place: `file` and `tensor`, for messages.

    Raises:
        CorruptionError: the bytes violate their format.
        LoadError: the format is unknown, or the device has no backend.
    """
    return _open.get((data.device, data.data_ptr())) or _opened(data, **place)


def _opened(data: Tensor, **place: Any) -> Matrix:
    """Open a new matrix and register it."""
    matrix = backend_for(data.device).open(data, **place)
    _open[data.device, data.data_ptr()] = matrix
    return matrix


class MappedStore(ExpertStore):
    """Leaves bytes where they are, by default in mapped files, whose pages are read on use.

    The bytes are uint8 buffers of the layer, named after its projections. Dtype casts do not affect them, they are part
    of `state_dict`, and nothing writes to them (the map is read-only).
    """

    def put(self, layer: Layer, projection: str, data: AnyTensor, **place: Any) -> None:
        """Use bytes without copying them; see `ExpertStore.put`."""
        buffer = as_bytes(data)
        self._take(layer, projection, buffer, backend_for(buffer.device).open(buffer, **place), **place)

    def _take(self, layer: Layer, projection: str, buffer: Tensor, matrix: Matrix, **place: Any) -> None:
        """Register bytes as those of a projection."""
        if matrix.shape != layer.shapes[projection]:
            expected = layer.shapes[projection]
            message = f"the packed tensor has shape {matrix.shape}, but the model's {projection} has {expected}"
            raise LoadError(message, **place)
        layer._buffers.pop(projection, None)
        layer.register_buffer(projection, buffer)
        layer.places[projection] = place
        layer.readers[projection] = buffer.data_ptr(), matrix
        _open[buffer.device, buffer.data_ptr()] = matrix

    def fetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> Matrices:
        """Return matrices that read all bytes in place; see `ExpertStore.fetch`."""
        return tuple(self._matrix(layer, projection, device) for projection in layer.shapes)

    def prefetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> None:
        """Do nothing: the bytes are already in place."""

    def _matrix(self, layer: Layer, projection: str, device: torch.device) -> Matrix:
        """The open matrix of a projection, reopened if its buffer was moved or copied (`deepcopy`)."""
        buffer: Tensor | None = layer._buffers.get(projection)
        if buffer is None:
            raise LoadError(f"packed weights have no bytes: load the model first ({projection} is missing)")
        if buffer.device != device:
            raise LoadError(f"packed weights on '{buffer.device}' cannot be used on '{device}'")
        pointer, matrix = layer.readers.get(projection, (None, None))
        if matrix is None or pointer != buffer.data_ptr():
            self.put(layer, projection, buffer, **layer.places.get(projection, {"tensor": projection}))
            matrix = layer.readers[projection][1]
        return matrix

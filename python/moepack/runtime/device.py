"""Packed bytes in the memory of a GPU.

`DeviceStore` uploads what modules are given; from then on the bytes are ordinary buffers of the modules, which move
with them and are found where they are (`MappedStore.fetch`), so that a store is needed only while a model is loaded.
"""

from typing import Any

import torch

from moepack.arrays import AnyTensor, as_bytes
from moepack.runtime.backends.gpu import Uploader, require, upload
from moepack.runtime.store import Layer, MappedStore

__all__ = ["DeviceStore"]


class DeviceStore(MappedStore):
    """Puts bytes into the memory of one GPU, through pinned buffers that it keeps as long as it lives.

    Args:
        device: the GPU.

    Raises:
        DeviceError: it cannot be used.
    """

    def __init__(self, device: torch.device) -> None:
        self._uploader = Uploader(require(device))

    def put(self, layer: Layer, projection: str, data: AnyTensor, **place: Any) -> None:
        """Copy bytes to the GPU, and what is entropy coded decoded; see `ExpertStore.put`.

        Raises:
            DeviceMemoryError: they do not fit.
        """
        given = as_bytes(data)
        if given.device.type != "cpu":
            super().put(layer, projection, given, **place)
            return
        layer._buffers.pop(projection, None)  # what holds their place, or other bytes
        matrix = upload(given, self._uploader, **place)
        self._take(layer, projection, matrix.data, matrix, **place)

"""A store that keeps packed bytes in GPU memory.

`DeviceStore` uploads the bytes of modules. Afterwards they are ordinary buffers that move with their modules, and
`MappedStore.fetch` finds them there. The store is needed only while a model is loaded.
"""

from typing import Any

import torch

from moepack.arrays import AnyTensor, as_bytes
from moepack.backends.gpu import Uploader, require, upload
from moepack.stores.base import Layer
from moepack.stores.mapped import MappedStore

__all__ = ["DeviceStore"]


class DeviceStore(MappedStore):
    """Uploads bytes to one GPU through pinned buffers, which live as long as the store.

    Args:
        device: the GPU.

    Raises:
        DeviceError: the GPU cannot be used.
    """

    def __init__(self, device: torch.device) -> None:
        self._uploader = Uploader(require(device))

    def put(self, layer: Layer, projection: str, data: AnyTensor, **place: Any) -> None:
        """Copy bytes to the GPU and decode entropy-coded data there; see `ExpertStore.put`.

        Raises:
            DeviceMemoryError: the bytes do not fit.
        """
        given = as_bytes(data)
        if given.device.type != "cpu":
            super().put(layer, projection, given, **place)
            return
        layer._buffers.pop(projection, None)  # a placeholder or previous bytes
        matrix = upload(given, self._uploader, **place)
        self._take(layer, projection, matrix.data, matrix, **place)

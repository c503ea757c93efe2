"""Adapts the device maps of transformers to packed modules.

Transformers and accelerate place modules by the sizes of their tensors, but packed modules have no parameters. While a
model is loaded, each packed module therefore has meta buffers of the size of its packed bytes (`reserve`), so that
accelerate sees the true sizes. With a map of GPUs and the CPU, accelerate computes everything on a GPU and copies the
weights of CPU layers there at each call. Packed bytes are exempt: packed modules on the CPU multiply there, and the
activations are copied instead (`PackedModule.home`).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from moepack.backends import is_supported
from moepack.backends.gpu import free_bytes, missing_memory, require
from moepack.errors import DeviceError, LoadError
from moepack.format.manifest import TensorRecord
from moepack.modules.embedding import PackedEmbedding
from moepack.stores.module import PackedModule

__all__ = ["Placement", "has_gpu", "reserve"]

_CPU = torch.device("cpu")


def has_gpu() -> bool:
    """Return whether packed weights can run on a GPU of this machine."""
    try:
        require(torch.device("cuda"))
    except DeviceError:
        return False
    return True


class Placement:
    """A checked device map: packed weights run on all of its devices.

    Args:
        device_map: maps module paths to devices; "" is the default.

    Raises:
        LoadError: packed weights do not run on this kind of device.
        DeviceError: a GPU cannot be used.
    """

    def __init__(self, device_map: Mapping[str, Any]) -> None:
        self._devices = {path: _checked(path, device) for path, device in device_map.items()}

    def device_of(self, path: str) -> torch.device:
        """Return the device of a module or tensor: the entry with the longest matching path, or the CPU."""
        parts = path.split(".")
        paths = (".".join(parts[:count]) for count in range(len(parts), -1, -1))
        return next((self._devices[path] for path in paths if path in self._devices), _CPU)

    @property
    def is_mixed(self) -> bool:
        """Whether the map uses both GPUs and the CPU."""
        return len({device.type for device in self._devices.values()}) > 1

    def check_memory(self, model: Any) -> None:
        """Check that each GPU has room for its parameters and buffers, including packed bytes.

        Raises:
            DeviceMemoryError: a GPU is too small; the message gives the missing amount.
        """
        sizes: dict[torch.device, int] = {}
        tied = getattr(model, "all_tied_weights_keys", {})
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name not in tied:
                device = self.device_of(name)
                sizes[device] = sizes.get(device, 0) + tensor.nbytes
        for device, size in sizes.items():
            if device.type == "cuda" and size > (free := free_bytes(device)):
                raise missing_memory("the model" if len(sizes) == 1 else "its part of the model", size, free, device)

    def settle(self, modules: Mapping[str, PackedModule]) -> None:
        """Remove the placeholder buffers of modules on the CPU, so that accelerate does not move their bytes.

        Args:
            modules: packed modules by their paths.
        """
        for path, module in modules.items():
            if self.device_of(path).type == "cpu":
                for projection in module.projections:
                    module._buffers.pop(projection, None)
                module.home = _CPU if self.is_mixed else None


def _checked(path: str, name: Any) -> torch.device:
    """Check a device of a map, which may be a number or a name, and return it."""
    where = f"the device map puts {repr(path) if path else 'the model'} on '{name}'"
    try:
        device = torch.device(name)
    except RuntimeError:  # "disk"
        device = torch.device("meta")
    if not is_supported(device):
        raise LoadError(f"packed weights run on the CPU and on CUDA GPUs; {where}")
    if device.type == "cpu":
        return _CPU
    try:
        return require(device)
    except DeviceError as error:
        raise DeviceError(f"{where}, but packed weights run only on the CPU here: {error.detail}") from error


def reserve(module: PackedModule, records: Mapping[str, TensorRecord]) -> None:
    """Register a meta buffer for each projection, of the size of its bytes once loaded.

    Args:
        module: the packed module.
        records: the manifest's records, by projection.
    """
    for projection, record in records.items():
        size = record.nbytes
        if isinstance(module, PackedEmbedding):  # decoded on a GPU
            size = math.prod(module.shapes[projection]) * module.dtype.itemsize
        elif record.kind == "coded":  # rearranged on a GPU, at a cost of about 1/4 bit per weight
            size += math.prod(module.shapes[projection]) // 32
        buffer = torch.empty(size, dtype=torch.uint8, device="meta")
        module.register_buffer(projection, buffer, persistent=False)

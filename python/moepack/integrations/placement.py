"""Where the layers of a packed model go: the device map of transformers, as packed modules need it.

Transformers and accelerate place modules by the sizes of their tensors, but a packed module has no parameters. So while
a model is loaded each packed module has buffers without memory, as large as its bytes (`reserve`), and accelerate sees
what it places. Where a map uses GPUs and the CPU, accelerate computes everything on a GPU and copies the weights of
the CPU's layers there at each call; packed bytes must not make that journey. Their modules keep them on the CPU and
multiply there, and activations travel instead (`PackedModule.home`).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from moepack.errors import DeviceError, LoadError
from moepack.format.manifest import TensorRecord
from moepack.runtime.backends import is_supported
from moepack.runtime.backends.gpu import free_bytes, missing_memory, require
from moepack.runtime.embedding import PackedEmbedding
from moepack.runtime.packed import PackedModule

__all__ = ["Placement", "has_gpu", "reserve"]

_CPU = torch.device("cpu")


def has_gpu() -> bool:
    """Say whether packed weights can run on a GPU of this machine."""
    try:
        require(torch.device("cuda"))
    except DeviceError:
        return False
    return True


class Placement:
    """A device map whose devices packed weights run on.

    Args:
        device_map: from the path of a module to its device; "" stands for all others.

    Raises:
        LoadError: packed weights do not run on one of the devices.
        DeviceError: it is a GPU that cannot be used.
    """

    def __init__(self, device_map: Mapping[str, Any]) -> None:
        self._devices = {path: _checked(path, device) for path, device in device_map.items()}

    def device_of(self, path: str) -> torch.device:
        """Return the device of a module or a tensor: that of the longest path of the map that it is part of."""
        parts = path.split(".")
        paths = (".".join(parts[:count]) for count in range(len(parts), -1, -1))
        return next((self._devices[path] for path in paths if path in self._devices), _CPU)

    @property
    def is_mixed(self) -> bool:
        """Whether it uses GPUs and the CPU."""
        return len({device.type for device in self._devices.values()}) > 1

    def check_memory(self, model: Any) -> None:
        """Make sure that each GPU has room for its parameters and buffers, packed bytes included.

        Raises:
            DeviceMemoryError: one has not; the message says how much is missing.
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
        """Keep the bytes of the CPU's modules, by their paths, out of accelerate's sight and reach."""
        for path, module in modules.items():
            if self.device_of(path).type == "cpu":
                for projection in module.projections:
                    module._buffers.pop(projection, None)
                module.home = _CPU if self.is_mixed else None


def _checked(path: str, name: Any) -> torch.device:
    """A device of a map, which may be a number or a name."""
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
        raise DeviceError(f"{where}, but packed weights run on the CPU alone here: {error.detail}") from error


def reserve(module: PackedModule, records: Mapping[str, TensorRecord]) -> None:
    """Give a module a buffer without memory for each projection, as large as its bytes will be.

    Args:
        module: the module.
        records: the manifest's entries of its projections.
    """
    for projection, record in records.items():
        size = record.nbytes
        if isinstance(module, PackedEmbedding):  # a GPU has it decoded
            size = math.prod(module.shapes[projection]) * module.dtype.itemsize
        elif record.kind == "coded":  # rearranged, which takes about a quarter of a bit a weight
            size += math.prod(module.shapes[projection]) // 32
        buffer = torch.empty(size, dtype=torch.uint8, device="meta")
        module.register_buffer(projection, buffer, persistent=False)

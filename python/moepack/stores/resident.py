"""Weights in anonymous memory backed by huge pages, instead of mapped files.

A mapped file is in the page cache, in pages of 4 KB to 2 MB; the kernel and file system choose their size when the file
is written or first read. Anonymous memory gets 2 MB pages on every file system, is not evicted under memory pressure,
and does not change if the file is modified.

Invariants:
- Nothing is copied unless all weights fit into the available memory.
- Values, dtypes and shapes do not change, only addresses.
- A file is unmapped when its last tensor is copied, and the files are dropped from the page cache at the end, so memory
  then holds the weights only once.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moepack.arrays import AnyTensor, as_bytes
from moepack.errors import LoadError
from moepack.mapping import own_memory
from moepack.memory import available_bytes
from moepack.stores.base import Layer
from moepack.stores.mapped import MappedStore
from moepack.stores.module import PackedModule
from moepack.system.reading import forget, open_buffered

__all__ = ["ResidentStore"]

_ALIGNMENT = 64


class _Arena:
    """One block of anonymous memory, split into consecutive pieces; it lives until the last piece is freed."""

    def __init__(self, size: int) -> None:
        try:
            self._bytes = as_bytes(own_memory(size))
        except OSError as error:
            raise LoadError(f"cannot allocate {size / 1e9:.2f} GB for the weights: {error.strerror}") from error
        self._used = 0

    def has_room(self, data: Tensor) -> bool:
        """Whether flat bytes fit into the unused part."""
        return self._used + data.nbytes <= len(self._bytes)

    def copy(self, data: Tensor) -> Tensor:
        """Copy flat bytes to the next piece, which is aligned to 64 bytes."""
        piece = self._bytes[self._used : self._used + data.nbytes]
        self._used += _padded(data.nbytes)
        return piece.copy_(data)


class ResidentStore(MappedStore):
    """Keeps bytes in anonymous memory backed by huge pages."""

    def __init__(self) -> None:
        self._arena = _Arena(0)

    def put(self, layer: Layer, projection: str, data: AnyTensor, **place: Any) -> None:
        """Copy bytes and use the copy; see `ExpertStore.put`."""
        given = as_bytes(data)
        if not self._arena.has_room(given):
            self._arena = _Arena(given.nbytes)
        super().put(layer, projection, self._arena.copy(given), **place)

    def take(self, model: nn.Module, files: Iterable[Path] = ()) -> None:
        """Move a model's packed bytes and parameters to this store.

        Args:
            model: a model on the CPU, packed or not; its tensors may be views of mapped files.
            files: the files that it was loaded from, to be dropped from the page cache.

        Raises:
            LoadError: the weights exceed the available memory; the model is unchanged.
        """
        packed = [module for module in model.modules() if isinstance(module, PackedModule)]
        parameters = [parameter for parameter in model.parameters() if parameter.is_contiguous()]
        self._arena = _Arena(_checked_size(packed, parameters))
        for parameter in parameters:
            flat = parameter.detach().reshape(-1).view(torch.uint8)
            parameter.data = self._arena.copy(flat).view(parameter.dtype).view(parameter.shape)
        for module in packed:
            module.store = self
            for projection in module.projections:
                module.attach(projection, module.get_buffer(projection), **module.places[projection])
        for file in files:
            _forget(file)


def _checked_size(packed: Iterable[PackedModule], parameters: Iterable[nn.Parameter]) -> int:
    """Return the size of all weights with padding; raise `LoadError` if it exceeds the available memory."""
    sizes = [buffer.nbytes for module in packed for buffer in module.buffers(recurse=False)]
    sizes += [parameter.nbytes for parameter in parameters]
    size, available = sum(map(_padded, sizes)), available_bytes()
    if available is not None and size > available:
        raise LoadError(
            f"the weights take {size / 1e9:.2f} GB, but only {available / 1e9:.2f} GB of memory are available: "
            "load them without `resident`, mapped from their files"
        )
    return size


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _forget(file: Path) -> None:
    """Drop a file from the page cache; mapped pages remain."""
    with suppress(OSError):
        descriptor = open_buffered(file)
        forget(descriptor)
        os.close(descriptor)

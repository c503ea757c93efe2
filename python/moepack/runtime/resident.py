"""Weights in memory of the process's own, in huge pages, instead of in mapped files.

A mapped file lies in the page cache, in pages whose size the kernel and the file system chose when the file was written
or first read: 4 KB to 2 MB. Own memory gets pages of 2 MB on any file system, stays when memory is short, and does not
change when somebody writes to the file.

Invariants:
- Nothing is copied unless everything fits into the memory that is available then.
- Values, dtypes and shapes stay as they are; only addresses change.
- A file's mapping goes as soon as its last tensor is copied, and the page cache of the files at the end, so that
  afterwards the weights are in memory once.
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
from moepack.runtime.packed import PackedModule
from moepack.runtime.store import Layer, MappedStore

__all__ = ["ResidentStore"]

_ALIGNMENT = 64


class _Arena:
    """One run of anonymous memory that is handed out piece by piece; it lives as long as one of the pieces."""

    def __init__(self, size: int) -> None:
        try:
            self._bytes = as_bytes(own_memory(size))
        except OSError as error:
            raise LoadError(f"{size / 1e9:.2f} GB of memory for the weights: {error.strerror}") from error
        self._used = 0

    def has_room(self, data: Tensor) -> bool:
        """Whether flat bytes fit into the rest."""
        return self._used + data.nbytes <= len(self._bytes)

    def copy(self, data: Tensor) -> Tensor:
        """Copy flat bytes to the next piece, which begins at a multiple of 64."""
        piece = self._bytes[self._used : self._used + data.nbytes]
        self._used += _padded(data.nbytes)
        return piece.copy_(data)


class ResidentStore(MappedStore):
    """Keeps bytes in huge pages of the process's own."""

    def __init__(self) -> None:
        self._arena = _Arena(0)

    def put(self, layer: Layer, projection: str, data: AnyTensor, **place: Any) -> None:
        """Copy bytes and take the copy; see `ExpertStore.put`."""
        given = as_bytes(data)
        if not self._arena.has_room(given):
            self._arena = _Arena(given.nbytes)
        super().put(layer, projection, self._arena.copy(given), **place)

    def take(self, model: nn.Module, files: Iterable[Path] = ()) -> None:
        """Take over a model's packed bytes, and move its parameters too.

        Args:
            model: a model on the CPU, packed or not, whose tensors may be views of mapped files.
            files: the files it was loaded from, which the page cache need not keep.

        Raises:
            LoadError: the weights are larger than the available memory; the model is as it was.
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
    """Bytes of all weights, each padded; `LoadError` if they are more than what is available."""
    sizes = [buffer.nbytes for module in packed for buffer in module.buffers(recurse=False)]
    sizes += [parameter.nbytes for parameter in parameters]
    size, available = sum(map(_padded, sizes)), available_bytes()
    if available is not None and size > available:
        raise LoadError(
            f"the weights take {size / 1e9:.2f} GB and {available / 1e9:.2f} GB of memory are available: "
            "load them without `resident`, mapped from their files"
        )
    return size


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _forget(file: Path) -> None:
    """Let the page cache drop a file; pages that somebody has mapped stay."""
    with suppress(OSError, AttributeError), open(file, "rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

"""Packed embeddings: rows are looked up in packed bytes. They replace transformers' `nn.Embedding`.

On the CPU, a row is decoded when its token is looked up, so the unpacked table is never in memory. GPU kernels only
decode whole tensors, so on a GPU the table is decoded once, when its bytes are loaded.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from moepack.arrays import AnyTensor
from moepack.backends.cpu import views
from moepack.modules.ops import embedding as traced_embedding
from moepack.stores.module import PackedModule

__all__ = ["PackedEmbedding", "embedding_dtype"]

_CPU = torch.device("cpu")


class PackedEmbedding(PackedModule):
    """A packed matrix with lookup by row index.

    The bytes are in the buffer `packed`. A head that is tied to the embedding multiplies by the same bytes
    (`moepack.modules.linear`). There is no `weight` tensor.

    Args:
        rows: the vocabulary size.
        columns: the number of features.
        dtype: the initial dtype of the features; casting the model changes it.
    """

    projections = ("packed",)
    weight: None = None
    like: Tensor
    table: Tensor | None

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__({"packed": (1, rows, columns)})
        self.num_embeddings, self.embedding_dim = rows, columns
        # Empty; casts of the model reach buffers and so change its dtype.
        self.register_buffer("like", torch.empty(0, dtype=dtype, device="cpu"), persistent=False)
        self.register_buffer("table", None, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the features."""
        return self.like.dtype

    def decode(self, data: AnyTensor, device: torch.device) -> None:
        """Store the decoded table of some packed bytes on a device instead of the bytes."""
        self.attach("packed", data)
        self.table = self._decoded(device)
        self._buffers.pop("packed")
        self.readers.clear()

    def _is_kept_elsewhere(self, projection: str) -> bool:
        """False if a decoded table replaces the bytes."""
        return self.table is None and super()._is_kept_elsewhere(projection)

    def _decoded(self, device: torch.device) -> Tensor:
        """Decode the table onto a device."""
        return views.rows(self.matrix("packed"), torch.arange(self.num_embeddings), self.dtype).to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and cast the module. The packed bytes stay on the CPU; other devices get a decoded table."""
        data = self._buffers.pop("packed", None)
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            if data is not None:
                self.register_buffer("packed", data)
        if data is not None:
            device = self.like.device
            self.table = None if device == _CPU else self._decoded(device)
        return self

    def forward(self, index: Tensor) -> Tensor:
        """Look up rows.

        Args:
            index: `[...]`, row indices of an integer dtype.

        Returns:
            `[..., columns]` in the dtype of the module, on the device of `index`.
        """
        if self.table is not None:
            return functional.embedding(index, self.table)
        data = self.packed_bytes() if torch.compiler.is_compiling() else None
        if data is not None:
            return traced_embedding(index, data[0], self.embedding_dim, self.dtype)
        (matrix,) = self.store.fetch(self, None, _CPU)
        return views.rows(matrix, index.to(_CPU), self.dtype).to(index.device)


def embedding_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype of an embedding's outputs, packed or not."""
    dtype: torch.dtype = module.dtype if isinstance(module, PackedEmbedding) else module.weight.dtype  # type: ignore[assignment]
    return dtype

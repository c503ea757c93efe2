"""Embeddings whose rows are looked up in packed bytes: they stand where transformers has an `nn.Embedding`.

A row is decoded when its token comes, so the table is never in memory as numbers. On a GPU, whose kernels decode whole
tensors alone, the table is decoded once, when its bytes come.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from moepack.arrays import AnyTensor
from moepack.runtime.backends.cpu import views
from moepack.runtime.ops import embedding as traced_embedding
from moepack.runtime.packed import PackedModule

__all__ = ["PackedEmbedding", "embedding_dtype"]

_CPU = torch.device("cpu")


class PackedEmbedding(PackedModule):
    """Rows of a packed matrix by their numbers.

    The bytes are the buffer `packed`; a head that is tied to the embedding multiplies by the same ones
    (`moepack.runtime.linear`). There is no tensor `weight`.

    Args:
        rows: tokens of the vocabulary.
        columns: features of a token.
        dtype: of the features, until the model is cast to another one.
    """

    projections = ("packed",)
    weight: None = None
    like: Tensor
    table: Tensor | None

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__({"packed": (1, rows, columns)})
        self.num_embeddings, self.embedding_dim = rows, columns
        # Nothing is in it: casts of the model, which reach buffers, change its dtype.
        self.register_buffer("like", torch.empty(0, dtype=dtype, device="cpu"), persistent=False)
        self.register_buffer("table", None, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the features."""
        return self.like.dtype

    def decode(self, data: AnyTensor, device: torch.device) -> None:
        """Keep the decoded table of some packed bytes on a device, instead of the bytes."""
        self.attach("packed", data)
        self.table = self._decoded(device)
        self._buffers.pop("packed")
        self.readers.clear()

    def _is_kept_elsewhere(self, projection: str) -> bool:
        """Not where there is a decoded table in their place."""
        return self.table is None and super()._is_kept_elsewhere(projection)

    def _decoded(self, device: torch.device) -> Tensor:
        """The table on a device."""
        return views.rows(self.matrix("packed"), torch.arange(self.num_embeddings), self.dtype).to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and cast the module; the packed bytes stay, for the CPU decodes them, and elsewhere there is a table."""
        data = self._buffers.pop("packed", None)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if data is not None:
            self.register_buffer("packed", data)
            device = self.like.device
            self.table = None if device == _CPU else self._decoded(device)
        return self

    def forward(self, index: Tensor) -> Tensor:
        """Look up.

        Args:
            index: `[...]`, numbers of rows, of an integer dtype.

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
    """The dtype of what an embedding gives, packed or not."""
    dtype: torch.dtype = module.dtype if isinstance(module, PackedEmbedding) else module.weight.dtype  # type: ignore[assignment]
    return dtype

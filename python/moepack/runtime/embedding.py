"""Embeddings whose rows are looked up in packed bytes: they stand where transformers has an `nn.Embedding`.

A row is decoded when its token comes, so the table is never in memory as numbers. On a GPU, whose kernels decode whole
tensors alone, the table is decoded once, when its bytes come.
"""

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
        index = torch.arange(self.num_embeddings)
        self.table = views.rows(self.matrix("packed"), index, self.dtype).to(device)
        self._buffers.pop("packed")
        self.readers.clear()

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

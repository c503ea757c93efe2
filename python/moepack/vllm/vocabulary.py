"""vLLM's method for packed embeddings and heads.

Some of vLLM's models give no quantization to their embedding, so `install` replaces the method of a layer that exists
already. On the CPU, rows are decoded when they are looked up. On a GPU, whose kernels decode whole tensors, the rows of
the rank are decoded once. A head multiplies packed bytes on both; if it is tied, by those of the embedding.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from moepack.errors import LoadError
from moepack.integrations.transformers import LINEAR
from moepack.modules.embedding import PackedEmbedding
from moepack.modules.linear import PackedLinear
from moepack.slices import Selection, enclosing
from moepack.stores.module import PackedModule
from moepack.vllm.parts import Part, Slab, Source

__all__ = ["PackedVocabularyMethod"]


class PackedVocabularyMethod(QuantizeMethodBase):  # type: ignore[misc]
    """An embedding or a head whose rows are tokens.

    Args:
        part: the packed matrix.
    """

    def __init__(self, part: Part) -> None:
        self.part = part

    def create_weights(self, layer: torch.nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        """Add nothing: `install` adds the packed rows."""

    def install(self, layer: Any, source: Source, has_head: bool) -> None:
        """Replace the weights of a layer by the packed rows of the rank.

        Args:
            layer: an embedding or a head.
            source: the directory.
            has_head: whether the model has a head of its own. Otherwise an embedding is also the head.

        Raises:
            LoadError: vLLM's layer has a different shape.
            CorruptionError, DeviceError, DeviceMemoryError: as of `Source.attach`.
        """
        _, rows, columns = self.part.shapes[LINEAR]
        if (layer.org_vocab_size, layer.embedding_dim) != (rows, columns) or layer.num_added_embeddings:
            found = layer.num_embeddings, layer.embedding_dim
            raise LoadError(f"vLLM's layer has shape {found} instead of {(rows, columns)}", **source.place(self.name))
        own = range(layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index)
        layer.packed_table = layer.packed_head = None
        is_head = isinstance(layer, ParallelLMHead)
        if own and not is_head:
            held = enclosing(own, rows, (grain := source.grain(self.name)).rows, grain.least)
            layer.packed_table = self._table(held, layer.params_dtype, source)
            layer.packed_first = own.start - held.start
        if own and (is_head or not has_head):
            layer.packed_head = Slab(self.part, own, range(columns))
            layer.packed_head.load(source, layer.params_dtype)
        if "weight" in layer._parameters:
            del layer.weight
        layer.use_fused_embedding = False  # it reads `weight`
        layer.quant_method = self
        source.taken.add(self.name)

    @property
    def name(self) -> str:
        """The name of the tensor."""
        return self.part.tensors[LINEAR]

    def _table(self, held: range, dtype: torch.dtype, source: Source) -> PackedEmbedding:
        _, _, columns = self.part.shapes[LINEAR]
        module = PackedEmbedding(len(held), columns, dtype)
        data = source.cut(self.name, Selection([0], held, range(columns)))
        if source.device.type == "cpu":
            module.attach(*PackedEmbedding.projections, data, **source.place(self.name))
        else:
            module.decode(data, source.device)
        return module

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        """Look up the rank's rows, counted from its first; return (..., H)."""
        if layer.packed_table is None:
            return torch.zeros(*input_.shape, layer.embedding_dim, dtype=layer.params_dtype, device=input_.device)
        found: torch.Tensor = layer.packed_table(input_ + layer.packed_first)
        return found

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply activations (..., H) to logits of the rank's tokens, zero for tokens that only vLLM has."""
        size = layer.num_embeddings_per_partition
        if layer.packed_head is None:
            logits = x.new_zeros((*x.shape[:-1], size))
        else:
            logits = layer.packed_head(x)
            if logits.shape[-1] < size:
                logits = functional.pad(logits, (0, size - logits.shape[-1]))
        return logits if bias is None else logits + bias

    def packed(self, layer: Any) -> Iterator[tuple[PackedModule, str, str]]:
        """Yield the packed modules of a layer with their projection and tensor name."""
        if layer.packed_table is not None:
            yield layer.packed_table, *PackedEmbedding.projections, self.name
        if layer.packed_head is not None:
            yield layer.packed_head.product, *PackedLinear.projections, self.name

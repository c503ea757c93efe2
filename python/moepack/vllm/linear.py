"""vLLM's method for linear layers that are packed, alone or merged.

vLLM merges layers that checkpoints store separately (queries, keys and values; gate and up). Each part stays a product
of its own, so parts may have different formats, or be ordinary weights. The modules have no parameters that vLLM knows,
so its own loading skips them; `loader` loads them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearMethodBase

from moepack.errors import LoadError
from moepack.integrations.transformers import LINEAR
from moepack.modules.linear import PackedLinear
from moepack.stores.module import PackedModule
from moepack.vllm.parts import Part, Slab, Source

__all__ = ["PackedLinearMethod"]


class PackedLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """A linear layer, or several layers with concatenated outputs.

    Args:
        parts: the layers, in the order of their outputs. At least one is packed.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Add slabs without bytes to vLLM's layer, one for each part.

        Raises:
            LoadError: vLLM's layer has a different shape, or splits it in a way that is not known.
        """
        columns = self._columns(layer, input_size, input_size_per_partition)
        spans = [*self._spans(layer, output_partition_sizes)]
        layer.packed_slabs = nn.ModuleList(Slab(part, rows, columns) for part, rows in spans)
        layer.packed_dtype = params_dtype
        # vLLM finds the device of a quantized layer by this name, to place adapters
        layer.register_buffer("qweight", torch.empty(0, dtype=torch.uint8), persistent=False)

    def _columns(self, layer: Any, total: int, own: int) -> range:
        """Return the inputs of the rank."""
        for part in self.parts:
            self._require(part.shapes[LINEAR][2] == total, f"inputs {total}")
        start = 0 if own == total else layer.tp_rank * own
        return range(start, start + own)

    def _spans(self, layer: Any, sizes: Sequence[int]) -> Iterator[tuple[Part, range]]:
        """Yield the outputs of the rank in each part, in the order of the layer's outputs."""
        ranks = [_ranks(layer, number) for number in range(len(sizes))]
        rows = [part.shapes[LINEAR][1] for part in self.parts]
        if sum(rows) == sum(sizes):
            yield from zip(self.parts, map(range, rows), strict=True)
        elif len(rows) == len(sizes):
            for part, total, size, (rank, count) in zip(self.parts, rows, sizes, ranks, strict=True):
                self._require(total == size * count, f"outputs {size} on each of {count} ranks")
                yield part, range(rank * size, (rank + 1) * size)
        else:
            totals = [size * count for size, (_, count) in zip(sizes, ranks, strict=True)]
            self._require(len(rows) == 1 and sum(totals) == rows[0], f"outputs {totals}")
            for number, (size, (rank, _)) in enumerate(zip(sizes, ranks, strict=True)):
                start = sum(totals[:number]) + rank * size
                yield self.parts[0], range(start, start + size)

    def _require(self, agrees: bool, found: str) -> None:
        if not agrees:
            names = ", ".join(part.tensors[LINEAR] for part in self.parts)
            shapes = [part.shapes[LINEAR] for part in self.parts]
            raise LoadError(f"vLLM's layer has a different shape from {names}: {found} instead of {shapes}")

    def load(self, layer: Any, source: Source) -> None:
        """Load the layer's slabs; errors as of `Source.attach`."""
        for slab in layer.packed_slabs:
            slab.load(source, layer.packed_dtype)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply activations of shape (..., C) to outputs of shape (..., R), in the same dtype."""
        products = [slab(x) for slab in layer.packed_slabs]
        product = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        return product if bias is None else product + bias

    def packed(self, layer: Any) -> Iterator[tuple[PackedModule, str, str]]:
        """Yield each packed module of a layer with its projection and tensor name."""
        for slab in layer.packed_slabs:
            if slab.part.packed:
                yield slab.product, *PackedLinear.projections, slab.name


def _ranks(layer: Any, number: int) -> tuple[int, int]:
    """Return the rank and the number of ranks among which vLLM splits an output of a layer.

    Several ranks share a head of keys and values if there are more ranks than such heads.
    """
    replicas = getattr(layer, "num_kv_head_replicas", 1) if number > 0 else 1
    return layer.tp_rank // replicas, layer.tp_size // replicas

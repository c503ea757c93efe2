"""vLLM's methods for packed layers, which call moepack's modules below vLLM's.

The modules have no parameters, so vLLM's own loading skips them; `loader` attaches their bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearMethodBase

from moepack.errors import LoadError
from moepack.integrations.transformers import LINEAR
from moepack.modules.experts import PackedExperts
from moepack.modules.linear import PackedLinear
from moepack.stores.base import Shape
from moepack.stores.module import PackedModule

__all__ = ["PackedExpertsMethod", "PackedLinearMethod", "Part"]


@dataclass(frozen=True)
class Part:
    """A module of the checkpoint with packed tensors.

    Attributes:
        tensors: tensor names by projection.
        shapes: shapes (E, R, C) by projection. A linear layer has E = 1.
    """

    tensors: Mapping[str, str]
    shapes: Mapping[str, Shape]


class PackedLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """A linear layer, or several layers with concatenated outputs.

    Args:
        parts: the packed layers, in the order of their outputs.
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
        """Add packed layers without bytes to vLLM's layer.

        Raises:
            LoadError: vLLM's layer has a different shape.
        """
        shapes = [part.shapes[LINEAR] for part in self.parts]
        found = sum(rows for _, rows, _ in shapes), {columns for *_, columns in shapes}
        _require(self.parts, found == (sum(output_partition_sizes), {input_size_per_partition}))
        layer.packed_parts = nn.ModuleList(PackedLinear(rows, columns) for _, rows, columns in shapes)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply activations of shape (..., C) to outputs of shape (..., R), in the same dtype."""
        products = [part(x) for part in layer.packed_parts]
        product = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        return product if bias is None else product + bias

    def packed(self, layer: Any) -> Iterator[tuple[PackedModule, str, str]]:
        """Yield each packed module of a layer with its projection and tensor name."""
        for module, part in zip(layer.packed_parts, self.parts, strict=True):
            yield module, *PackedLinear.projections, part.tensors[LINEAR]


class PackedExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Gated experts. vLLM computes the routing and the shared experts.

    Args:
        part: the packed experts.
        moe: vLLM's settings of the layer.
    """

    def __init__(self, part: Part, moe: Any) -> None:
        super().__init__(moe)
        self.part = part

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Add packed experts without bytes to vLLM's layer.

        Raises:
            LoadError: vLLM's experts have a different shape.
        """
        expected = num_experts, intermediate_size_per_partition, hidden_size
        _require([self.part], self.part.shapes["gate_proj"] == expected)
        layer.packed_experts = PackedExperts(self.part.shapes, functional.silu)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return None, because no kernel of vLLM runs."""

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of the chosen experts' outputs, shape (T, H), in the dtype of `x`."""
        outputs: torch.Tensor = layer.packed_experts(x, topk_ids.long(), topk_weights)
        return outputs

    def packed(self, layer: Any) -> Iterator[tuple[PackedModule, str, str]]:
        """Yield the packed module of a layer with each projection and tensor name."""
        for projection, name in self.part.tensors.items():
            yield layer.packed_experts, projection, name


def _require(parts: Sequence[Part], agree: bool) -> None:
    if not agree:
        names = ", ".join(name for part in parts for name in part.tensors.values())
        shapes = [[*part.shapes.values()] for part in parts]
        raise LoadError(f"vLLM's layer has a different shape from {names}: {shapes}")

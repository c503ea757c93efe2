"""vLLM's method for packed experts. vLLM computes the routing, the shared experts and the sum over ranks.

Expert parallelism gives each rank whole experts. Tensor parallelism splits the rows of the gate and up projections and
the columns of the down projection if their formats can be cut there. Otherwise each rank takes whole experts, too: the
sum over ranks is the same.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from moepack.errors import LoadError
from moepack.modules.experts import PackedExperts
from moepack.slices import Selection, enclosing
from moepack.stores.module import PackedModule
from moepack.vllm.parts import Part, Source

__all__ = ["PackedExpertsMethod"]

DOWN = "down_proj"


class PackedExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Gated experts with SwiGLU.

    Args:
        part: the packed experts.
        moe: vLLM's settings of the layer.
    """

    def __init__(self, part: Part, moe: Any) -> None:
        super().__init__(moe)
        self.part = part

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        """The dtype in which vLLM's router writes the chosen experts; the kernels read it."""
        return torch.int64

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """Return the sizes unchanged: vLLM pads them for kernels that do not run here."""
        return hidden_size, intermediate_size_per_partition

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Check that the packed experts are those of vLLM's layer. `load` adds them.

        Raises:
            LoadError: vLLM's experts have a different shape.
        """
        ranks = layer.moe_config.moe_parallel_config.tp_size
        expected = attributes.get("global_num_experts", num_experts), intermediate_size_per_partition * ranks
        if self.part.shapes["gate_proj"] != (*expected, hidden_size):
            shapes, names = [*self.part.shapes.values()], ", ".join(self.part.tensors.values())
            found = (*expected, hidden_size)
            raise LoadError(f"vLLM's layer has a different shape from {names}: {found} instead of {shapes}")
        layer.packed_experts = None
        layer.register_buffer("packed_slots", None, persistent=False)

    def load(self, layer: Any, source: Source) -> None:
        """Load the rank's experts; errors as of `Source.attach`."""
        experts, channels = self._own(layer, source)
        count, *_ = self.part.shapes["gate_proj"]
        if len(experts) < count:
            slots = torch.full((count,), len(experts), dtype=torch.int64)
            slots[experts] = torch.arange(len(experts))
            layer.packed_slots = slots.to(source.device)
        selections = {}
        for projection, (_, rows, columns) in self.part.shapes.items():
            cut = (range(rows), channels) if projection == DOWN else (channels, range(columns))
            selections[projection] = Selection(experts, *cut)
        if not experts:  # more ranks than experts
            source.taken.update(self.part.tensors.values())
            return
        shapes = {name: (len(each.experts), len(each.rows), len(each.columns)) for name, each in selections.items()}
        module = PackedExperts(shapes, functional.silu)
        for projection, selection in selections.items():
            source.attach(module, projection, self.part.tensors[projection], selection)
        layer.packed_experts = module

    def _own(self, layer: Any, source: Source) -> tuple[Sequence[int], range]:
        """Return the rank's experts, and its channels of each of them."""
        count, channels, _ = self.part.shapes["gate_proj"]
        parallel = layer.moe_config.moe_parallel_config
        if layer._expert_map is not None:
            return torch.nonzero(layer._expert_map >= 0).reshape(-1).tolist(), range(channels)
        if parallel.tp_size == 1:
            return range(count), range(channels)
        size = channels // parallel.tp_size
        span = range(parallel.tp_rank * size, (parallel.tp_rank + 1) * size)
        if all(self._allows(source, projection, span) for projection in self.part.shapes):
            return range(count), span
        source.by_experts.update(self.part.tensors.values())
        bounds = [count * rank // parallel.tp_size for rank in (parallel.tp_rank, parallel.tp_rank + 1)]
        return range(*bounds), range(channels)

    def _allows(self, source: Source, projection: str, span: range) -> bool:
        """Return whether a projection can be cut at a rank's channels."""
        _, rows, columns = self.part.shapes[projection]
        grain = source.grain(self.part.tensors[projection])
        size, unit = (columns, grain.columns) if projection == DOWN else (rows, grain.rows)
        return enclosing(span, size, unit, grain.least) == span

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
        """Return the weighted sum of the rank's chosen experts' outputs, shape (T, H), in the dtype of `x`."""
        if layer.packed_experts is None:
            return torch.zeros_like(x)
        chosen = topk_ids.long()
        if layer.packed_slots is not None:
            chosen = layer.packed_slots[chosen]
        outputs: torch.Tensor = layer.packed_experts(x, chosen, topk_weights)
        return outputs

    def packed(self, layer: Any) -> Iterator[tuple[PackedModule, str, str]]:
        """Yield the packed module of a layer with each projection and tensor name."""
        if layer.packed_experts is not None:
            for projection, name in self.part.tensors.items():
                yield layer.packed_experts, projection, name

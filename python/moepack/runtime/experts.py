"""Expert modules that compute from packed bytes: they stand where transformers has its own experts modules.

`PackedExperts` replaces the standard layout (`gate_up_proj`, `down_proj`, called with top-k indices and weights), and
`PackedSwitchExperts` the `ModuleDict` of Switch Transformers (called with a one-hot mask). Both sort the tokens by
expert, so that each expert's bytes are decoded once a call whatever the number of its tokens, and multiply all experts
in one call of the kernel.

Invariants, beside those of `PackedModule`:
- Products accumulate in float32, and so does the sum over a token's experts, in an order that depends on the routing
  alone: the same input gives the same output, whatever the number of threads.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from moepack._core import PackedTensor, gated_experts
from moepack.runtime.compute import product_mode
from moepack.runtime.packed import PackedModule, Shape, as_numpy, inference_only, require_cpu

__all__ = ["PackedExperts", "PackedSwitchExperts", "Routing", "is_silu", "sort_by_expert"]


class Routing(NamedTuple):
    """Token and expert pairs in the order of the experts.

    Attributes:
        order: [N], the positions in the flattened [T, k] index, sorted by expert, sentinels left out.
        offsets: [E + 1], where each expert's run starts in `order`; the last is N.
    """

    order: NDArray[np.int64]
    offsets: NDArray[np.int64]


def sort_by_expert(index: NDArray[np.int64], experts: int) -> Routing:
    """Sort a flat array of expert numbers, stably; numbers >= `experts` are sentinels and are dropped."""
    offsets = np.zeros(experts + 1, np.int64)
    np.cumsum(np.bincount(index, minlength=experts)[:experts], out=offsets[1:])
    order = index.argsort(kind="stable")[: offsets[-1]]
    return Routing(order, offsets)


class _Experts(PackedModule, ABC):
    """Routing around packed projections."""

    def __init__(self, shapes: Mapping[str, Shape], act_fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(shapes)
        self.num_experts = next(iter(self.shapes.values()))[0]
        self.act_fn = act_fn

    @abstractmethod
    def _experts(self, x: torch.Tensor, offsets: NDArray[np.int64]) -> torch.Tensor:
        """Run the experts: x [N, H], sorted by expert, to [N, H] float32."""

    def _forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Route, run and sum: hidden_states [T, H], index and weights [T, k], to [T, H] in the input's dtype."""
        require_cpu(hidden_states)
        tokens, top_k = index.shape
        positions, offsets = sort_by_expert(index.reshape(-1).numpy(), self.num_experts)
        weights = weights.float().contiguous()
        if tokens == 1:
            outputs = self._experts(hidden_states.expand(len(positions), -1), offsets)
            return torch.mm(weights.take(torch.from_numpy(positions)).unsqueeze(0), outputs).to(hidden_states.dtype)
        rows = torch.from_numpy(positions // top_k)
        outputs = self._experts(hidden_states.index_select(0, rows), offsets)
        return _weighted_sum(outputs, positions, weights).to(hidden_states.dtype)

    def _run(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return inference_only(self._forward, hidden_states, index, weights)


class PackedExperts(_Experts):
    """Experts with a gate: down(act(gate(x)) * up(x)), as in Mixtral, Qwen, DeepSeek, OLMoE, Phi-MoE and GraniteMoE.

    Args:
        shapes: (E, R, C) of `gate_proj` and `up_proj` (E, I, H) and `down_proj` (E, H, I).
        act_fn: the activation of the module that is replaced.
    """

    projections = ("gate_proj", "up_proj", "down_proj")

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Sum the chosen experts' outputs.

        Args:
            hidden_states: [T, H], float32, bfloat16 or float16, on the CPU.
            top_k_index: [T, k], the chosen experts; a number >= E is skipped.
            top_k_weights: [T, k], floating point.

        Returns:
            [T, H] in the dtype of `hidden_states`.
        """
        return self._run(hidden_states, top_k_index, top_k_weights)

    def _forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Let the kernels run the whole layer where they can."""
        require_cpu(hidden_states)
        if is_silu(self.act_fn):
            gate, up, down = (self.matrix(projection) for projection in self.projections)
            if isinstance(gate, PackedTensor) and isinstance(up, PackedTensor) and isinstance(down, PackedTensor):
                modes = tuple(product_mode(matrix, self.mode) for matrix in (gate, up, down))
                choice = index.long().contiguous().numpy(), weights.float().contiguous().numpy()
                outputs = gated_experts(gate, up, down, as_numpy(hidden_states), *choice, modes)
                return torch.from_numpy(outputs).to(hidden_states.dtype)
        return super()._forward(hidden_states, index, weights)

    def _experts(self, x: torch.Tensor, offsets: NDArray[np.int64]) -> torch.Tensor:
        x = x.contiguous()
        gated = self.act_fn(self._product("gate_proj", x, offsets))
        return self._product("down_proj", gated.mul_(self._product("up_proj", x, offsets)), offsets)


class PackedSwitchExperts(_Experts):
    """The experts of Switch Transformers: wo(act(wi(x))), one expert a token.

    Args:
        shapes: (E, R, C) of `wi` (E, d_ff, d_model) and `wo` (E, d_model, d_ff).
        act_fn: the activation of the module that is replaced.
    """

    projections = ("wi", "wo")

    def forward(
        self, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weigh the chosen experts' outputs.

        Args:
            hidden_states: [T, H], float32, bfloat16 or float16, on the CPU.
            selected_experts: [T, 1, E] one-hot; a token beyond its expert's capacity has no one and yields zeros.
            routing_weights: [T, 1].

        Returns:
            [T, H] in the dtype of `hidden_states`.
        """
        chosen, index = selected_experts.max(dim=-1)
        index = torch.where(chosen > 0, index, self.num_experts)
        return self._run(hidden_states, index, routing_weights)

    def _experts(self, x: torch.Tensor, offsets: NDArray[np.int64]) -> torch.Tensor:
        return self._product("wo", self.act_fn(self._product("wi", x, offsets)), offsets)


def is_silu(act_fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether an activation is SiLU, of which transformers has a class of its own beside torch's."""
    return act_fn is functional.silu or type(act_fn).__name__ in ("SiLU", "SiLUActivation")


def _weighted_sum(outputs: torch.Tensor, positions: NDArray[np.int64], weights: torch.Tensor) -> torch.Tensor:
    """Sum each token's outputs.

    An embedding bag gathers and sums in one pass, a third of the time of putting the rows back in order first.

    Args:
        outputs: [N, H] float32, in the order of the experts.
        positions: [N], where each row belongs in the flattened [T, k].
        weights: [T, k] float32.

    Returns:
        [T, H]; what no row belongs to counts as zero.
    """
    count, total = len(positions), weights.numel()
    rows = np.full(total, count, np.int64)
    rows[positions] = np.arange(count)
    if count < total:
        outputs = functional.pad(outputs, (0, 0, 0, 1))
    bags = torch.from_numpy(rows).view(weights.shape)
    return functional.embedding_bag(bags, outputs, mode="sum", per_sample_weights=weights)

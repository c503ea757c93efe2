"""Expert modules that compute from packed bytes: they stand where transformers has its own experts modules.

`PackedExperts` replaces the standard layout (`gate_up_proj`, `down_proj`, called with top-k indices and weights), and
`PackedSwitchExperts` the `ModuleDict` of Switch Transformers (called with a one-hot mask).

Invariants, beside those of `PackedModule`:
- Products accumulate in float32, and so does the sum over a token's experts, in an order that depends on the routing
  alone: the same input gives the same output, whatever the number of threads.
"""

from collections.abc import Mapping

import torch

from moepack.runtime.backends import Activation, backend_for
from moepack.runtime.ops import activation_name
from moepack.runtime.ops import experts as traced_experts
from moepack.runtime.packed import PackedModule, Shape, inference_only

__all__ = ["PackedExperts", "PackedSwitchExperts"]


class _Experts(PackedModule):
    """Packed projections with an activation between them.

    Args:
        shapes: (E, R, C) of the projections.
        act_fn: the activation of the module that is replaced.
    """

    def __init__(self, shapes: Mapping[str, Shape], act_fn: Activation) -> None:
        super().__init__(shapes)
        self.num_experts = next(iter(self.shapes.values()))[0]
        self.act_fn = act_fn
        self._activation = activation_name(act_fn)

    def _run(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum the chosen experts' outputs: [T, H], [T, k], [T, k], to [T, H] in the dtype of `hidden_states`."""
        x, index, weights = self.brought_home(hidden_states, index, weights)
        data = self.packed_bytes() if torch.compiler.is_compiling() else None
        if data is None:
            outputs = inference_only(self._forward, x, index, weights)
        else:
            rows = self.shapes[self.projections[-1]][1]
            outputs = traced_experts(x, index, weights, data, rows, self._activation, self.mode)
        return outputs.to(device=hidden_states.device, dtype=hidden_states.dtype)

    def _forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        backend = backend_for(hidden_states.device)
        outputs: torch.Tensor | None = None
        for matrices, chosen in self.store.portions(self, index, hidden_states.device):
            portion = backend.experts(matrices, hidden_states, chosen, weights, self.act_fn, self.mode)
            outputs = portion if outputs is None else outputs.add_(portion)
        assert outputs is not None
        return outputs


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
            hidden_states: [T, H], float32, bfloat16 or float16, on the device of a backend.
            top_k_index: [T, k], the chosen experts; a number >= E is skipped.
            top_k_weights: [T, k], floating point.

        Returns:
            [T, H] in the dtype of `hidden_states`.
        """
        return self._run(hidden_states, top_k_index, top_k_weights)


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
            hidden_states: [T, H], float32, bfloat16 or float16, on the device of a backend.
            selected_experts: [T, 1, E] one-hot; a token beyond its expert's capacity has no one and yields zeros.
            routing_weights: [T, 1].

        Returns:
            [T, H] in the dtype of `hidden_states`.
        """
        chosen, index = selected_experts.max(dim=-1)
        index = torch.where(chosen > 0, index, self.num_experts)
        return self._run(hidden_states, index, routing_weights)

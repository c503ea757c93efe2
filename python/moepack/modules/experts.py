"""Expert modules that compute from packed bytes. They replace transformers' expert modules.

`PackedExperts` replaces the standard layout (`gate_up_proj`, `down_proj`, called with top-k indices and weights).
`SparseExperts` and `RefinedExperts` replace the same layout and compute only the channels that matter for a token.
`PackedPlainExperts` replaces the layout without a gate. `PackedOwnExperts` handles other computations between and after
the products: it runs the code of the replaced module there. `PackedIdentityExperts`, `PackedEveryExperts` and
`PackedSwitchExperts` have other call conventions.

Invariants, in addition to those of `PackedModule`:
- Products accumulate in float32. The sum over a token's experts is also in float32, in an order that depends only on
  the routing. The same input gives the same output for any number of threads, unless a store splits calls between
  devices (`moepack.stores.tiers`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from moepack.backends import Activation, backend_for
from moepack.backends.gpu.recording import interlude
from moepack.modules import gradients
from moepack.modules.adapters import NONE, Adapters, LowRank, Place, joined, split
from moepack.modules.ops import activation_name
from moepack.modules.ops import experts as traced_experts
from moepack.modules.ops import grouped as traced_grouped
from moepack.modules.own import OwnCode
from moepack.stores.base import Call, Matrices, sum_portions
from moepack.stores.module import PackedModule, Shape
from moepack.stores.streaming.prediction import Foresight

__all__ = [
    "PackedEveryExperts",
    "PackedExpertProducts",
    "PackedExperts",
    "PackedIdentityExperts",
    "PackedOwnExperts",
    "PackedPlainExperts",
    "PackedSwitchExperts",
    "RefinedExperts",
    "SparseExperts",
]

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A grouped product of rows sorted by expert, the offsets of each expert's first row (`Backend.grouped`), and the token
of each row."""

Parts = Callable[..., Iterator[torch.Tensor]]
"""Yields the terms of an output, given the inputs and the factors of adapters (`adapters.split`)."""


def _adapted(
    adapters: Sequence[LowRank], product: Callable[..., torch.Tensor], x: torch.Tensor, offsets: torch.Tensor,
    tokens: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """A grouped product plus the updates of adapters, [N, R] float32."""
    outputs = product(x, offsets)
    for adapter in adapters:
        outputs = outputs + adapter.product(x, offsets, tokens)
    return outputs


class _Routed(PackedModule, ABC):
    """Experts as separate products with torch operations between and after them; gradients use this form."""

    num_experts: int
    takes_adapters = True

    def _parts(
        self,
        adapted: Sequence[Place],
        x: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        *factors: torch.Tensor,
    ) -> Iterator[torch.Tensor]:
        """Yield the terms of the output, [T, H] float32, one for each portion of the store."""
        adapters = joined(adapted, factors)
        for matrices, chosen in self.store.portions(self, index, x.device):
            products = [partial(gradients.grouped, matrix=matrix, mode=self.mode) for matrix in matrices]
            yield self._portion(self._adapted(products, adapters), x, chosen, weights)

    def _summed(self, parts: Parts, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """The sum of the terms, [T, H] float32, in the order in which they are yielded."""
        return sum(parts(x, *others), torch.zeros_like(x, dtype=torch.float32))

    def _adapted(self, products: Sequence[Callable[..., torch.Tensor]], adapters: Adapters) -> Sequence[Product]:
        """The products of all projections, including their adapters."""
        pairs = zip(self.projections, products, strict=True)
        return [partial(_adapted, adapters.get(name, ()), product) for name, product in pairs]

    def _traced(self, data: Sequence[torch.Tensor], adapters: Adapters) -> Sequence[Product]:
        """The products of all projections in compiled code."""
        pairs = zip(data, self.shapes.values(), strict=True)
        products = [partial(traced_grouped, data=bytes_, rows=shape[1], mode=self.mode) for bytes_, shape in pairs]
        return self._adapted(products, adapters)

    def _portion(
        self, products: Sequence[Product], x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Sum the outputs of the experts in `index`, [T, H] float32; other experts contribute zero."""
        order = index.reshape(-1).argsort(stable=True)
        owner = index.reshape(-1)[order]
        offsets = torch.searchsorted(owner, torch.arange(self.num_experts + 1, device=owner.device))
        tokens, expert = order // index.shape[1], owner.clamp(max=self.num_experts - 1)
        rows = x[tokens]
        *first, last = products
        inner = self.between([product(rows, offsets, tokens) for product in first], expert)
        outputs = self.behind(last(inner, offsets, tokens), expert)
        share = weights.reshape(-1)[order].float() * (owner < self.num_experts)
        placed = torch.empty_like(outputs).index_copy(0, order, outputs * share.unsqueeze(-1))
        return placed.view(*index.shape, -1).sum(1)

    @abstractmethod
    def between(self, parts: list[torch.Tensor], expert: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the last product, given the outputs of the others, [N, I] each, and the experts [N]."""

    def behind(self, outputs: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """Transform the outputs of the last product, [N, H], before they are weighted."""
        return outputs


class _Experts(_Routed):
    """Packed projections with an activation between them.

    Args:
        shapes: (E, R, C) of the projections.
        act_fn: the activation of the replaced module.
    """

    is_shared = True

    def __init__(self, shapes: Mapping[str, Shape], act_fn: Activation) -> None:
        super().__init__(shapes)
        self.num_experts = next(iter(self.shapes.values()))[0]
        self.act_fn = act_fn
        self._activation = activation_name(act_fn)

    def _run(
        self,
        hidden_states: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        adapters: Adapters = NONE,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Sum the chosen experts' outputs: [..., H], [T, k], [T, k] to the shape of `hidden_states`, in its dtype if
        none is given.
        """
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        x, index, weights = self.brought_home(flat, index, weights)
        data = self.packed_bytes() if torch.compiler.is_compiling() else None
        if data is None:
            adapted, factors = split(adapters, x.device)
            parts = partial(self._parts, adapted)
            forward = partial(self._summed, parts) if adapted else self._forward
            if self.store.asks_host or (adapted and x.is_cuda):  # adapters read expert offsets on the host
                forward = partial(interlude, forward)
            outputs = gradients.recomputed(forward, parts, x, index, weights, *factors)
        elif adapters or (torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)):
            outputs = self._portion(self._traced(data, adapters), x, index, weights)
        else:
            rows = x.shape[1]
            outputs = traced_experts(x, index, weights, data, rows, self._activation, self.mode)
        dtype = hidden_states.dtype if dtype is None else dtype
        return outputs.to(device=hidden_states.device, dtype=dtype).view(hidden_states.shape)

    def _forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        backend_for(hidden_states.device)  # raise for unsupported devices before any bytes are read
        return self.store.summed(self, Call(hidden_states, index, weights), self._multiply)

    def _multiply(self, matrices: Matrices, call: Call) -> torch.Tensor:
        """Sum the outputs of the experts on the device of the call's tensors."""
        return backend_for(call.x.device).experts(matrices, *call, self.act_fn, self.mode)

    def between(self, parts: list[torch.Tensor], expert: torch.Tensor) -> torch.Tensor:
        """Return the activation of the first output times the others."""
        inner = self.act_fn(parts[0])
        for part in parts[1:]:
            inner = inner * part
        return inner


class PackedExperts(_Experts):
    """Gated experts: down(act(gate(x)) * up(x)), as in Mixtral, Qwen, DeepSeek, OLMoE, Phi-MoE and GraniteMoE.

    Args:
        shapes: (E, R, C) of `gate_proj` and `up_proj` (E, I, H) and `down_proj` (E, H, I).
        act_fn: the activation of the replaced module.
    """

    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    can_overlap = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        adapters: Adapters = NONE,
    ) -> torch.Tensor:
        """Sum the chosen experts' outputs.

        Args:
            hidden_states: [T, H], float32, bfloat16 or float16, on the device of a backend.
            top_k_index: [T, k], the chosen experts; values >= E are skipped.
            top_k_weights: [T, k], floating point.
            adapters: low-rank updates of the projections.

        Returns:
            [T, H] in the dtype of `hidden_states`.
        """
        return self._run(hidden_states, top_k_index, top_k_weights, adapters)

    def in_float32(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Like `forward` without adapters, but return float32, without rounding."""
        return self._run(hidden_states, index, weights, dtype=torch.float32)


class PackedPlainExperts(PackedExperts):
    """Experts without a gate: down(act(up(x))), as in NemotronH."""

    projections = ("up_proj", "down_proj")


class PackedIdentityExperts(PackedExperts):
    """Gated experts plus identity experts, whose indices follow the gated ones (LongCat's zero-computation experts)."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        adapters: Adapters = NONE,
    ) -> torch.Tensor:
        """Sum the chosen experts' outputs and the identity share; arguments and result as in `PackedExperts`."""
        share = (top_k_weights * (top_k_index >= self.num_experts)).sum(-1, keepdim=True)
        outputs = super().forward(hidden_states, top_k_index, top_k_weights, adapters)
        return outputs + (hidden_states * share).to(hidden_states.dtype)


class PackedEveryExperts(PackedExperts):
    """Gated experts that receive one row per token and expert, scaled by the router and zero if not chosen.

    Llama 4 calls its experts this way. Zero rows produce zero outputs and are skipped.
    """

    def forward(self, hidden_states: torch.Tensor, adapters: Adapters = NONE) -> torch.Tensor:  # type: ignore[override]
        """Run the experts on [E * T, H], ordered by expert; return the same shape and dtype."""
        rows = hidden_states.any(dim=-1).nonzero()
        index = rows // (len(hidden_states) // self.num_experts)
        outputs = torch.zeros_like(hidden_states)
        chosen = rows.squeeze(-1)
        weights = torch.ones_like(index, dtype=torch.float32)
        outputs[chosen] = self._run(hidden_states[chosen], index, weights, adapters)
        return outputs


class PackedOwnExperts(OwnCode, _Routed):
    """Experts with packed products; everything between and after the products runs the replaced module's code.

    This covers its `_apply_gate` (for example a clamped SwiGLU), its biases and its final norm, computed by torch in
    float32.

    Args:
        shapes: (E, R, C) of the projections.
        original: a module with transformers' experts interface.
    """

    def __init__(self, shapes: Mapping[str, Shape], original: Any) -> None:
        self.projections = tuple(shapes)
        super().__init__(shapes)
        self.num_experts = next(iter(self.shapes.values()))[0]
        self.adopt(original)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        adapters: Adapters = NONE,
    ) -> torch.Tensor:
        """Sum the chosen experts' outputs; arguments and result as in `PackedExperts`."""
        x, index, weights = self.brought_home(hidden_states, top_k_index, top_k_weights)
        data = self.packed_bytes() if torch.compiler.is_compiling() else None
        if data is None:
            adapted, factors = split(adapters, x.device)
            parts = partial(self._parts, adapted)
            forward = partial(self._summed, parts) if adapted else self._forward
            outputs = gradients.recomputed(forward, parts, x, index, weights, *factors)
        else:
            outputs = self._portion(self._traced(data, adapters), x, index, weights)
        return outputs.to(device=hidden_states.device, dtype=hidden_states.dtype)

    def _forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        portions = self.store.portions(self, index, x.device)
        return sum_portions(portions, Call(x, index, weights), self._multiply)

    def _multiply(self, matrices: Matrices, call: Call) -> torch.Tensor:
        """Sum the outputs of the experts on the device of the call's tensors."""
        found = backend_for(call.x.device).own_experts(matrices, *call, self.code, self.mode)
        if found is None:
            products = [partial(gradients.grouped, matrix=matrix, mode=self.mode) for matrix in matrices]
            found = self._portion(self._adapted(products, NONE), *call)
        return found


class PackedExpertProducts(PackedModule):
    """One matrix per expert, for callers that sort the rows and do everything else, as in JetMoE.

    Args:
        shapes: (E, R, C) of `matrices`.
    """

    projections = ("matrices",)
    takes_adapters = True

    def forward(self, inputs: torch.Tensor, expert_size: Sequence[int], adapters: Adapters = NONE) -> torch.Tensor:
        """Multiply rows [N, C], sorted by expert, given the number of rows of each expert; return [N, R]."""
        offsets = torch.tensor([0, *expert_size]).cumsum(0)
        forward, parts = partial(self._forward, offsets), partial(self._parts, offsets)
        outputs = gradients.recomputed(forward, parts, inputs)
        for adapter in adapters.get("matrices", ()):
            outputs = outputs + adapter.to(inputs.device).product(inputs, offsets)
        return outputs.to(inputs.dtype)

    def _forward(self, offsets: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        zeros = inputs.new_zeros((len(inputs), self.shapes["matrices"][1]), dtype=torch.float32)
        return sum(self._parts(offsets, inputs), zeros)

    def _parts(self, offsets: torch.Tensor, inputs: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the terms of the output: each has the rows of some experts, and zeros elsewhere."""
        chosen = (offsets.diff() > 0).nonzero()
        zeros = inputs.new_zeros((len(inputs), self.shapes["matrices"][1]), dtype=torch.float32)
        for (matrix,), portion in self.store.portions(self, chosen, inputs.device):
            held = torch.isin(torch.arange(len(offsets) - 1), portion)
            rows = torch.repeat_interleave(held, offsets.diff()).nonzero().squeeze(-1)
            starts = torch.cat((offsets[:1], (offsets.diff() * held).cumsum(0)))
            yield zeros.index_copy(0, rows, gradients.grouped(inputs[rows], starts, matrix=matrix, mode=self.mode))


class SparseExperts(PackedExperts):
    """Gated experts that compute only the channels selected by the up projection (FloE, equation 11).

    Args:
        shapes: (E, R, C) of `up_proj` (E, I, H) and `channels` (E, I, 2 H), the gate row and the down column of each
            channel.
        act_fn: SiLU.

    Attributes:
        computed, asked: computed channels, and all channels of the tokens' experts, summed over all calls since they
            were set to 0. Concurrent calls may lose some counts. On a GPU, the matrix of the records counts
            (`ChannelKernels`), because the host must not wait for it.
        foresight: a prediction from the previous layer; None without one.
    """

    projections: tuple[str, ...] = ("up_proj", "channels")
    takes_adapters = False

    def __init__(self, shapes: Mapping[str, Shape], act_fn: Activation) -> None:
        super().__init__(shapes, act_fn)
        self.computed = self.asked = 0
        self.foresight: Foresight | None = None

    def _forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        outputs = torch.zeros_like(hidden_states, dtype=torch.float32)
        for matrices, chosen in self.store.portions(self, index, hidden_states.device):
            for portion, computed in self._portions(matrices, hidden_states, chosen, weights):
                outputs.add_(portion)
                self.computed += computed
        if index.is_cpu:
            self.asked += int((index < self.num_experts).sum()) * self.shapes["up_proj"][1]
        return outputs

    def _portion(self, *arguments: Any) -> torch.Tensor:
        """Raise: the backward pass is undefined, because the computed channels depend on the activations."""
        raise RuntimeError("experts that compute only some of their channels do not support gradients")

    def _portions(
        self, matrices: Matrices, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the terms of the output, each with its number of computed channels."""
        backend, deciding = backend_for(x.device), self._deciding(len(x))
        if not self.store.by_channels and deciding is None:
            yield backend.sparse_experts(matrices, x, index, weights, self.mode)
        else:
            yield from self._sparse_portions(matrices, x, index, weights, deciding)

    def _sparse_portions(
        self,
        matrices: Matrices,
        x: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        deciding: torch.Tensor | None,
    ) -> Iterator[tuple[torch.Tensor, int]]:
        """Like `_portions`, if the store loads single channels or another input selects them."""
        backend = backend_for(x.device)
        ups = backend.wanted_channels(matrices, x, index, self.mode, weights, deciding)
        for part in self.store.channels(self, index, ups):
            yield backend.sparse_channels(matrices[-1], x, index, weights, part)

    def _deciding(self, tokens: int) -> torch.Tensor | None:
        """Inputs that select the channels instead of the tokens' own; None to use the latter."""
        return None if self.foresight is None else self.foresight.deciding(tokens)


class RefinedExperts(SparseExperts):
    """Sparse experts that compute all channels from coarse copies and refine some of them.

    Coarse gate and up projections approximate each channel's contribution to the output. If it is large, the channel's
    record supplies the difference between fine and coarse gate rows and down columns.

    Args:
        shapes: (E, R, C) of coarse `gate_proj`, `up_proj` (E, I, H) and `down_proj` (E, H, I), and of `residuals`
            (E, I, 2 H).
        act_fn: SiLU.
    """

    projections = ("gate_proj", "up_proj", "down_proj", "residuals")

    def _sparse_portions(
        self,
        matrices: Matrices,
        x: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        deciding: torch.Tensor | None,
    ) -> Iterator[tuple[torch.Tensor, int]]:
        backend = backend_for(x.device)
        coarse = backend.coarse_channels(matrices, x, index, weights, self.mode, deciding)
        for part in self.store.channels(self, index, coarse.ups):
            yield backend.refined_channels(matrices[-1], x, index, weights, coarse, part)
        yield backend.coarse_outputs(matrices[-2], coarse, index, weights, self.mode), 0


class PackedSwitchExperts(_Experts):
    """The experts of Switch Transformers: wo(act(wi(x))), one expert per token.

    Args:
        shapes: (E, R, C) of `wi` (E, d_ff, d_model) and `wo` (E, d_model, d_ff).
        act_fn: the activation of the replaced module.
    """

    projections = ("wi", "wo")
    takes_adapters = False

    def forward(
        self, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weight the chosen experts' outputs.

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

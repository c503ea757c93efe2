"""Stands in for an experts module while its block runs: records the experts' inputs and returns given outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moepack.checkpoint.experts import form_of
from moepack.checkpoint.model import MoeLayer
from moepack.errors import UnsupportedModelError
from moepack.modules.own import OwnCode

__all__ = ["Recorder"]


class Recorder(OwnCode):
    """Stands in for an experts module with any calling convention listed in `moepack.checkpoint.experts`.

    A row is an input of one or more experts: a token, or, if the caller has sorted tokens by expert, a token of one
    expert.

    Attributes:
        inputs: [N, C], the rows of the last call; None if there was none.
        index: [N, k] int64, the experts of each row; -1 means none.
        weights: [N, k] float32.
        outputs: [N, R], returned for those rows; None returns a constant.
        answer: the constant.
    """

    def __init__(self, layer: MoeLayer, original: nn.Module) -> None:
        """Take the place of `original`.

        Raises:
            UnsupportedModelError: its calling convention is unknown.
        """
        super().__init__()
        form = form_of(original)
        if form is None and not isinstance(original, nn.ModuleDict):
            raise UnsupportedModelError(
                f"the calling convention of '{layer.name}' ({type(original).__name__}) is unknown"
            )
        self.kind = "switch" if form is None else form.kind
        self.num_experts, self.width = layer.experts, layer.projections[-1].shape[1]
        self.adopt(next(iter(original.values())) if isinstance(original, nn.ModuleDict) else original)
        self.answer = 0.0
        self.inputs: Tensor | None = None
        self.index = self.weights = torch.empty(0)
        self.outputs: Tensor | None = None

    def forward(self, hidden: Tensor, *routing: Any, **named: Any) -> Tensor:
        """Record a call of an experts module and return the outputs."""
        routing = (*routing, *named.values())
        if self.kind == "every":
            return self._every(hidden)
        if self.kind == "product":
            expert = torch.arange(self.num_experts, device=hidden.device)
            index = expert.repeat_interleave(torch.tensor(routing[0], device=hidden.device))[:, None]
            return self._record(hidden, index, torch.ones_like(index))
        index, weights = routing
        flat, own = hidden.reshape(-1, hidden.shape[-1]), None
        if self.kind == "switch":  # one-hot, [T, 1, E]
            index = torch.where(index.sum(-1) > 0, index.argmax(-1), -1)
        if self.kind == "identity":  # indices beyond the last expert return the token itself
            own = flat * (weights * (index >= self.num_experts)).sum(-1, keepdim=True)
        outputs = self._record(flat, index, weights)
        return (outputs if own is None else outputs + own.to(outputs.dtype)).view(*hidden.shape[:-1], -1)

    def _record(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        self.inputs = rows
        self.index = torch.where(index < self.num_experts, index, -1)
        self.weights = weights.float()
        return rows.new_full((len(rows), self.width), self.answer) if self.outputs is None else self.outputs

    def _every(self, hidden: Tensor) -> Tensor:
        """Handle a call with all tokens for each expert, scaled by the router and zero for experts not chosen."""
        scaled = hidden.view(self.num_experts, -1, hidden.shape[-1])
        chosen = scaled.any(-1)
        if bool((chosen.sum(0) > 1).any()):
            raise UnsupportedModelError(
                "calibration supports Llama 4 only with one expert per token, but this model routes tokens to several"
            )
        expert = chosen.int().argmax(0)
        rows = scaled[expert, torch.arange(len(expert), device=expert.device)]
        index = torch.where(chosen.any(0), expert, -1)[:, None]
        outputs = torch.zeros_like(scaled)
        # The caller sums over experts, so the position does not matter.
        outputs[0] = self._record(rows, index, torch.ones_like(index))
        return outputs.view(hidden.shape)

    def forget(self) -> None:
        """Discard the recorded data."""
        self.inputs = self.outputs = None
        self.index = self.weights = torch.empty(0)

"""Runs an experts module's own code between and after its products.

Architectures clamp, add biases, or normalize the outputs of experts. A module that replaces the experts (one with
packed products, or one that records their inputs) keeps the replaced module and calls its code.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from moepack.backends import Between, Clamped

__all__ = ["OwnCode"]


class OwnCode(nn.Module):
    """A module that replaces an experts module and reuses its computations other than the products."""

    def adopt(self, original: Any) -> None:
        """Use the code of `original`; its biases and its norm become this module's, under the same names."""
        self._original = (original,)  # in a tuple, so it is not a child with keys missing from checkpoints
        self._takes_turns = not getattr(original, "is_concatenated", True)
        for name, parameter in original.named_parameters(recurse=False):
            if parameter.ndim < 3:
                self.register_parameter(name, parameter)
        self.post_expert_norm = getattr(original, "post_expert_norm", None)
        self._is_clamped = self.post_expert_norm is None and _is_clamped(original)

    @property
    def code(self) -> Between:
        """The computations for rows of several experts."""
        (original,), clamped = self._original, None
        if self._is_clamped:
            gate_bias, bias = (self._parameters.get(name) for name in ("gate_up_proj_bias", "down_proj_bias"))
            clamped = Clamped(float(original.alpha), float(original.limit), gate_bias, bias, self._takes_turns)
        return Between(self.between, self.behind, clamped)

    def between(self, parts: Sequence[torch.Tensor], expert: int | torch.Tensor) -> torch.Tensor:
        """Compute the inputs of the last product from the outputs of the others.

        Args:
            parts: [N, I] of gate and up, or of up alone.
            expert: the expert of all rows, or of each row [N].
        """
        (original,) = self._original
        if len(parts) == 1:
            act = original.act_fn if hasattr(original, "act_fn") else original.act
            inner: torch.Tensor = act(self._biased(parts[0], "up_proj_bias", expert))
        elif hasattr(original, "_apply_gate"):
            joined = torch.stack(list(parts), -1).flatten(-2) if self._takes_turns else torch.cat(list(parts), -1)
            inner = original._apply_gate(self._biased(joined, "gate_up_proj_bias", expert))
        else:
            act = original.mlp.activation_fn if hasattr(original, "mlp") else original.act_fn
            inner = act(parts[0]) * parts[1]
        return inner.to(parts[0].dtype)

    def behind(self, outputs: torch.Tensor, expert: int | torch.Tensor) -> torch.Tensor:
        """Compute the experts' outputs [N, H] from those of the last product; `expert` as in `between`."""
        biased = self._biased(outputs, "down_proj_bias", expert)
        normed: torch.Tensor = biased if self.post_expert_norm is None else self.post_expert_norm(biased)
        return normed.to(outputs.dtype)

    def _biased(self, outputs: torch.Tensor, name: str, expert: int | torch.Tensor) -> torch.Tensor:
        bias = self._parameters.get(name)
        return outputs if bias is None else outputs + bias[expert].to(outputs.dtype)


def _is_clamped(original: Any) -> bool:
    """Whether a module's gate is that of `Clamped`, for values on both sides of its limit."""
    limits = getattr(original, "alpha", None), getattr(original, "limit", None)
    if not hasattr(original, "_apply_gate") or not all(isinstance(each, int | float) for each in limits):
        return False
    alpha, limit = map(float, limits)  # type: ignore[arg-type]
    gate, up = torch.linspace(-3 * limit, 3 * limit, 64, device="cpu").view(2, 32).flip(1)
    joined = torch.stack([gate, up], -1).flatten() if not getattr(original, "is_concatenated", True) else None
    with torch.device("cpu"), torch.no_grad():
        try:
            found = original._apply_gate(torch.cat([gate, up]) if joined is None else joined)
        except (AttributeError, RuntimeError, TypeError):
            return False
    gate = gate.clamp(max=limit)
    expected = (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-6)

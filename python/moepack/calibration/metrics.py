"""The metric of the rows of a vocabulary: how errors of a row's columns combine to an increase of the loss.

Row v of the head is multiplied by the final hidden states h, so an error e of it increases the expected loss by half
the mean over tokens of (d_v e h)^2, where d_v is the derivative of the loss with respect to the logit of v. Row v of
the embedding is added to the hidden states, so an error e costs half the mean of (e g)^2 over the tokens v, where g is
the gradient of the embedding's output. As in K-FAC (Martens and Grosse, 2015), the part that depends on the row is
separated: all rows have the metric

    M = E[|d|^2 h h^T] + E[g g^T],

with one of the terms for an embedding or a head, and both for a tensor that is both. The importance of a row relative
to the others is measured apart (`fisher`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moepack.calibration.moments import Gram

__all__ = ["RowMetric"]


class RowMetric:
    """The sum of the metric over tokens."""

    def __init__(self, weight: Tensor) -> None:
        """Start a sum for a matrix [V, C] of weights."""
        self._columns = weight.shape[1]
        self._gram = Gram(self._columns, weight.device)

    def mean(self, tokens: int) -> Tensor:
        """Return the mean over a number of tokens, [C, C] float32 on the CPU."""
        found = torch.empty(self._columns, self._columns)
        self._gram.write(found)
        return found / tokens

    @contextmanager
    def observing(self, module: nn.Linear | nn.Embedding) -> Iterator[None]:
        """Add every token that passes the module and gets a gradient."""

        def hook(_: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            if not output.requires_grad:
                return
            inputs = given[0].detach()
            add = self._looked_up if isinstance(module, nn.Embedding) else self._multiplied
            hooked: Any = output
            hooked.register_hook(lambda gradient: add(module, inputs, output.detach(), gradient))

        handle = module.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def _multiplied(self, _: nn.Module, inputs: Tensor, __: Tensor, gradient: Tensor) -> None:
        """Add inputs [..., C] of the head, weighted by the gradients [..., V] of its outputs."""
        sizes = torch.linalg.vector_norm(gradient.float(), dim=-1, keepdim=True)
        self._gram.add((inputs.float() * sizes).flatten(0, -2))

    def _looked_up(self, module: Any, ids: Tensor, output: Tensor, gradient: Tensor) -> None:
        """Add gradients [..., C] of the outputs of an embedding, which may multiply its rows by a factor."""
        rows = module.weight.detach()[ids].float()
        factor = float((rows * output).sum() / rows.square().sum().clamp(min=torch.finfo(torch.float32).tiny))
        self._gram.add((gradient.float() * factor).flatten(0, -2))

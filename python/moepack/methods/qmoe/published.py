"""Experts that QMoE's authors quantized: their codes and levels as they are, in another container."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from moepack.errors import InvalidTensorError
from moepack.methods.ternary import Ternary
from moepack.solvers.rtn import quantize_ternary

__all__ = ["Published"]


@dataclass(frozen=True)
class Published(Ternary):
    """Stores matrices whose rows hold three values already; refuses all others, so nothing is ever quantized again.

    Attributes:
        code: the entropy code, `fsv8` or `dict16`.
    """

    name: ClassVar[str] = "qmoe"

    def quantize(self, weights: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and levels of the weights [R, C] of one expert.

        Raises:
            InvalidTensorError: a row has another value than zero, one negative and one positive level.
        """
        codes, levels = quantize_ternary(weights, name=name)
        low, high = levels[:, :1], levels[:, 1:]
        values = torch.where(codes < 0, low, torch.where(codes > 0, high, torch.zeros_like(low)))
        if not torch.equal(values, weights.float()):
            raise InvalidTensorError("a row holds two levels of one sign: not a ternary matrix", tensor=name)
        return codes, levels

"""Experts quantized by QMoE's authors: their codes and levels, unchanged, in moepack's container."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from moepack.errors import InvalidTensorError
from moepack.methods.qmoe.ternary import Ternary
from moepack.solvers.rtn import quantize_ternary

__all__ = ["Published"]


@dataclass
class Published(Ternary):
    """Stores matrices whose rows already hold three values; rejects all others, so that nothing is requantized.

    Attributes:
        code: the entropy code, `fsv8` or `dict16`.
    """

    name: ClassVar[str] = "qmoe"

    def quantize(self, weights: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and levels of the weights [R, C] of one expert.

        Raises:
            InvalidTensorError: a row has values other than zero, one negative and one positive level.
        """
        codes, levels = quantize_ternary(weights, name=name)
        low, high = levels[:, :1], levels[:, 1:]
        values = torch.where(codes < 0, low, torch.where(codes > 0, high, torch.zeros_like(low)))
        if not torch.equal(values, weights.float()):
            raise InvalidTensorError("a row holds two levels of one sign: not a ternary matrix", tensor=name)
        return codes, levels

"""One model's hidden states on their way through the blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moepack.calibration.buffer import ListBuffer

__all__ = ["Stream"]


@dataclass
class Stream:
    """The states of one model, the compressed or the original one, at the block that is being run.

    Attributes:
        compressed: whether the compressed layers compute it.
        hidden: the hidden states of all samples.
        inputs: what the experts of the block read.
        index: [T, k] the experts of each token, -1 where it has none; None before the first layer of experts.
        weights: [T, k] their router weights.
        encoder: the encoder's states, in a decoder that attends to them.
    """

    compressed: bool
    hidden: ListBuffer
    inputs: ListBuffer
    index: Tensor | None = None
    weights: Tensor | None = None
    encoder: ListBuffer | None = None

    def batch(self, first: int, last: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """States of samples and, in a decoder, the encoder's states of the same samples; on the device."""
        encoder = None if self.encoder is None else self.encoder.samples(first, last).to(device)
        return self.hidden.samples(first, last).to(device), encoder

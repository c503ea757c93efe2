"""One model's hidden states on their way through the blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moepack.calibration.arguments import same
from moepack.calibration.buffer import ListBuffer

__all__ = ["Additions", "Stream"]


@dataclass
class Additions:
    """Stands in for sums where experts are solved apart: keeps what is to be added, as rows [n] and states [n, H]."""

    made: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, tokens: Tensor, states: Tensor) -> None:
        """Keep an addition; as of `ListBuffer.add`."""
        self.made.append((tokens, states))


@dataclass
class Stream:
    """The states of one model, the compressed or the original one, at the block that is being run.

    Attributes:
        compressed: whether the compressed layers compute it.
        hidden: the hidden states of all samples.
        inputs: the rows that the experts in question read; None before the first layer of experts.
        sums: the rows to which their outputs are added: `hidden`, or a buffer of its own; apart from the model, what
            keeps them.
        index: [N, k] the experts of each row, -1 where it has none.
        weights: [N, k] their router weights.
        encoder: the encoder's states, in a decoder that attends to them.
        carried: by batch, what the block before gave beside its hidden states.
    """

    compressed: bool
    hidden: ListBuffer
    inputs: ListBuffer | None = None
    sums: ListBuffer | Additions | None = None
    index: Tensor = field(default_factory=lambda: torch.empty(0, 1, dtype=torch.int32))
    weights: Tensor = field(default_factory=lambda: torch.empty(0, 1))
    encoder: ListBuffer | None = None
    carried: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    _shared: dict[int, dict[Any, Any]] = field(default_factory=dict)

    def batch(self, first: int, last: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """States of samples and, in a decoder, the encoder's states of the same samples; on the device."""
        encoder = None if self.encoder is None else self.encoder.samples(first, last).to(device)
        return self.hidden.samples(first, last).to(device), encoder

    def shared_of(self, first: int) -> dict[Any, Any]:
        """The mappings of a batch in which blocks leave something for later ones, by their types."""
        return self._shared.setdefault(first, {})

    def carry(self, first: int, outputs: tuple[Any, ...]) -> None:
        """Keep what a block gave beside, once where batches have the same (position biases)."""
        known = next(iter(self.carried.values()), outputs)
        self.carried[first] = known if same(known, outputs) else outputs

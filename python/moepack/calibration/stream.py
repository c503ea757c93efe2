"""The hidden states of one model on their way through the blocks."""

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
    """Replaces sums when experts are solved separately: collects additions as rows [n] and states [n, H]."""

    made: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, tokens: Tensor, states: Tensor) -> None:
        """Keep an addition; arguments as for `ListBuffer.add`."""
        self.made.append((tokens, states))


@dataclass
class Stream:
    """The states of one model, compressed or original, at the current block.

    Attributes:
        compressed: whether the compressed layers compute this stream.
        hidden: the hidden states of all samples.
        inputs: the rows that the current experts read; None before the first layer of experts.
        sums: the rows to which the experts' outputs are added: `hidden`, a separate buffer, or, when solved separately,
            `Additions`.
        index: [N, k] the experts of each row; -1 means none.
        weights: [N, k] their router weights.
        encoder: the encoder's states, in a decoder that attends to them.
        carried: by batch, the other outputs of the preceding block.
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
        """Return states of samples and, in a decoder, the encoder's states of the same samples; on the device."""
        encoder = None if self.encoder is None else self.encoder.samples(first, last).to(device)
        return self.hidden.samples(first, last).to(device), encoder

    def shared_of(self, first: int) -> dict[Any, Any]:
        """Return the mappings of a batch through which blocks pass data to later ones, by type."""
        return self._shared.setdefault(first, {})

    def carry(self, first: int, outputs: tuple[Any, ...]) -> None:
        """Keep a block's other outputs; equal ones of several batches (position biases) are stored once."""
        known = next(iter(self.carried.values()), outputs)
        self.carried[first] = known if same(known, outputs) else outputs

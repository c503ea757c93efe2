"""How calibration runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from moepack.solvers.activations import Rounding

__all__ = ["CalibrationSettings"]


@dataclass(frozen=True)
class CalibrationSettings:
    """How calibration runs.

    Attributes:
        activations: "compressed" feeds each block what the compressed blocks before it give; "original" feeds it what
            the original model gives.
        routing: whose router assigns tokens to experts for the Hessians: "original" or "compressed". Only looked at
            with compressed activations.
        drift: run the original model beside the compressed one even where its routing is not used, so that moments
            know the drift. Only looked at with compressed activations.
        rounding: what the compressed stream makes of what compressed layers read.
        group: experts solved together.
        token_cap: most tokens of an expert held at a time, as a multiple of the mean over experts; the rest follows
            in further pieces.
        batch: samples a forward pass.
        dtype: of weights, hidden states and matrix products; Hessians are always float32.
        device: where blocks and experts run.
        buffer_directory: where to map the list buffers, or `None` for memory.
        buffer_device: whose memory holds the list buffers where they are not mapped: the CPU's, or that of `device` for
            calibration sets that fit there (N * L * H states for each stream, twice).
    """

    activations: Literal["compressed", "original"] = "compressed"
    routing: Literal["original", "compressed"] = "original"
    drift: bool = False
    rounding: Rounding = field(default_factory=Rounding)
    group: int = 16
    token_cap: float = 4.0
    batch: int = 8
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    buffer_directory: Path | None = None
    buffer_device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        if self.group < 1 or self.batch < 1 or not self.token_cap > 0:
            raise ValueError("group, batch and token_cap must be positive")

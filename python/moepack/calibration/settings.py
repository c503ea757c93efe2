"""Settings of the calibration."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from moepack.solvers.activations import Rounding

__all__ = ["CalibrationSettings"]


@dataclass(frozen=True)
class CalibrationSettings:
    """Settings of the calibration.

    Attributes:
        activations: "compressed" feeds each block the outputs of the compressed blocks before it; "original" those of
            the original blocks.
        routing: whose router assigns tokens to experts for the Hessians: "original" or "compressed". Only used with
            compressed activations.
        drift: run the original model beside the compressed one even if its routing is not used, so that moments include
            the drift. Only used with compressed activations.
        rounding: how the compressed stream rounds the inputs of compressed layers.
        group: experts solved together.
        token_cap: maximum number of tokens of an expert held at a time, as a multiple of the mean over experts; the
            rest follows in further pieces.
        batch: samples per forward pass.
        dtype: dtype of weights, hidden states and matrix products; Hessians are always float32.
        device: where blocks and experts run.
        buffer_directory: where to map the list buffers, or `None` for memory.
        buffer_device: device whose memory holds unmapped list buffers: the CPU, or `device` for calibration sets that
            fit there (N * L * H states per stream, twice).
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

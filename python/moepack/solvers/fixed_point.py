"""Codebooks as stored in packed tensors: centroids of 16 or 8 bits and a scale per codebook."""

from typing import NamedTuple

import torch

__all__ = ["FixedPoint", "centroid_bits", "fixed_point", "split_blocks"]

MAX_CENTROID = 127 * 256 + 127


def centroid_bits(activation_bits: int) -> int:
    """Return the bits of centroids: 8 if products round activations and multiply integers, otherwise 16."""
    return 8 if activation_bits else 16


class FixedPoint(NamedTuple):
    """Codebooks as stored.

    Attributes:
        centroids: [..., K] int16.
        scales: [...] float32, not negative.
    """

    centroids: torch.Tensor
    scales: torch.Tensor

    def values(self) -> torch.Tensor:
        """Return the dequantized centroids, [..., K] float32: the product, rounded once."""
        return self.scales[..., None] * self.centroids.float()


def fixed_point(centroids: torch.Tensor, bits: int = 16) -> FixedPoint:
    """Round codebooks [..., K] to 16 or 8 bits relative to the largest magnitude of each.

    A centroid changes by at most 2^-16 (2^-8) of the codebook's largest magnitude. With 8 bits, the mode "int8" adds no
    further loss. Scales below the smallest normal number become zero, and so do all centroids.
    """
    unit = 1 << (16 - bits)
    wide = centroids.double()
    largest = wide.abs().amax(-1)
    scales = (largest / (MAX_CENTROID // unit * unit)).float()
    scales = torch.where(scales >= torch.finfo(torch.float32).tiny, scales, torch.zeros_like(scales))
    steps = torch.where(scales > 0, scales, torch.ones_like(scales)).double()
    limit = MAX_CENTROID // unit * unit
    codes = ((wide / steps[..., None] / unit).round() * unit).clamp(-limit, limit)
    return FixedPoint(torch.where(scales[..., None] > 0, codes, 0).to(torch.int16), scales)


def split_blocks(values: torch.Tensor, block: int | None) -> list[torch.Tensor]:
    """Split [..., C] into blocks of columns; the last may be shorter. `None` means the whole row."""
    return list(torch.split(values, block, -1)) if block and values.shape[-1] else [values]

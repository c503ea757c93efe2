"""Converts the requested size into the maximum size of all weight files in bytes."""

import math
from dataclasses import dataclass

from moepack.checkpoint import Checkpoint
from moepack.memory import available_bytes
from moepack.units import byte_count, size

__all__ = ["Target", "weight_count"]

BITS = 4.0
"""Default bits per weight if no size is requested and memory suffices."""

UNIT = 100_000_000
"""Half of the free memory is rounded down to multiples of this many bytes, so that a job can be resumed later."""


@dataclass(frozen=True)
class Target:
    """The requested size: at most one of three settings.

    Attributes:
        size: bytes of all weight files, as a number or as text such as `9GB`.
        bits_per_weight: bits of all weight files per weight of the checkpoint.
        ratio: size of all weight files relative to the checkpoint.
    """

    size: str | int | None = None
    bits_per_weight: float | None = None
    ratio: float | None = None

    @property
    def usual(self) -> bool:
        """Whether no size is requested."""
        return self.size is None and self.bits_per_weight is None and self.ratio is None

    def __post_init__(self) -> None:
        given = [name for name in ("size", "bits_per_weight", "ratio") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are mutually exclusive")
        if self.size is not None:
            byte_count(self.size)
        for name, most in (("bits_per_weight", 64.0), ("ratio", 1.0)):
            value = getattr(self, name)
            if value is not None and not 0 < value < most:
                raise ValueError(f"{name} must be above 0 and below {most:g}, not {value}")

    def nbytes(self, checkpoint: Checkpoint) -> tuple[int, str]:
        """Return the size in bytes, and its origin in words.

        Raises:
            ValueError: the checkpoint is not larger than that.
        """
        weights, source = weight_count(checkpoint), checkpoint.stored
        found, reason = self._wanted(weights, source)
        if found >= source:
            raise ValueError(
                f"{size(found)} were requested, but the weights of {checkpoint.path} already take only {size(source)}"
            )
        return found, reason

    def _wanted(self, weights: int, source: int) -> tuple[int, str]:
        if self.size is not None:
            return byte_count(self.size), "as requested"
        if self.ratio is not None:
            return int(source * self.ratio), f"{self.ratio:g} of the checkpoint, as requested"
        if self.bits_per_weight is not None:
            return int(weights * self.bits_per_weight / 8), f"{self.bits_per_weight:g} bits per weight, as requested"
        usual, free = int(weights * BITS / 8), available_bytes() or math.inf
        if usual <= free / 2:
            return usual, f"{BITS:g} bits per weight, the default"
        half = int(free / 2)
        return half // UNIT * UNIT or half, "half of the free memory, the default"


def weight_count(checkpoint: Checkpoint) -> int:
    """Return the number of elements of all tensors of a checkpoint."""
    return sum(math.prod(checkpoint.info(name).shape) for name in checkpoint.names())

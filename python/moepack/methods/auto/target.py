"""From what a user asks for to the bytes that all files of weights may take."""

import math
from dataclasses import dataclass

from moepack.checkpoint import Checkpoint
from moepack.memory import available_bytes
from moepack.units import byte_count, size

__all__ = ["Target", "weight_count"]

BITS = 4.0
"""Bits a weight where nothing was asked for and memory allows it."""

UNIT = 100_000_000
"""Bytes to whose multiples half of the free memory is cut, so that a job may be continued a little later."""


@dataclass(frozen=True)
class Target:
    """What was asked for: one of three, or nothing.

    Attributes:
        size: bytes of all files of weights, as a number or as text such as `9GB`.
        bits_per_weight: the same bytes over all weights of the checkpoint.
        ratio: the same bytes over those of the checkpoint.
    """

    size: str | int | None = None
    bits_per_weight: float | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("size", "bits_per_weight", "ratio") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} say the same thing; give one of them")
        if self.size is not None:
            byte_count(self.size)
        for name, most in (("bits_per_weight", 64.0), ("ratio", 1.0)):
            value = getattr(self, name)
            if value is not None and not 0 < value < most:
                raise ValueError(f"{name} must be above 0 and below {most:g}, not {value}")

    def nbytes(self, checkpoint: Checkpoint) -> tuple[int, str]:
        """The bytes, and how they came about in words.

        Raises:
            ValueError: the checkpoint takes no more already.
        """
        weights, source = weight_count(checkpoint), checkpoint.stored
        found, reason = self._wanted(weights, source)
        if found >= source:
            raise ValueError(
                f"{size(found)} were asked for, and the weights of {checkpoint.path} take {size(source)} as they are: "
                "there is nothing to compress"
            )
        return found, reason

    def _wanted(self, weights: int, source: int) -> tuple[int, str]:
        if self.size is not None:
            return byte_count(self.size), "as asked for"
        if self.ratio is not None:
            return int(source * self.ratio), f"{self.ratio:g} of the checkpoint, as asked for"
        if self.bits_per_weight is not None:
            return int(weights * self.bits_per_weight / 8), f"{self.bits_per_weight:g} bits a weight, as asked for"
        usual, free = int(weights * BITS / 8), available_bytes() or math.inf
        if usual <= free / 2:
            return usual, f"{BITS:g} bits a weight, for no size was given"
        half = int(free / 2)
        return half // UNIT * UNIT or half, "half of the free memory, for no size was given"


def weight_count(checkpoint: Checkpoint) -> int:
    """How many numbers all tensors of a checkpoint hold."""
    return sum(math.prod(checkpoint.info(name).shape) for name in checkpoint.names())

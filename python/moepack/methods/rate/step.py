"""The step of a whole model: the one at which it takes the bits that were asked for.

With one step, and one price of a bit, the last bit of every tensor buys the same fall of the error: no other division
of the bytes has a smaller sum (reverse water-filling; Cover and Thomas, section 10.3.3). So the search has one number
to find.
"""

import math
from dataclasses import dataclass

from moepack.methods.base import Shape
from moepack.methods.rate.sample import Sample
from moepack.solvers.priced import Lengths

__all__ = ["Step", "find_step"]

EXACT = 0.001
"""Octaves to which the step is found: about so many bits a weight."""

HEADER_BYTES = 512
"""Header, tables, and zeros behind sections."""

STREAM_BITS = 880
"""What the states of a stream's 64 lanes take over what they carry, and its entry in the index."""

CODE_EXCESS = 1.003
"""What the code takes over the lengths of classes: frequencies of 256ths and exceptions take 1.0075 of the entropy of
equal rows, and tables that are fitted to a tensor take some of it back."""

NARROW = 2048
"""Most columns of a tensor whose streams have 64 rows, not 16."""

NARROWEST, WIDEST = 10.0, 6.0
"""Octaves of the range below and above the model's root mean square."""


@dataclass(frozen=True)
class Step:
    """What `find_step` decided.

    Attributes:
        size: the step of a tensor of importance 1.
        lengths: bits of the symbols at this step.
    """

    size: float
    lengths: Lengths


def find_step(sample: Sample, bits_per_weight: float) -> Step:
    """Find the smallest step with which a model takes the bits that were asked for, or fewer.

    Args:
        sample: what is known of the model.
        bits_per_weight: of all weights of these tensors, all metadata counted.

    Raises:
        ValueError: states and headers alone take more.
    """
    budget, least = sample.weights * bits_per_weight, sum(map(metadata_bits, sample.shapes.values()))
    if least >= budget > 0:
        raise ValueError(
            f"rows without a weight already take {least / sample.weights:.3f} bits a weight, "
            f"{bits_per_weight} were asked for"
        )
    center = 0.5 * math.log2(sample.profile.mean_square or 1.0)
    low, high = center - NARROWEST, center + WIDEST
    while high - low > EXACT:
        middle = (low + high) / 2
        profile, step = sample.profile, 2.0**middle
        if CODE_EXCESS * profile.bits(step, profile.lengths(step)) + least > budget:
            low = middle
        else:
            high = middle
    return Step(2.0**high, sample.profile.lengths(2.0**high))


def metadata_bits(shape: Shape) -> float:
    """Bits that a tensor takes beside its symbols, about: header and tables, the index, and what states cost more than
    they carry (docs/format.md, section 9)."""
    experts, rows, columns = shape
    stream_rows = 64 if columns <= NARROW else 16
    streams = experts * -(-rows // stream_rows) if columns else 0
    return 8 * HEADER_BYTES + streams * STREAM_BITS

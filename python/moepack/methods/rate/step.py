"""The step of a whole model: the one at which it takes the bits that were asked for.

With one step, and one price of a bit, the last bit of every tensor buys the same fall of the error: no other division
of the bytes has a smaller sum (reverse water-filling; Cover and Thomas, section 10.3.3). So the search has one number
to find. What the coder takes over the lengths that rounding counts with is measured, by coding the sample.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moepack import _core
from moepack.methods.base import Shape
from moepack.methods.rate.sample import Sample, stream_rows
from moepack.solvers.priced import WORTH, Lengths, low_bits_of, round_priced

__all__ = ["Step", "find_step", "free_bits", "once_bytes"]

EXACT = 0.001
"""Octaves to which the step is found: about so many bits a weight."""

TRIALS, DENSE_TRIALS = 2, 3
"""How often the sample is coded, without low bits and with; once more moves the rate by less than a thousandth."""

NARROWEST, WIDEST, NEAR = 10.0, 6.0, 0.25
"""Octaves of the first search below and above the model's root mean square, and of later ones around the step."""

STREAM_BITS = 880
"""What the states of a stream's 64 lanes take over what they carry, and its entry in the index."""

ONCE_BYTES = 512
"""What a tensor takes besides, about: header, tables, and zeros behind sections."""

POOL = 64
"""Streams of tensors of equal columns that are coded together where a sample lacks some of a tensor: a few streams
alone would have better tables than they share with all others."""

SYMBOLS_AT = 15
"""Where a coded tensor says how many symbols its tables have."""


@dataclass(frozen=True)
class Step:
    """What `find_step` decided.

    Attributes:
        size: the step of a tensor of importance 1.
        lengths: bits of the symbols at this step.
        bits: by the tensor's name, what it is expected to take, all metadata counted.
    """

    size: float
    lengths: Lengths
    bits: Mapping[str, float]


def find_step(sample: Sample, bits_per_weight: float) -> Step:
    """Find the step with which a model takes the bits that were asked for.

    Args:
        sample: what is known of the model.
        bits_per_weight: of all weights of these tensors, all metadata counted.

    Raises:
        ValueError: states and headers alone take more.
    """
    budget = sample.weights * bits_per_weight
    least = sum(map(free_bits, sample.shapes.values()))
    if least >= budget > 0:
        raise ValueError(
            f"rows without a weight already take {least / sample.weights:.3f} bits a weight, "
            f"{bits_per_weight} were asked for"
        )
    center = 0.5 * math.log2(sample.profile.mean_square or 1.0)
    step = _search(sample, budget - least, center - NARROWEST, center + WIDEST)
    bits: dict[str, float] = {}
    trials = DENSE_TRIALS if low_bits_of(sample.profile.largest) else TRIALS
    for _ in range(trials if budget else 0):
        bits = _coded(sample, step)
        lengths = sample.profile.bits(step, sample.profile.lengths(step, WORTH), WORTH)
        excess = (sum(bits.values()) - least) / (lengths or 1.0)
        center = math.log2(step)
        step = _search(sample, (budget - least) / max(excess, 0.5), center - NEAR, center + NEAR)
    total = sum(bits.values()) or 1.0
    return Step(step, sample.profile.lengths(step, WORTH), {name: own * budget / total for name, own in bits.items()})


def _search(sample: Sample, budget: float, low: float, high: float) -> float:
    """The smallest step, between powers of two, with which the lengths of all symbols are within a budget."""
    while high - low > EXACT:
        middle = (low + high) / 2
        step = 2.0**middle
        if sample.profile.bits(step, sample.profile.lengths(step, WORTH), WORTH) > budget:
            low = middle
        else:
            high = middle
    return float(2.0**high)


def _coded(sample: Sample, step: float) -> dict[str, float]:
    """The bits of all tensors, from those of their samples, coded."""
    lengths = sample.profile.lengths(step, WORTH)
    bits: dict[str, float] = {}
    for pool in _pools(sample):
        symbols = [round_priced(sample.values(name), step, lengths, WORTH) for name in pool]
        own = [lengths.total(sample.values(name), found) for name, found in zip(pool, symbols, strict=True)]
        whole, alone = torch.cat(symbols), sample.factor(pool[0]) <= 1
        shape = sample.shapes[pool[0]] if alone else (1, *whole.shape)
        one, low_bits = np.ones((1, 1), np.float32), low_bits_of(lengths.largest)
        blob = _core.encode_coded(whole.view(shape).numpy(), one, ndim=3, low_bits=low_bits)
        once = 8 * once_bytes(blob)
        excess = (8 * blob.nbytes - once - stream_bits(shape)) / max(sum(own), 1.0)
        for name, least in zip(pool, own, strict=True):
            bits[name] = excess * least * sample.factor(name) + once + stream_bits(sample.shapes[name])
    return bits


def _pools(sample: Sample) -> Iterator[list[str]]:
    """Tensors that are coded together."""
    open_pools: dict[int, list[str]] = {}
    for name, shape in sample.shapes.items():
        if sample.factor(name) <= 1:
            yield [name]
            continue
        pool = open_pools.setdefault(shape[2], [])
        pool.append(name)
        if sum(len(sample.rows[each]) for each in pool) >= POOL * stream_rows(shape[2]):
            yield open_pools.pop(shape[2])
    yield from open_pools.values()


def once_bytes(blob: npt.NDArray[np.uint8]) -> int:
    """Bytes that a coded tensor takes however many rows it has: header, tables, one scale, and padding, about."""
    return 192 + int(_core.PackedTensor(blob).details()["tables"]) * (1 + int(blob[SYMBOLS_AT]))


def free_bits(shape: Shape) -> float:
    """Bits that a tensor takes beside its symbols, about."""
    return 8 * ONCE_BYTES + stream_bits(shape)


def stream_bits(shape: Shape) -> float:
    """Bits of a tensor's streams beside what their symbols take."""
    experts, rows, columns = shape
    return STREAM_BITS * experts * -(-rows // stream_rows(columns)) if columns else 0

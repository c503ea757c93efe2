"""The step of a whole model, chosen so that the model takes the requested bits.

With one step and one price of a bit, the last bit of every tensor reduces the error equally, so no other division of
the bytes has a smaller total error (reverse water-filling; Cover and Thomas, section 10.3.3). The search therefore has
a single variable. The coder's overhead over the lengths used by rounding is measured by coding the sample.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack import _core
from moepack.methods.base import Shape
from moepack.methods.rate.sample import Sample, stream_rows
from moepack.solvers.priced import (
    LEAST_DEPENDENT,
    NEARLY_ZERO,
    WORTH,
    Lengths,
    Profile,
    coder_symbols,
    least_spread,
    low_bits_of,
    round_priced,
    worth_of,
)
from moepack.solvers.search import smallest_within

__all__ = ["Step", "find_step", "free_bits", "once_bytes"]

EXACT = 0.001
"""Precision of the step in octaves, which is about its precision in bits per weight."""

TRIALS, MORE_TRIALS = 2, 3
"""How often the sample is coded; the second number applies with low bits or both kinds of codes. Another trial would
change the rate by less than a thousandth."""

NARROWEST, WIDEST, NEAR = 10.0, 6.0, 0.25
"""Search range in octaves: first search, below and above the model's root mean square; later ones, around the step."""

STREAM_BITS = 880
"""Overhead of a stream in bits: the states of its 64 lanes beyond what they carry, and its index entry."""

ONCE_BYTES = 512
"""Approximate fixed overhead of a tensor in bytes: header, tables, and padding of sections."""

POOL = 64
"""Streams of tensors with equal columns that are coded together if a sample does not hold a whole tensor. A few streams
alone would get better tables than they will share with all others."""

SYMBOLS_AT = 15
"""Byte offset at which a coded tensor stores the number of symbols of its tables."""


@dataclass(frozen=True)
class Step:
    """The result of `find_step`.

    Attributes:
        size: the step of a tensor with importance 1.
        lengths: code lengths of the symbols at this step, for dependent codes (True) and plain codes (False), if used.
        dependent: names of the tensors with dependent codes.
        bits: by tensor name, its expected bits, including all metadata.
    """

    size: float
    lengths: Mapping[bool, Lengths]
    dependent: frozenset[str]
    bits: Mapping[str, float]

    @property
    def largest(self) -> int:
        """The largest magnitude of a symbol with its own code length."""
        return next(iter(self.lengths.values())).largest

    def lengths_of(self, name: str) -> Lengths:
        """Return the code lengths of a tensor's symbols."""
        return _of_kind(self.lengths, name in self.dependent)


@dataclass(frozen=True)
class _Kinds:
    """Weight profiles of plain and of dependent codes; each present only if used.

    Attributes:
        profiles: profiles of plain (False) and of dependent codes (True).
        dependent: names of the tensors with dependent codes.
        known: code lengths by step.
    """

    profiles: Mapping[bool, Profile]
    dependent: frozenset[str]
    known: dict[float, dict[bool, Lengths]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, sample: Sample, dependent: frozenset[str]) -> _Kinds:
        """Split a sample; a tensor without rows may have either kind."""
        kinds = {name in dependent for name, rows in sample.rows.items() if rows.numel()}
        if len(kinds) < 2:
            return cls({kind: sample.profile for kind in kinds or {False}}, dependent)
        profiles = {kind: Profile(sample.profile.largest) for kind in kinds}
        for name, rows in sample.rows.items():
            if rows.numel():
                profiles[name in dependent].add(sample.values(name), sample.factor(name))
        return cls(profiles, dependent)

    @property
    def weights(self) -> float:
        """Number of weights."""
        return sum(float(profile.counts.sum()) for profile in self.profiles.values())

    def lengths(self, step: float) -> dict[bool, Lengths]:
        """Return the code lengths at a step."""
        if step not in self.known:
            found = {kind: profile.lengths(step, worth_of(kind), kind) for kind, profile in self.profiles.items()}
            self.known[step] = found
        return self.known[step]

    def bits(self, step: float) -> float:
        """Return the bits of all weights at a step."""
        parts = self.lengths(step).items()
        return sum(self.profiles[kind].bits(step, lengths, lengths.worth) for kind, lengths in parts)


def _of_kind(lengths: Mapping[bool, Lengths], dependent: bool) -> Lengths:
    """Return the lengths of a kind of codes, or, for tensors without weights, of the only kind present."""
    return lengths[dependent] if dependent in lengths else next(iter(lengths.values()))


def find_step(sample: Sample, bits_per_weight: float, dependent: bool = False) -> Step:
    """Find the step at which a model takes the requested bits.

    Args:
        sample: sample of the model.
        bits_per_weight: average over all weights of these tensors, including all metadata.
        dependent: whether tensors may use dependent codes.

    Raises:
        ValueError: states and headers alone exceed the budget.
    """
    budget = sample.weights * bits_per_weight
    least = sum(map(free_bits, sample.shapes.values())) + sum(sample.scales.values())
    if least >= budget > 0:
        raise ValueError(
            f"metadata alone takes {least / sample.weights:.3f} bits per weight, but {bits_per_weight} were requested"
        )
    center = 0.5 * math.log2(sample.profile.mean_square or 1.0)
    kinds = _Kinds.of(sample, frozenset())
    step = _search(kinds, budget - least, center - NARROWEST, center + WIDEST)
    if dependent and not low_bits_of(sample.profile.largest):
        kinds = _Kinds.of(sample, _dependent(sample, step, kinds.lengths(step)[False]))
        # At few bits, dependent codes use a larger step.
        step = _search(kinds, budget - least, center - NARROWEST, center + WIDEST)
    bits: dict[str, float] = {}
    trials = MORE_TRIALS if low_bits_of(sample.profile.largest) or len(kinds.profiles) > 1 else TRIALS
    for _ in range(trials if budget else 0):
        bits = _coded(sample, step, kinds)
        excess = (sum(bits.values()) - least) / (kinds.bits(step) or 1.0)
        center = math.log2(step)
        step = _search(kinds, (budget - least) / max(excess, 0.5), center - NEAR, center + NEAR)
    total = sum(bits.values()) or 1.0
    shares = {name: own * budget / total for name, own in bits.items()}
    return Step(step, kinds.lengths(step), kinds.dependent, shares)


def _dependent(sample: Sample, step: float, lengths: Lengths) -> frozenset[str]:
    """Return the tensors that benefit from dependent codes."""
    found = set()
    for name, rows in sample.rows.items():
        if rows.numel() == 0:
            continue
        values = sample.values(name)
        bits = lengths.total(values, round_priced(values, step, lengths, WORTH))
        if bits >= LEAST_DEPENDENT * rows.numel() and least_spread(values) >= NEARLY_ZERO * step:
            found.add(name)
    return frozenset(found)


def _search(kinds: _Kinds, budget: float, low: float, high: float) -> float:
    """Return the smallest step in the given range of exponents at which all code lengths fit the budget."""
    # Twice the step takes about one bit less per weight.
    fall = max(kinds.weights, 1.0)
    return float(2.0 ** smallest_within(lambda each: kinds.bits(2.0**each), budget, low, high, EXACT, fall))


def _coded(sample: Sample, step: float, kinds: _Kinds) -> dict[str, float]:
    """Estimate the bits of all tensors by coding their samples."""
    lengths_of = kinds.lengths(step)
    bits: dict[str, float] = {}
    for pool in _pools(sample, kinds.dependent):
        kind = pool[0] in kinds.dependent
        lengths = _of_kind(lengths_of, kind)
        codes = [round_priced(sample.values(name), step, lengths, lengths.worth) for name in pool]
        own = [lengths.total(sample.values(name), found) for name, found in zip(pool, codes, strict=True)]
        whole, alone = torch.cat(codes), sample.factor(pool[0]) <= 1
        shape = sample.shapes[pool[0]] if alone else (1, *whole.shape)
        blob = encoded(whole.view(shape), lengths.largest, kind)
        once = 8 * once_bytes(blob)
        excess = (8 * blob.nbytes - once - stream_bits(shape)) / max(sum(own), 1.0)
        for name, least in zip(pool, own, strict=True):
            free = once + stream_bits(sample.shapes[name]) + sample.scales.get(name, 0)
            bits[name] = excess * least * sample.factor(name) + free
    return bits


def encoded(codes: Tensor, largest: int, dependent: bool) -> npt.NDArray[np.uint8]:
    """Encode codes [E, R, C] as stored, but with scale 1.

    `largest` is the largest magnitude with its own code length.
    """
    one = np.ones((1, 1), np.float32)
    return _core.encode_coded(codes.numpy(), one, ndim=3, symbols=coder_symbols(largest, dependent))


def _pools(sample: Sample, dependent: Collection[str]) -> Iterator[list[str]]:
    """Yield groups of tensors that are coded together."""
    open_pools: dict[tuple[int, bool], list[str]] = {}
    for name, shape in sample.shapes.items():
        if sample.factor(name) <= 1:
            yield [name]
            continue
        key = (shape[2], name in dependent)
        pool = open_pools.setdefault(key, [])
        pool.append(name)
        if sum(len(sample.rows[each]) for each in pool) >= POOL * stream_rows(shape[2]):
            yield open_pools.pop(key)
    yield from open_pools.values()


def once_bytes(blob: npt.NDArray[np.uint8]) -> int:
    """Return the approximate row-independent size of a coded tensor: header, tables, one scale, and padding."""
    return 192 + int(_core.PackedTensor(blob).details()["tables"]) * (1 + int(blob[SYMBOLS_AT]))


def free_bits(shape: Shape) -> float:
    """Return the approximate bits of a tensor without its symbols."""
    return 8 * ONCE_BYTES + stream_bits(shape)


def stream_bits(shape: Shape) -> float:
    """Return the bits of a tensor's streams without their symbols."""
    experts, rows, columns = shape
    return STREAM_BITS * experts * -(-rows // stream_rows(columns)) if columns else 0

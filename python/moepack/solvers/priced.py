"""Integers on one uniform step, rounded with the length of their code in mind.

An entropy coder charges exactly what is used, so a weight w of step d becomes the integer q that minimises

    (w / d - q)^2 + PRICE * bits(q),

its squared error and the bits that its code takes. `PRICE` is the slope of the error over the rate of a uniform
quantizer at high rates: its error d^2 / 12 falls by a factor of four a bit. Rounding so loses less at equal bits than
rounding to nearest with a larger step, most of all at low rates, where it is the dead zone around zero that widens.

Lengths depend on how wide rows are in units of the step, and on little else: row blocks (16 rows), which share a
table in the coded format, belong to the *class* of their root mean square, and a class has one list of lengths. What
a model's weights look like, class by class, is a `Profile`, from which the lengths and the bits of any step follow
without another look at the weights.

Source: entropy-constrained scalar quantization (Chou, Lookabaugh and Gray, 1989).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moepack import _core

__all__ = ["BLOCK_ROWS", "PRICE", "WORTH", "Lengths", "Profile", "largest_at", "low_bits_of", "round_priced"]

PRICE = math.log(2) / 6
"""Squared steps that a bit is worth."""

WORTH = 0.15 * PRICE
"""What the product takes it for. `PRICE` leaves the least squared error of weights, and takes it from those that it
rounds towards zero; a model minds their lost energy more than the same error elsewhere (docs/methods/rate.md)."""

BLOCK_ROWS = 16
"""Rows of a row block."""

LARGEST, DENSE_LARGEST, DENSE_BITS = 31, 255, 5.0
"""The largest magnitude with a length of its own, and the largest at more than so many bits a weight, where the coder
keeps low bits apart; larger ones are stored as exceptions."""

MOST = float(1 << 30)
"""The largest integer."""

EXCEPTION_BITS = 32.0
"""What an exception takes beside the code of the symbol in its place, without low bits."""

CLASSES, NARROWEST = 128, -24.0
"""Classes, a quarter of an octave each, and the base-two logarithm of the first one's root mean square."""

BINS, REACH = 4096, 16
"""Bins of a class in a profile; the magnitude of the last ones in root mean squares, where all beyond are counted."""

ROUNDS = 4
"""Rounds of rounding and counting; another one moves the rate by less than a thousandth."""

_WIDER = {torch.int8: torch.int16, torch.int16: torch.int32}

HALF_COUNT = 0.5
"""What is added to every count, so that symbols that a sample lacks have a length."""


def largest_at(bits_per_weight: float) -> int:
    """The largest magnitude with a length of its own at a rate."""
    return LARGEST if bits_per_weight <= DENSE_BITS else DENSE_LARGEST


def exception_bits(largest: int) -> float:
    """What an exception takes beside the code of the symbol in its place; with low bits its difference is long."""
    return EXCEPTION_BITS if largest == LARGEST else 2 * EXCEPTION_BITS


def low_bits_of(largest: int) -> int:
    """The most low bits that the coder may keep apart, by the largest magnitude with a length of its own."""
    return 0 if largest == LARGEST else 3


def _scale(number: int) -> float:
    """The root mean square in the middle of a class."""
    return float(2.0 ** (NARROWEST + number / 4))


class Profile:
    """What weights look like: how many lie where, class by class.

    Attributes:
        counts: [CLASSES, BINS] float64, of weights by their values in units of the class's root mean square.
        largest: the largest magnitude with a length of its own, L.
    """

    def __init__(self, largest: int = LARGEST) -> None:
        """Start without weights."""
        self.largest = largest
        self.counts = torch.zeros(CLASSES, BINS, dtype=torch.float64)

    @property
    def mean_square(self) -> float:
        """The mean square of the weights, about."""
        scales = torch.tensor([_scale(number) for number in range(CLASSES)], dtype=torch.float64)
        squares = self.counts @ _centers().square().double() * scales.square()
        return float(squares.sum() / self.counts.sum().clamp(min=1))

    def add(self, values: Tensor, factor: float) -> None:
        """Count weights.

        Args:
            values: [R, C] float32, finite.
            factor: how many weights each of them stands for.
        """
        for number, counts in _core.count_values(values.contiguous().numpy(), classes=CLASSES, bins=BINS, reach=REACH):
            self.counts[number] += torch.from_numpy(counts).double() * factor

    def bits(self, step: float, lengths: Lengths, price: float = PRICE) -> float:
        """Bits of the weights rounded to a step."""
        counts = self._symbols(step, lengths, price)
        exceptions = self.counts.sum() - counts.sum()
        return float((counts * lengths.bits).sum() + exception_bits(self.largest) * exceptions)

    def lengths(self, step: float, price: float = PRICE) -> Lengths:
        """Learn the lengths of the weights rounded to a step, rounding and counting in turns."""
        found = Lengths(torch.zeros(CLASSES, 2 * self.largest + 1))
        for _ in range(ROUNDS):
            found = Lengths(_lengths(self._symbols(step, found, price)))
        return found

    def _symbols(self, step: float, lengths: Lengths, price: float) -> Tensor:
        """How often each symbol comes in each class, [CLASSES, 2 L + 1] float64; exceptions are left out."""
        largest = self.largest
        counts = torch.zeros(CLASSES, 2 * largest + 1, dtype=torch.float64)
        for number in self.counts.sum(1).nonzero().flatten().tolist():
            values = _centers() * (_scale(number) / step)
            symbols = lengths.cheapest(values, number, price)
            listed = symbols.abs() <= largest
            counts[number].index_add_(0, symbols[listed].long() + largest, self.counts[number][listed])
        return counts


@dataclass(frozen=True)
class Lengths:
    """Bits of symbols by class.

    Attributes:
        bits: [CLASSES, 2 L + 1] float32, of the symbols from -L on.
    """

    bits: Tensor

    @property
    def largest(self) -> int:
        """The largest magnitude with a length of its own, L."""
        return self.bits.shape[1] // 2

    def cheapest(self, values: Tensor, number: int, price: float = PRICE) -> Tensor:
        """The integers of values [n] of class `number`, given in units of the step; int32."""
        lengths, found = self.bits[number : number + 1].numpy(), torch.empty(1, len(values), dtype=torch.int32)
        _core.round_priced(values[None].numpy(), lengths, found.numpy(), step=1.0, price=price)
        return found[0]

    def total(self, values: Tensor, symbols: Tensor) -> float:
        """Bits of all symbols [R, C] that a matrix [R, C] was rounded to, classes being those of the matrix."""
        total, given, integers = 0.0, values.contiguous().numpy(), symbols.contiguous()[None].numpy()
        for number, found in _core.count_integers(given, integers, classes=CLASSES, largest=self.largest):
            counts = torch.from_numpy(found).double()
            exceptions = counts[[0, -1]]
            counts[[1, -2]] += exceptions
            total += float(counts[1:-1] @ self.bits[number].double() + exception_bits(self.largest) * exceptions.sum())
        return total


def round_priced(
    values: Tensor,
    step: float,
    lengths: Lengths,
    price: float = PRICE,
    *,
    width: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Round a matrix.

    Args:
        values: [R, C] of a floating type, on the CPU.
        step: what an integer is worth.
        lengths: bits of the symbols.
        price: squared steps that a bit is worth.
        width: classes are those of the values in units of it.
        out: [R, C] of an integer type that takes the integers if it holds all of them; a new int8 tensor by default.

    Returns:
        `out`, or where integers are too large for it a new tensor of the narrowest of int16 and int32 that holds them.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    values = values.contiguous() if values.dtype == torch.bfloat16 else values.float().contiguous()
    given = (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()
    found = torch.empty(values.shape, dtype=torch.int8) if out is None else out
    settings = {"step": step, "price": price, "width": width}
    while _core.round_priced(given, lengths.bits.numpy(), found.numpy(), **settings) > torch.iinfo(found.dtype).max:
        found = torch.empty(values.shape, dtype=_WIDER[found.dtype])
    return found


def _centers() -> Tensor:
    """The values in the middle of a profile's bins, [BINS] float32 in root mean squares."""
    return (torch.arange(BINS) + 0.5 - BINS / 2) * (2 * REACH / BINS)


def _lengths(counts: Tensor) -> Tensor:
    """Bits [CLASSES, symbols] float32 of symbols counted so often; classes that have none take the nearest one's."""
    seen = counts.sum(1).nonzero().flatten()
    if len(seen) == 0:
        return torch.zeros(counts.shape)
    nearest = (torch.arange(len(counts))[:, None] - seen).abs().argmin(1)
    counts = counts[seen][nearest] + HALF_COUNT
    return -torch.log2(counts / counts.sum(1, keepdim=True)).float()

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

*Dependent* codes (docs/format.md, section 9) have two quantizers of this step, the values of one between those of the
other, and what is coded is an index, whose parity says which quantizer comes next: the cheapest path is searched, at
half the price. Frequencies of indices have no formula; they are those of values drawn from each class of a profile.

Source: entropy-constrained scalar quantization (Chou, Lookabaugh and Gray, 1989).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moepack import _core

__all__ = [
    "BLOCK_ROWS", "LARGEST", "PRICE", "WORTH", "Lengths", "Profile", "form_of", "largest_at", "least_spread",
    "low_bits_of", "round_priced", "scale_of", "symbols_of", "worth_of",
]  # fmt: skip

PRICE = math.log(2) / 6
"""Squared steps that a bit is worth."""

WORTH = 0.15 * PRICE
"""What the product takes it for. `PRICE` leaves the least squared error of weights, and takes it from those that it
rounds towards zero; a model minds their lost energy more than the same error elsewhere (docs/methods/rate.md)."""

BLOCK_ROWS = 16
"""Rows of a row block."""

WORTH_OF_DEPENDENT = 0.5 * WORTH
"""What the product takes it for with dependent codes: a path leaves less error to be saved (docs/methods/rate.md)."""

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

DRAWN = 8192
"""Values of a class that are searched for the frequencies of its dependent codes."""

HALF_COUNT = 0.5
"""What is added to every count, so that symbols that a sample lacks have a length."""


PAIRS = 0.002
"""The share of bits that symbols of two weights may take more than those of one: products take a third less time."""


def largest_at(bits_per_weight: float) -> int:
    """The largest magnitude with a length of its own at a rate."""
    return LARGEST if bits_per_weight <= DENSE_BITS else DENSE_LARGEST


def exception_bits(largest: int) -> float:
    """What an exception takes beside the code of the symbol in its place; with low bits its difference is long."""
    return EXCEPTION_BITS if largest == LARGEST else 2 * EXCEPTION_BITS


def low_bits_of(largest: int) -> int:
    """The most low bits that the coder may keep apart, by the largest magnitude with a length of its own."""
    return 0 if largest == LARGEST else 3


def form_of(largest: int, dependent: bool) -> dict[str, Any]:
    """How the coder is told to store integers whose largest magnitude with a length of its own is given."""
    if dependent:
        return {"dependent": True}
    return {"low_bits": low_bits_of(largest)} if low_bits_of(largest) else {"pairs": PAIRS}


def least_spread(values: Tensor) -> float:
    """The least root mean square of a row block of matrices [..., R, C]; infinite where there is none."""
    squares = values.square().sum(-1, dtype=torch.float64) / max(values.shape[-1], 1)
    blocks = (block.mean(-1) for block in torch.split(squares, BLOCK_ROWS, -1) if block.numel())
    return math.sqrt(min([float(block.amin()) for block in blocks], default=math.inf))


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
        self._draws: dict[int, tuple[Tensor, Tensor]] = {}

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
        self._draws.clear()
        for number, counts in _core.count_values(values.contiguous().numpy(), classes=CLASSES, bins=BINS, reach=REACH):
            self.counts[number] += torch.from_numpy(counts).double() * factor

    def bits(self, step: float, lengths: Lengths, price: float = PRICE) -> float:
        """Bits of the weights rounded to a step."""
        counts = self._symbols(step, lengths, price)
        exceptions = self.counts.sum() - counts.sum()
        return float((counts * lengths.bits).sum() + exception_bits(self.largest) * exceptions)

    def lengths(self, step: float, price: float = PRICE, dependent: bool = False) -> Lengths:
        """Learn the lengths of the weights rounded to a step, rounding and counting in turns."""
        found = Lengths(torch.zeros(CLASSES, 2 * self.largest + 1), dependent)
        for _ in range(ROUNDS):
            found = Lengths(_lengths(self._symbols(step, found, price)), dependent)
        return found

    def _symbols(self, step: float, lengths: Lengths, price: float) -> Tensor:
        """How often each symbol comes in each class, [CLASSES, 2 L + 1] float64; exceptions are left out."""
        largest = self.largest
        counts = torch.zeros(CLASSES, 2 * largest + 1, dtype=torch.float64)
        for number in self.counts.sum(1).nonzero().flatten().tolist():
            values, weights = self._drawn(number) if lengths.dependent else (_centers(), self.counts[number])
            codes = lengths.cheapest(values * (_scale(number) / step), number, price)
            symbols = symbols_of(codes.int(), lengths.dependent)  # bytes could not be compared with L
            listed = symbols.abs() <= largest
            counts[number].index_add_(0, symbols[listed].long() + largest, weights[listed])
        return counts

    def _drawn(self, number: int) -> tuple[Tensor, Tensor]:
        """Values of a class at even distances of its distribution, shuffled, and how many weights each stands for."""
        if number not in self._draws:
            sums = self.counts[number].cumsum(0)
            places = (torch.arange(DRAWN, dtype=torch.float64) + 0.5) * (float(sums[-1]) / DRAWN)
            bins = torch.searchsorted(sums, places)
            inside = 1 - (sums[bins] - places) / self.counts[number][bins]
            values = (bins + inside - BINS / 2) * (2 * REACH / BINS)
            order = torch.randperm(DRAWN, generator=torch.Generator().manual_seed(0))
            self._draws[number] = (
                values.float()[order],
                torch.full((DRAWN,), float(sums[-1]) / DRAWN, dtype=torch.float64),
            )
        return self._draws[number]


@dataclass(frozen=True)
class Lengths:
    """Bits of symbols by class.

    Attributes:
        bits: [CLASSES, 2 L + 1] float32, of the symbols from -L on.
        dependent: whether symbols are indices of dependent codes; otherwise they are the codes.
    """

    bits: Tensor
    dependent: bool = False

    @property
    def largest(self) -> int:
        """The largest magnitude with a length of its own, L."""
        return self.bits.shape[1] // 2

    @property
    def worth(self) -> float:
        """Squared steps that the product takes a bit for."""
        return worth_of(self.dependent)

    def cheapest(self, values: Tensor, number: int, price: float = PRICE) -> Tensor:
        """The codes of values [n] of class `number`, given in units of the step; n a multiple of a row block's rows."""
        rows = values.view(BLOCK_ROWS, -1)
        return round_priced(rows, 1.0, Lengths(self.bits[number : number + 1], self.dependent), price).flatten()

    def total(self, values: Tensor, codes: Tensor) -> float:
        """Bits of all codes [R, C] that a matrix [R, C] was rounded to, classes being those of the matrix."""
        total, given = 0.0, values.contiguous().numpy()
        symbols = symbols_of(codes, self.dependent).contiguous()[None].numpy()
        for number, found in _core.count_integers(given, symbols, classes=CLASSES, largest=self.largest):
            counts = torch.from_numpy(found).double()
            exceptions = counts[[0, -1]]
            counts[[1, -2]] += exceptions
            total += float(counts[1:-1] @ self.bits[number].double() + exception_bits(self.largest) * exceptions.sum())
        return total


def symbols_of(codes: Tensor, dependent: bool) -> Tensor:
    """What is coded of codes of a signed type: of dependent ones their indices."""
    return torch.where(codes & 3 == 1, codes, -codes) >> 2 if dependent else codes


def scale_of(step: float, dependent: bool) -> float:
    """What a code is worth."""
    return step / 4 if dependent else step


def worth_of(dependent: bool) -> float:
    """Squared steps that a bit is worth."""
    return WORTH_OF_DEPENDENT if dependent else WORTH


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
        step: of the quantizer: what an integer is worth, and four dependent codes.
        lengths: bits of the symbols.
        price: squared steps that a bit is worth.
        width: classes are those of the values in units of it.
        out: [R, C] of an integer type that takes the integers if it holds all of them; a new int8 tensor by default.

    Returns:
        `out`, or where codes are too large for it a new tensor of the narrowest of int16 and int32 that holds them.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    values = values.contiguous() if values.dtype == torch.bfloat16 else values.float().contiguous()
    given = (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()
    found = torch.empty(values.shape, dtype=torch.int8) if out is None else out
    settings: dict[str, Any] = {"step": step, "price": price, "width": width, "dependent": lengths.dependent}
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

"""Integers with one uniform step, rounded with regard to their code length.

An entropy coder charges exactly the bits used, so a weight w with step d becomes the integer q that minimizes

    (w / d - q)^2 + PRICE * bits(q),

its squared error plus the cost of its code. `PRICE` is the slope of the error over the rate of a uniform quantizer at
high rates: its error d^2 / 12 decreases by a factor of four per bit. At equal bits this loses less than rounding to
nearest with a larger step, most of all at low rates, where it widens the dead zone around zero.

Lengths depend mainly on the width of rows in units of the step. Row blocks (16 rows), which share a table in the coded
format, belong to the *class* of their root mean square, and each class has one list of lengths. A `Profile` is the
distribution of a model's weights by class; the lengths and bits of any step follow from it without another pass over
the weights.

*Dependent* codes (docs/format.md, section 9) use two quantizers with this step, whose values interleave. The coded
symbol is an index whose parity selects the next quantizer; the cheapest path is searched, at half the price.
Frequencies of indices have no formula; they are estimated from values drawn from each class of a profile.

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
    "BLOCK_ROWS", "LARGEST", "PRICE", "WORTH", "Lengths", "Profile", "coder_symbols", "largest_at", "least_spread",
    "low_bits_of", "round_priced", "scale_of", "symbols_of", "worth_of",
]  # fmt: skip

PRICE = math.log(2) / 6
"""Squared steps per bit."""

WORTH = 0.15 * PRICE
"""Squared steps per bit that the methods use. `PRICE` minimizes the squared error of weights, but takes energy from
weights that it rounds towards zero; a model suffers more from lost energy than from the same error elsewhere
(docs/methods/rate.md)."""

BLOCK_ROWS = 16
"""Rows per row block."""

WORTH_OF_DEPENDENT = 0.5 * WORTH
"""The same with dependent codes, whose paths leave less error to save (docs/methods/rate.md)."""

LARGEST, DENSE_LARGEST, DENSE_BITS = 31, 255, 5.0
"""The largest magnitude with its own code length; the same above `DENSE_BITS` bits per weight, where the coder stores
low bits separately. Larger magnitudes are stored as exceptions."""

MOST = float(1 << 30)
"""The largest integer."""

EXCEPTION_BITS = 32.0
"""Bits of an exception in addition to the symbol in its place, without low bits."""

CLASSES, NARROWEST = 128, -24.0
"""Number of classes, a quarter of an octave each, and the base-two logarithm of the first class's root mean square."""

BINS, REACH = 4096, 16
"""Bins of a class in a profile; the magnitude of the outermost bins, which count all larger values, in root mean
squares."""

ROUNDS = 4
"""Rounds of rounding and counting; another round changes the rate by less than a thousandth."""

_WIDER = {torch.int8: torch.int16, torch.int16: torch.int32}

DRAWN = 8192
"""Values per class that are searched for the frequencies of dependent codes."""

HALF_COUNT = 0.5
"""Added to every count, so that symbols missing in a sample have a length."""

LEAST_DEPENDENT = 1.25
"""Bits per weight of plain codes from which dependent codes replace them. Below, most weights are zero, a value that
dependent codes lack (docs/methods/rate.md)."""

NEARLY_ZERO = 1 / 16
"""Minimum root mean square of a row block in steps, because dependent codes turn zeros into a quarter of a step."""


def largest_at(bits_per_weight: float) -> int:
    """Return the largest magnitude with its own code length at a rate."""
    return LARGEST if bits_per_weight <= DENSE_BITS else DENSE_LARGEST


def exception_bits(largest: int) -> float:
    """Return the bits of an exception besides the symbol in its place; with low bits, the difference takes more."""
    return EXCEPTION_BITS if largest == LARGEST else 2 * EXCEPTION_BITS


def low_bits_of(largest: int) -> int:
    """Return the maximum number of separate low bits, given the largest magnitude with its own code length."""
    return 0 if largest == LARGEST else 3


def coder_symbols(largest: int, dependent: bool) -> str:
    """Return the coder's kind of symbols, given the largest magnitude with its own code length."""
    if dependent:
        return "dependent"
    low_bits = low_bits_of(largest)
    return f"plain+{low_bits}" if low_bits else "plain"


def least_spread(values: Tensor) -> float:
    """Return the least root mean square of a row block of matrices [..., R, C]; infinite if there are none."""
    squares = values.square().sum(-1, dtype=torch.float64) / max(values.shape[-1], 1)
    blocks = (block.mean(-1) for block in torch.split(squares, BLOCK_ROWS, -1) if block.numel())
    return math.sqrt(min([float(block.amin()) for block in blocks], default=math.inf))


def _scale(number: int) -> float:
    """Return the root mean square in the middle of a class."""
    return float(2.0 ** (NARROWEST + number / 4))


class Profile:
    """Histogram of weights by class.

    Attributes:
        counts: [CLASSES, BINS] float64, counts of weights by value in units of the class's root mean square.
        largest: the largest magnitude with its own code length, L.
    """

    def __init__(self, largest: int = LARGEST) -> None:
        """Create an empty profile."""
        self.largest = largest
        self.counts = torch.zeros(CLASSES, BINS, dtype=torch.float64)
        self._draws: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def mean_square(self) -> float:
        """The approximate mean square of the weights."""
        scales = torch.tensor([_scale(number) for number in range(CLASSES)], dtype=torch.float64)
        squares = self.counts @ _centers().square().double() * scales.square()
        return float(squares.sum() / self.counts.sum().clamp(min=1))

    def add(self, values: Tensor, factor: float) -> None:
        """Count weights.

        Args:
            values: [R, C] float32, finite.
            factor: number of weights that each value represents.
        """
        self._draws.clear()
        for number, counts in _core.count_values(values.contiguous().numpy(), classes=CLASSES, bins=BINS, reach=REACH):
            self.counts[number] += torch.from_numpy(counts).double() * factor

    def bits(self, step: float, lengths: Lengths, price: float = PRICE) -> float:
        """Return the bits of the weights rounded to a step."""
        counts = self._symbols(step, lengths, price)
        exceptions = self.counts.sum() - counts.sum()
        return float((counts * lengths.bits).sum() + exception_bits(self.largest) * exceptions)

    def lengths(self, step: float, price: float = PRICE, dependent: bool = False) -> Lengths:
        """Find the code lengths of the weights rounded to a step by alternating rounding and counting."""
        found = Lengths(torch.zeros(CLASSES, 2 * self.largest + 1, dtype=torch.float32), dependent)
        for _ in range(ROUNDS):
            found = Lengths(_lengths(self._symbols(step, found, price)), dependent)
        return found

    def _symbols(self, step: float, lengths: Lengths, price: float) -> Tensor:
        """Return the count of each symbol in each class, [CLASSES, 2 L + 1] float64; exceptions are excluded."""
        largest = self.largest
        counts = torch.zeros(CLASSES, 2 * largest + 1, dtype=torch.float64)
        for number in self.counts.sum(1).nonzero().flatten().tolist():
            values, weights = self._drawn(number) if lengths.dependent else (_centers(), self.counts[number])
            codes = lengths.cheapest(values * (_scale(number) / step), number, price)
            symbols = symbols_of(codes.int(), lengths.dependent)  # int8 could not be compared with L
            # Exceptions are counted beside the others, and dropped.
            places = symbols.clamp_(-largest - 1, largest + 1).add_(largest + 1)
            own = torch.zeros(2 * largest + 3, dtype=torch.float64).index_add_(0, places, weights)
            counts[number] = own[1:-1]
        return counts

    def _drawn(self, number: int) -> tuple[Tensor, Tensor]:
        """Return evenly spaced quantiles of a class's distribution, shuffled, and the weights that each represents."""
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
        bits: [CLASSES, 2 L + 1] float32, for the symbols from -L to L.
        dependent: whether symbols are indices of dependent codes; otherwise they are the codes.
    """

    bits: Tensor
    dependent: bool = False

    @property
    def largest(self) -> int:
        """The largest magnitude with its own code length, L."""
        return self.bits.shape[1] // 2

    @property
    def worth(self) -> float:
        """Squared steps per bit that the methods use."""
        return worth_of(self.dependent)

    def cheapest(self, values: Tensor, number: int, price: float = PRICE) -> Tensor:
        """Return the codes of values [n] of class `number` in units of the step.

        n must be a multiple of the rows of a row block.
        """
        rows = values.view(BLOCK_ROWS, -1)
        return round_priced(rows, 1.0, Lengths(self.bits[number : number + 1], self.dependent), price).flatten()

    def total(self, values: Tensor, codes: Tensor) -> float:
        """Return the total bits of codes [R, C] of a matrix [R, C]; the matrix determines the classes."""
        total, given = 0.0, values.contiguous().numpy()
        symbols = symbols_of(codes, self.dependent).contiguous()[None].numpy()
        for number, found in _core.count_integers(given, symbols, classes=CLASSES, largest=self.largest):
            counts = torch.from_numpy(found).double()
            exceptions = counts[[0, -1]]
            counts[[1, -2]] += exceptions
            total += float(counts[1:-1] @ self.bits[number].double() + exception_bits(self.largest) * exceptions.sum())
        return total


def symbols_of(codes: Tensor, dependent: bool) -> Tensor:
    """Return the coded symbols of codes with a signed dtype: for dependent codes, their indices."""
    return torch.where(codes & 3 == 1, codes, -codes) >> 2 if dependent else codes


def scale_of(step: float, dependent: bool) -> float:
    """Return the value of one code step."""
    return step / 4 if dependent else step


def worth_of(dependent: bool) -> float:
    """Return the squared steps per bit."""
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
        values: [R, C], any floating-point dtype, on the CPU.
        step: step of the quantizer: the value of one integer, or of four dependent codes.
        lengths: bits of the symbols.
        price: squared steps per bit.
        width: unit of the values when their class is determined.
        out: [R, C] integer tensor that receives the codes if it can hold all of them; a new int8 tensor by default.

    Returns:
        `out`, or, if codes are too large for it, a new tensor of the narrowest of int16 and int32 that holds them.

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
    """Return the centers of a profile's bins, [BINS] float32 in root mean squares."""
    return (torch.arange(BINS, dtype=torch.float32) + 0.5 - BINS / 2) * (2 * REACH / BINS)


def _lengths(counts: Tensor) -> Tensor:
    """Return bits [CLASSES, symbols] float32 from symbol counts; empty classes use the nearest class."""
    seen = counts.sum(1).nonzero().flatten()
    if len(seen) == 0:
        return torch.zeros(counts.shape, dtype=torch.float32)
    nearest = (torch.arange(len(counts))[:, None] - seen).abs().argmin(1)
    counts = counts[seen][nearest] + HALF_COUNT
    return -torch.log2(counts / counts.sum(1, keepdim=True)).float()

"""Dependent quantization of matrices, for `dependent.py`: the trellis, GPTQ along it, and the bits that codes take.

    python benches/trellis.py

prints the squared error of dependent codes of Gaussian and Laplace weights over that of the integers of `rate` with as
many bits, and in brackets the share of the weights' length that is kept (values projected on weights).

Two quantizers, of step two *units* each, lie between one another. A state of 4 or 8 says which one codes a weight, and
the parity of the code k leads to the next state (the trellises of VVC, H.266, and of its successor's model). A decoder
knows the state, so codes cost as many bits as those of one quantizer, and weights have twice as many values:

    mirrored     2 k + 1/2       or -(2 k + 1/2)      one distribution of codes, so one table
    with zero    2 k             or 2 k - sign k      those of VVC; a table each

Each row is four sequences, of the columns of one lane: 4 i + lane. All sequences start in state 0.

Source: trellis-coded quantization (Marcellin and Fischer, 1990); dependent quantization (Schwarz et al., 2019).
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from moepack.methods.rate.sample import stream_rows
from moepack.solvers.priced import LARGEST, WORTH, Profile, round_priced

LANES = 4
"""Sequences of a row."""

BLOCK = 64
"""Columns after which the best path is taken as decided, at most; errors of others follow from it."""

PRIOR, EXCEPTION_BITS, STREAM_BITS = 64.0, 32.0, 880.0
"""Codes that the frequencies of all rows count for among a run's; bits of an exception, and of a stream's states."""

WORTH_OF_DEPENDENT = 0.5
"""What a bit is worth over what the method takes it for: a trellis leaves less error to be saved."""

SEARCHED, ROUNDS, EXACT = 4, 5, 0.002
"""One run in so many is solved to find lengths and units; rounds of that; how near the bits must come."""


@dataclass(frozen=True)
class Matrices:
    """What is quantized.

    Attributes:
        weights: [E, R, C], columns in lane order.
        runs: [E, R] int64, the stream of each row, numbered from 0.
        prices: [E], what a bit is worth in squared units, where a pivot is 1.
        upper: [E, C, C], how errors are passed on (`moepack.solvers.gptq`); None to round without compensation.
        pivots: [E, C]; None for ones.
    """

    weights: Tensor
    runs: Tensor
    prices: Tensor
    upper: Tensor | None = None
    pivots: Tensor | None = None

    def some(self, every: int) -> tuple[Matrices, Tensor]:
        """Every so many-th run, and the rows [R'] that these are: all experts must have as many."""
        rows = self.runs[0] % every == 0
        runs = self.runs[:, rows]
        return replace(self, weights=self.weights[:, rows], runs=torch.unique(runs, return_inverse=True)[1]), rows


@dataclass(frozen=True)
class Design:
    """4 or 8 states, and whether the quantizers are mirrored."""

    states: int = 8
    mirrored: bool = True

    def counts(self, codes: Tensor, quantizers: Tensor, runs: Tensor, largest: int) -> Counts:
        """Count codes for one table, or for one of each quantizer."""
        return Counts(codes, None if self.mirrored else quantizers, runs, largest)


@dataclass(frozen=True)
class Found:
    """Values [E, R, C], their unit, and the bits of the integers and of the dependent codes."""

    values: Tensor
    unit: float
    bits: tuple[float, float]


def lane_order(columns: int) -> Tensor:
    """The columns, lane after lane; they must be a multiple of four."""
    return torch.arange(columns).view(-1, LANES).T.flatten()


class Counts:
    """How often each code comes in each run, by quantizer: [N, Q, 2 L + 3], those beyond L at the ends."""

    def __init__(self, codes: Tensor, quantizers: Tensor | None, runs: Tensor, largest: int) -> None:
        kinds, width = 1 if quantizers is None else 2, 2 * largest + 3
        places = codes.clamp(-largest - 1, largest + 1).long() + (largest + 1) + runs[..., None] * (kinds * width)
        if quantizers is not None:
            places += quantizers * width
        number = int(runs.max()) + 1
        found = torch.bincount(places.flatten(), minlength=number * kinds * width)
        self.counts = found.view(number, kinds, width).double()

    def lengths(self) -> Tensor:
        """Bits of codes, [N, Q, 2 L + 3] float32."""
        every = self.counts.sum(0) + 0.5
        frequencies = self.counts + PRIOR * every / every.sum(1, keepdim=True)
        bits = -torch.log2(frequencies / frequencies.sum(2, keepdim=True))
        bits[..., [0, -1]] += EXCEPTION_BITS
        return bits.float()

    def ideal(self) -> float:
        """Bits of all codes by these lengths."""
        return float((self.counts * self.lengths()).sum())

    def stored(self) -> float:
        """Bits of the coder: tables of 256 slots, as many as pay for themselves, and states."""
        least, tables = torch.inf, 1
        order = (self.counts * self.lengths()).sum((1, 2)).argsort()
        while tables <= min(64, len(self.counts)):
            groups = torch.empty(len(order), dtype=torch.int64)
            groups[order] = torch.arange(len(order)) * tables // len(order)
            for _ in range(3):
                sums = torch.zeros(tables, *self.counts.shape[1:], dtype=torch.float64).index_add_(
                    0, groups, self.counts
                )
                costs = _table_costs(sums)
                bits, groups = torch.einsum("nqw,tqw->nt", self.counts, costs).min(1)
            total = float(bits.sum()) + 8 * tables * sums.shape[1] * (1 + float((sums > 0).sum(2).float().mean()))
            if total > least * (1 - 0.0005):
                break
            least, tables = total, 2 * tables
        return least + STREAM_BITS * len(self.counts)


def _table_costs(counts: Tensor) -> Tensor:
    """Bits [T, Q, W] of codes by tables of 256 slots that are fitted to counts; rare ones are exceptions."""
    total = counts.sum(2, keepdim=True).clamp(min=1)
    best, least = torch.zeros_like(counts), torch.full(counts.shape[:2], torch.inf, dtype=torch.float64)
    for rarest in (1 / 12000, 1 / 6000, 1 / 3000, 1 / 1500, 1 / 750):
        listed = counts > total * rarest
        listed[..., [0, -1]] = False
        listed[..., counts.shape[2] // 2] = True
        slots = (counts / total * 256).floor().clamp(min=1) * listed
        while bool((left := 256 - slots.sum(2)).any()):
            grow = torch.where(listed, counts * torch.log2((slots + 1) / slots), -torch.inf)
            shrink = torch.where(slots > 1, counts * torch.log2(slots / (slots - 1)), torch.inf)
            slots.scatter_add_(2, grow.argmax(2, keepdim=True), (left > 0)[..., None].double())
            slots.scatter_add_(2, shrink.argmin(2, keepdim=True), -(left < 0)[..., None].double())
        most = slots.amax(2, keepdim=True)
        costs = torch.where(slots > 0, -torch.log2(slots / 256), EXCEPTION_BITS - torch.log2(most / 256))
        bits = (counts * costs).sum(2)
        best = torch.where((bits < least)[..., None], costs, best)
        least = torch.minimum(bits, least)
    return best


@cache
def _library() -> ctypes.CDLL:
    """`trellis.rs`, compiled for this machine."""
    source, built = Path(__file__).with_suffix(".rs"), Path(tempfile.mkdtemp()) / "trellis.so"
    flags = ["--edition=2024", "-Copt-level=3", "-Ctarget-cpu=native", "--crate-type=cdylib"]
    subprocess.run(["rustc", *flags, str(source), "-o", str(built)], check=True)
    return ctypes.CDLL(str(built))


def solve(design: Design, matrices: Matrices, unit: float, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The cheapest paths: codes and quantizers [E, R, C], and values [E, R, C] float32."""
    experts, rows, columns = matrices.weights.shape
    source = (matrices.weights / unit).contiguous()
    lengths = lengths.expand(-1, 2, -1).contiguous()
    weights = None if matrices.pivots is None else matrices.pivots.square().contiguous()
    upper = None if matrices.upper is None else matrices.upper.contiguous()
    codes, values = torch.empty(source.shape, dtype=torch.int32), torch.empty_like(source)
    quantizers = torch.empty(source.shape, dtype=torch.uint8)
    largest = lengths.shape[2] // 2 - 1
    chosen = [design.states, int(design.mirrored), largest, BLOCK, columns // LANES]
    sizes = torch.tensor([experts * rows, columns, rows, *chosen])
    given = (sizes, source, matrices.runs.contiguous(), matrices.prices.float().contiguous(), lengths, weights, upper)
    arrays = (*given, codes, quantizers, values)
    _library().solve(*(ctypes.c_void_p(None if each is None else each.data_ptr()) for each in arrays))
    return codes, quantizers, values * unit


def solved_alike(matrices: Matrices, integers: Tensor, step: float, design: Design, largest: int) -> Found:
    """Solve at the unit at which codes take the bits of given integers of a step."""
    few, rows = matrices.some(SEARCHED) if int(matrices.runs[0].max()) >= SEARCHED else (matrices, slice(None))
    plain = Counts(integers[:, rows], None, few.runs, largest)
    wanted, lengths = plain.ideal(), plain.lengths()
    octaves, slope = 0.0, few.weights.numel() * 0.9
    for _ in range(ROUNDS):
        codes, quantizers, _ = solve(design, few, step / 2 * 2.0**octaves, lengths)
        counts = design.counts(codes, quantizers, few.runs, largest)
        lengths = counts.lengths()
        octaves += (counts.ideal() - wanted) / slope
    wanted = Counts(integers, None, matrices.runs, largest).stored()
    lengths = _all_runs(lengths, matrices.runs)
    for _ in range(3):
        unit = step / 2 * 2.0**octaves
        codes, quantizers, values = solve(design, matrices, unit, lengths)
        counts = design.counts(codes, quantizers, matrices.runs, largest)
        bits, lengths = counts.stored(), counts.lengths()
        if abs(bits / wanted - 1) < EXACT:
            break
        octaves += (bits - wanted) / (matrices.weights.numel() * 0.9)
    return Found(values, unit, (wanted, bits))


def _all_runs(lengths: Tensor, runs: Tensor) -> Tensor:
    """The mean lengths of some runs for all."""
    return lengths.mean(0, keepdim=True).expand(int(runs.max()) + 1, -1, -1).contiguous()


DESIGNS = {
    "8 states": Design(8),
    "4 states": Design(4),
    "8 states with zero": Design(8, mirrored=False),
    "4 states with zero": Design(4, mirrored=False),
}


def main() -> None:
    """Compare designs on sources of unit variance."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = (1, 256, 256)
    sources = {"Gaussian": torch.randn(shape), "Laplace": torch.distributions.Laplace(0.0, 0.5**0.5).sample(shape)}
    runs = torch.arange(shape[1])[None] // stream_rows(shape[2])
    print("| source, bits | integers |", " | ".join(DESIGNS), "|\n|" + "---|" * (2 + len(DESIGNS)))
    for (name, weights), step in itertools.product(sources.items(), (1.6, 1.0, 0.5, 0.25)):
        profile = Profile()
        profile.add(weights[0], 1.0)
        codes = round_priced(weights[0], step, profile.lengths(step, WORTH), WORTH)[None].int()
        bits = Counts(codes, None, runs, LARGEST).stored() / weights.numel()
        matrices = Matrices(weights, runs, torch.tensor([WORTH_OF_DEPENDENT * 4 * WORTH]))
        scalar, kept = _measures(weights, codes * step)
        cells = [f"{name}, {bits:.2f}", f"1 ({kept:.3f})"]
        for design in DESIGNS.values():
            found = solved_alike(matrices, codes, step, design, LARGEST)
            error, kept = _measures(weights, found.values)
            cells.append(f"{error / scalar:.3f} ({kept:.3f})")
        print("|", " | ".join(cells), "|", flush=True)


def _measures(weights: Tensor, values: Tensor) -> tuple[float, float]:
    """The mean squared error, and the share of the weights' length that is kept."""
    return float((weights - values).square().mean()), float((weights * values).sum() / weights.square().sum())


if __name__ == "__main__":
    main()

"""What becomes of chosen experts that are not on the device: they come over the bus, or the CPU multiplies them.

A copy takes the bus as long as it takes, whatever the expert is needed for, and leaves the expert on the device. The
CPU reads the same bytes where they are, often faster than the bus moves them, and both work at a time. How fast either
is, beside the other, is measured when a model is loaded (`measured`), and each call is shared out by that (`Rates`).
How fast the CPU is depends on what else it does, so its times follow those of the calls (`Shares`).
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, cycle
from math import inf
from statistics import median
from threading import Event
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moepack.runtime.backends import backend_for
from moepack.runtime.tiers.arena import Arena
from moepack.runtime.tiers.device import Arrival, Device
from moepack.runtime.tiers.host import Host

__all__ = ["COMPUTED", "MISSES", "MOVED", "SECONDS", "Misses", "Rates", "Shares", "measured"]

Misses = Literal["auto", "moved", "computed"]
"""What becomes of missing experts: "moved": all come; "computed": the CPU multiplies all for which no slot is free;
"auto": they are shared out so that all are done soonest."""

MISSES: tuple[Misses, ...] = ("auto", "moved", "computed")
"""The values of `Misses`."""

SECONDS = 0.5
"""How long to measure: other threads may be busy for a while with what they did before."""

MARGIN = 1.1
"""Factor by which times of the CPU are multiplied: where both are as fast, an expert that comes is there for its next
use. With half of the experts on an H100, whose host takes 0.7 of the bus's time for one, 1.0 to 1.25 are level."""

WEIGHT = 0.25
"""Exponent of a call's time over the expected one, by which the CPU's times are multiplied: 1 would forget the past."""

AGEING = 0.9995
"""Factor of the CPU's times at each call that leaves it nothing, so that it is tried again some day: where a time is
four times too long after 2,800 calls, where the CPU is ten times slower than the bus once in 700, which costs 1.3 %."""

_MOST = 4.0
"""Largest ratio that counts: what takes much longer has been interrupted."""

_ROUNDS = 6
"""Fewest measurements, of which the later half counts."""

_CPU = torch.device("cpu")


class Rates(NamedTuple):
    """What missing experts of one form cost.

    Attributes:
        bus: seconds for an expert to come to the device, while the CPU is idle.
        bus_beside: the same while the CPU multiplies.
        overhead: seconds of a call of the CPU beyond those for its experts.
        product: seconds for the CPU to multiply an expert by one token, while the bus is idle.
        product_beside: the same while experts come.
    """

    bus: float
    bus_beside: float
    overhead: float
    product: float
    product_beside: float

    def cpu_share(self, tokens: Sequence[int]) -> int:
        """How many of some missing experts the CPU multiplies, the first ones, so that all are done soonest.

        Args:
            tokens: of each expert, ascending. An expert with n tokens is taken to cost the CPU n times what it costs
                with one, which is the most that it can.
        """
        missing = len(tokens)

        def seconds(count: int, pairs: int) -> float:
            if not count:
                return missing * self.bus
            beside = count < missing
            return max((missing - count) * self.bus_beside, self.of_cpu(pairs, beside=beside))

        times = [seconds(*each) for each in enumerate(accumulate(tokens, initial=0))]
        return times.index(min(times))

    @property
    def patience(self) -> float:
        """How many products of the CPU take as long as one expert takes to come.

        Bringing an expert pays when it will be used so much more often than the one that goes; `Slots.gain` tells how
        much more often it has been.
        """
        each = self.of_cpu(1, beside=False)
        return self.bus / each if each else inf

    def of_cpu(self, pairs: int, *, beside: bool) -> float:
        """Seconds of the CPU for so many pairs of an expert and a token."""
        return self.overhead + pairs * (self.product_beside if beside else self.product)

    def with_cpu(self, factor: float) -> "Rates":
        """Return rates whose times of the CPU are multiplied by a factor."""
        bus, bus_beside, *of_cpu = self
        return Rates(bus, bus_beside, *(factor * time for time in of_cpu))


MOVED, COMPUTED = Rates(0.0, 0.0, 1.0, 1.0, 1.0), Rates(1.0, 1.0, 0.0, 0.0, 0.0)
"""Rates by which all come, and by which the CPU multiplies all for which no slot is free."""


class Shares:
    """How the calls of one form's experts are shared out.

    Args:
        rates: by which.
        follow: whether the CPU's times follow those of calls.

    Attributes:
        rates: the current ones.
    """

    def __init__(self, rates: Rates, *, follow: bool = False) -> None:
        self.rates, self._follow = rates, follow

    def cpu_share(self, tokens: Sequence[int]) -> int:
        """See `Rates.cpu_share`."""
        share = self.rates.cpu_share(tokens)
        if self._follow and not share and min(tokens, default=0) == 1:
            self.rates = self.rates.with_cpu(AGEING)
        return share

    def note(self, experts: int, pairs: int, seconds: float, *, beside: bool) -> None:
        """Note how long the CPU took for a share.

        Args:
            experts: of the share.
            pairs: of an expert and a token.
            seconds: how long.
            beside: whether other experts came meanwhile.
        """
        expected = self.rates.of_cpu(pairs, beside=beside)
        if self._follow and expected:
            # The tokens of one expert together take less than was expected, however fast the CPU is.
            least = 1 / _MOST if experts == pairs else 1.0
            self.rates = self.rates.with_cpu(min(max(MARGIN * seconds / expected, least), _MOST) ** WEIGHT)


def measured(device: Device, arena: Arena, host: Host, layer: Any, top_k: int, seconds: float = SECONDS) -> Rates:
    """Measure what experts take that are not on a device.

    Args:
        device: which.
        arena: slots of the experts' form; their bytes are lost.
        host: where the experts are.
        layer: a layer of these experts, of the kind `PackedExperts`.
        top_k: experts that a token chooses.
        seconds: how long to measure, at least.
    """
    end, rounds = time.perf_counter() + seconds, list[_Round]()
    with ThreadPoolExecutor(1) as pool:
        trial = _Trial(device, arena, host, layer, top_k, pool)
        while len(rounds) < _ROUNDS or time.perf_counter() < end:
            rounds.append(trial.round())
    bus, bus_beside, one, many, beside = (median(times) for times in zip(*rounds[len(rounds) // 2 :], strict=True))
    share = many / trial.many
    each = min(max((many - one) / (trial.many - 1), share / 2), share)  # by the slope, which may be noise
    overhead = max(one - each, 0.0)
    of_cpu = overhead, each, max((beside - overhead) / trial.many, each)
    return Rates(bus, bus_beside, *of_cpu).with_cpu(MARGIN)


class _Round(NamedTuple):
    """Seconds of one measurement.

    Attributes:
        bus, bus_beside: as of `Rates`.
        one, many: of products with one expert and with many.
        beside: of a product with many while experts come.
    """

    bus: float
    bus_beside: float
    one: float
    many: float
    beside: float


class _Trial:
    """Products and copies of experts of one form.

    Args:
        device, arena, host, layer, top_k: as of `measured`.
        pool: a thread for products beside copies.

    Attributes:
        many: experts of a product.
    """

    def __init__(
        self, device: Device, arena: Arena, host: Host, layer: Any, top_k: int, pool: ThreadPoolExecutor
    ) -> None:
        self._device, self._arena, self._host, self._layer, self._pool = device, arena, host, layer, pool
        self._experts, _, columns = next(iter(layer.shapes.values()))
        self.many, self._next = max(2, min(top_k, self._experts)), 0
        self._x = torch.ones((1, columns), device=device.place)

    def round(self) -> _Round:
        """Measure everything once."""
        one, many, bus = self._product(1), self._product(self.many), self._bus()
        # Each again and again while the other has not ended once.
        multiplied, moved = Event(), Event()
        products = self._pool.submit(_again, lambda: self._product(self.many), multiplied, moved)
        bus_beside = _again(self._bus, moved, multiplied)
        return _Round(bus, bus_beside, one, many, products.result())

    def _numbers(self, count: int) -> Tensor:
        """Other experts at each time, [1, count], which no cache of the CPU has."""
        self._next += count
        return torch.arange(self._next, self._next + count).remainder(self._experts).view(1, -1)

    def _bus(self) -> float:
        """Seconds for an expert to come."""
        count: int = min(self.many, self._experts, self._arena.slots.count)
        seconds = 0.0
        slots, arrivals = cycle(range(count)), list[Arrival]()

        def send(expert: int, sources: Sequence[Tensor]) -> Arrival:
            arrivals.append(self._device.bring(self._arena.copies(next(slots), sources)))
            return arrivals[-1]

        for _, chosen in self._host.portions(self._layer, self._numbers(count), _CPU):  # read from the drive before
            start = time.perf_counter()
            self._host.send(self._layer, [number for number in chosen[0].tolist() if number < self._experts], send)
            arrivals[-1].finish()
            seconds += time.perf_counter() - start
        return seconds / count

    def _product(self, count: int) -> float:
        """Seconds of one token's product with so many experts, and of its way to the CPU and back."""
        seconds, layer = 0.0, self._layer
        for matrices, chosen in self._host.portions(layer, self._numbers(count), _CPU):
            start = time.perf_counter()
            given = self._x.cpu(), chosen, torch.ones(chosen.shape)
            backend_for(_CPU).experts(matrices, *given, layer.act_fn, layer.mode).to(self._device.place)
            seconds += time.perf_counter() - start
        return seconds


def _again(run: Callable[[], float], ran: Event, other: Event) -> float:
    """Run something once, and again until something else has run once; the mean of what it gives."""
    given = list[float]()
    try:
        while not given or not other.is_set():
            given.append(run())
            ran.set()
    finally:
        ran.set()  # nobody waits for what has failed
    return sum(given) / len(given)

"""Handles chosen experts that are not on the device: they are moved over the bus, or the CPU multiplies them.

A copy occupies the bus for a fixed time, regardless of how many tokens need the expert, and leaves the expert on the
device. The CPU reads the same bytes in place, often faster than the bus moves them, and both can work concurrently.
The speed of each, alone and concurrently with the other, is measured when a model is loaded (`measured`), and each call
is split accordingly (`Rates`). The speed of the CPU depends on its other load, so its times follow those of actual
calls (`Shares`).
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

from moepack.backends import backend_for
from moepack.stores.tiers.accelerator import Arrival, Device
from moepack.stores.tiers.arena import Arena
from moepack.stores.tiers.host import Host

__all__ = ["COMPUTED", "MISSES", "MOVED", "SECONDS", "Misses", "Rates", "Shares", "measured"]

Misses = Literal["auto", "moved", "computed"]
"""How to handle missing experts. "moved": transfer all. "computed": the CPU multiplies all that have no free slot.
"auto": split them so that everything finishes as early as possible."""

MISSES: tuple[Misses, ...] = ("auto", "moved", "computed")
"""The values of `Misses`."""

SECONDS = 0.5
"""The least duration of the measurement: other threads may be busy for a while with earlier work."""

MARGIN = 1.1
"""Factor applied to CPU times: at equal speed, moving an expert is preferable, because it is then on the device for its
next use. With half of the experts on an H100, whose host takes 0.7 of the bus's time per expert, 1.0 to 1.25 are
equally fast."""

WEIGHT = 0.25
"""Exponent applied to a call's time relative to the expected time; the CPU's times are multiplied by the result. An
exponent of 1 would ignore all earlier calls."""

AGEING = 0.9995
"""Factor applied to the CPU's times on each call that leaves it no work, so it is eventually tried again: after 2,800
calls if a time is four times too long, and once in 700 calls if the CPU is ten times slower than the bus, which costs
1.3 %."""

_MOST = 4.0
"""The largest ratio that counts: calls that take much longer were interrupted."""

_ROUNDS = 6
"""The least number of measurements; the later half counts."""

_CPU = torch.device("cpu")


class Rates(NamedTuple):
    """Costs of missing experts of one layout.

    Attributes:
        bus: seconds to move an expert to the device while the CPU is idle.
        bus_concurrent: the same while the CPU multiplies.
        overhead: seconds per CPU call in addition to the time for its experts.
        product: seconds for the CPU to multiply an expert by one token while the bus is idle.
        product_concurrent: the same while experts are moved.
    """

    bus: float
    bus_concurrent: float
    overhead: float
    product: float
    product_concurrent: float

    def cpu_share(self, tokens: Sequence[int]) -> int:
        """How many missing experts, from the first, the CPU should multiply so that everything finishes earliest.

        Args:
            tokens: the number of tokens of each expert, ascending. An expert with n tokens is assumed to cost the CPU
                n times as much as with one, which is an upper bound.
        """
        missing = len(tokens)

        def seconds(count: int, pairs: int) -> float:
            if not count:
                return missing * self.bus
            concurrent = count < missing
            return max((missing - count) * self.bus_concurrent, self.of_cpu(pairs, concurrent=concurrent))

        times = [seconds(*each) for each in enumerate(accumulate(tokens, initial=0))]
        return times.index(min(times))

    @property
    def patience(self) -> float:
        """The time to move one expert, in CPU products.

        Moving an expert pays off if it will have this many more uses than the expert that it replaces; `Slots.gain`
        returns the difference in uses so far.
        """
        each = self.of_cpu(1, concurrent=False)
        return self.bus / each if each else inf

    def of_cpu(self, pairs: int, *, concurrent: bool) -> float:
        """CPU seconds for a number of (expert, token) pairs."""
        return self.overhead + pairs * (self.product_concurrent if concurrent else self.product)

    def with_cpu(self, factor: float) -> "Rates":
        """Return rates with CPU times multiplied by a factor."""
        bus, bus_concurrent, *of_cpu = self
        return Rates(bus, bus_concurrent, *(factor * time for time in of_cpu))


MOVED, COMPUTED = Rates(0.0, 0.0, 1.0, 1.0, 1.0), Rates(1.0, 1.0, 0.0, 0.0, 0.0)
"""Rates under which all experts are moved, and under which the CPU multiplies all that have no free slot."""


class Shares:
    """Splits calls between device and CPU, for experts of one layout.

    Args:
        rates: the initial rates.
        follow: whether CPU times follow those of actual calls.

    Attributes:
        rates: the current rates.
    """

    def __init__(self, rates: Rates, *, follow: bool = False) -> None:
        self.rates, self._follow = rates, follow

    def cpu_share(self, tokens: Sequence[int]) -> int:
        """See `Rates.cpu_share`."""
        share = self.rates.cpu_share(tokens)
        if self._follow and not share and min(tokens, default=0) == 1:
            self.rates = self.rates.with_cpu(AGEING)
        return share

    def note(self, experts: int, pairs: int, seconds: float, *, concurrent: bool) -> None:
        """Record the CPU time of a call.

        Args:
            experts: the number of experts.
            pairs: the number of (expert, token) pairs.
            seconds: the time.
            concurrent: whether other experts were moved at the same time.
        """
        expected = self.rates.of_cpu(pairs, concurrent=concurrent)
        if self._follow and expected:
            # Several tokens of one expert take less time than predicted, regardless of the CPU's speed.
            least = 1 / _MOST if experts == pairs else 1.0
            self.rates = self.rates.with_cpu(min(max(MARGIN * seconds / expected, least), _MOST) ** WEIGHT)


def measured(device: Device, arena: Arena, host: Host, layer: Any, top_k: int, seconds: float = SECONDS) -> Rates:
    """Measure the costs of experts that are not on a device.

    Args:
        device: the device.
        arena: slots of the experts' layout; their contents are lost.
        host: holds the experts.
        layer: a `PackedExperts` layer with these experts.
        top_k: experts per token.
        seconds: the least duration of the measurement.
    """
    end, rounds = time.perf_counter() + seconds, list[_Round]()
    with ThreadPoolExecutor(1) as pool:
        trial = _Trial(device, arena, host, layer, top_k, pool)
        while len(rounds) < _ROUNDS or time.perf_counter() < end:
            rounds.append(trial.round())
    last = rounds[len(rounds) // 2 :]
    bus, bus_concurrent, one, many, concurrent = (median(times) for times in zip(*last, strict=True))
    share = many / trial.many
    each = min(max((many - one) / (trial.many - 1), share / 2), share)  # from the slope, which may be noisy
    overhead = max(one - each, 0.0)
    of_cpu = overhead, each, max((concurrent - overhead) / trial.many, each)
    return Rates(bus, bus_concurrent, *of_cpu).with_cpu(MARGIN)


class _Round(NamedTuple):
    """Seconds of one measurement.

    Attributes:
        bus, bus_concurrent: as in `Rates`.
        one, many: products with one expert and with many.
        concurrent: a product with many experts while others are moved.
    """

    bus: float
    bus_concurrent: float
    one: float
    many: float
    concurrent: float


class _Trial:
    """Runs products and copies of experts of one layout.

    Args:
        device, arena, host, layer, top_k: as in `measured`.
        pool: a thread for products that run concurrently with copies.

    Attributes:
        many: the number of experts in a large product.
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
        # Repeat each until the other has completed at least once.
        multiplied, moved = Event(), Event()
        products = self._pool.submit(_again, lambda: self._product(self.many), multiplied, moved)
        bus_concurrent = _again(self._bus, moved, multiplied)
        return _Round(bus, bus_concurrent, one, many, products.result())

    def _numbers(self, count: int) -> Tensor:
        """Different experts on each call, [1, count], which are not in the CPU's caches."""
        self._next += count
        return torch.arange(self._next, self._next + count).remainder(self._experts).view(1, -1)

    def _bus(self) -> float:
        """Seconds to move an expert."""
        count: int = min(self.many, self._experts, self._arena.slots.count)
        seconds = 0.0
        slots, arrivals = cycle(range(count)), list[Arrival]()

        def send(expert: int, sources: Sequence[Tensor]) -> Arrival:
            arrivals.append(self._device.bring(self._arena.copies(next(slots), sources)))
            return arrivals[-1]

        for _, chosen in self._host.portions(self._layer, self._numbers(count), _CPU):  # read from the drive first
            start = time.perf_counter()
            self._host.send(self._layer, [number for number in chosen[0].tolist() if number < self._experts], send)
            arrivals[-1].finish()
            seconds += time.perf_counter() - start
        return seconds / count

    def _product(self, count: int) -> float:
        """Seconds for one token's product with `count` experts, including transfers to the CPU and back."""
        seconds, layer = 0.0, self._layer
        for matrices, chosen in self._host.portions(layer, self._numbers(count), _CPU):
            start = time.perf_counter()
            given = self._x.cpu(), chosen, torch.ones(chosen.shape)
            backend_for(_CPU).experts(matrices, *given, layer.act_fn, layer.mode).to(self._device.place)
            seconds += time.perf_counter() - start
        return seconds


def _again(run: Callable[[], float], ran: Event, other: Event) -> float:
    """Run a function at least once and until `other` is set; return the mean of its results."""
    given = list[float]()
    try:
        while not given or not other.is_set():
            given.append(run())
            ran.set()
    finally:
        ran.set()  # do not block the other thread after a failure
    return sum(given) / len(given)

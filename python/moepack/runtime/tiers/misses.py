"""What becomes of chosen experts that are not on the device: they come over the bus, or the CPU multiplies them.

A copy takes the bus as long as it takes, whatever the expert is needed for, and leaves the expert on the device. The
CPU reads the same bytes where they are, often faster than the bus moves them, and both work at a time. How fast either
is, beside the other, is measured when a model is loaded (`measured`), and each call is shared out by that (`Rates`).
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from math import inf
from statistics import median
from typing import Any, Literal, NamedTuple

import torch

from moepack.runtime.backends import backend_for
from moepack.runtime.tiers.arena import Arena
from moepack.runtime.tiers.device import Device
from moepack.runtime.tiers.host import Host

__all__ = ["COMPUTED", "MISSES", "MOVED", "SECONDS", "Misses", "Rates", "measured"]

Misses = Literal["auto", "moved", "computed"]
"""Whichever is faster; all over the bus; all on the CPU."""

MISSES: tuple[Misses, ...] = ("auto", "moved", "computed")

SECONDS = 0.5
"""How long to measure: other threads may be busy for a while with what they did before."""

_ROUNDS = 6
"""Fewest measurements, of which the later half counts."""

_CPU = torch.device("cpu")


class Rates(NamedTuple):
    """Seconds that missing experts of one form take.

    Attributes:
        bus: to come, each, while the CPU does nothing.
        bus_beside: to come, each, while it multiplies.
        call: of the CPU, whatever it multiplies.
        alone: of the CPU beyond that, for each expert and token, while nothing comes.
        beside: the same while experts come.
    """

    bus: float
    bus_beside: float
    call: float
    alone: float
    beside: float

    def computed(self, tokens: Sequence[int]) -> int:
        """How many of some missing experts the CPU multiplies, the first ones, so that all are done soonest.

        Args:
            tokens: those of each expert, ascending. The CPU takes at most as many times as long for them as for one.
        """
        missing = len(tokens)

        def seconds(count: int, multiplied: int) -> float:
            if not count:
                return missing * self.bus
            if count == missing:
                return self.call + multiplied * self.alone
            return max((missing - count) * self.bus_beside, self.call + multiplied * self.beside)

        times = [seconds(*pair) for pair in enumerate(accumulate(tokens, initial=0))]
        return times.index(min(times))

    @property
    def patience(self) -> float:
        """The uses on the CPU that take as long as coming over the bus."""
        return self.bus / (self.call + self.alone) if self.call + self.alone else inf


MOVED, COMPUTED = Rates(0.0, 0.0, 1.0, 1.0, 1.0), Rates(1.0, 1.0, 0.0, 0.0, 0.0)
"""Rates by which all come, and by which the CPU multiplies all."""


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
    trial = _Trial(device, arena, host, layer, top_k)
    few, end, rounds = trial.few, time.perf_counter() + seconds, list[tuple[float, ...]]()
    with ThreadPoolExecutor(1) as pool:
        while len(rounds) < _ROUNDS or time.perf_counter() < end:
            product = pool.submit(trial.product, few)
            both = trial.bus(), product.result()
            rounds.append((trial.bus(), trial.product(1), trial.product(few), *both))
    bus, one, alone, bus_beside, beside = (median(values) for values in zip(*rounds[len(rounds) // 2 :], strict=True))
    slope = (alone - one) / max(few - 1, 1)
    each = slope if 0 < slope < alone / few else alone / few
    call = alone - few * each
    return Rates(bus / few, bus_beside / few, call, each, max(beside - call, 0.0) / few)


class _Trial:
    """Products and copies of experts of one form; arguments as of `measured`.

    Attributes:
        few: experts that come at a time, and that a product has.
    """

    def __init__(self, device: Device, arena: Arena, host: Host, layer: Any, top_k: int) -> None:
        self._device, self._arena, self._host, self._layer = device, arena, host, layer
        self._experts, _, columns = next(iter(layer.shapes.values()))
        self.few, self._next = max(1, min(top_k, self._experts, arena.slots.count)), 0
        self._sources = torch.split(device.pinned(arena.expert_bytes).zero_(), arena.sizes)
        self._x = torch.ones((1, columns), device=device.place)

    def bus(self) -> float:
        """Seconds in which experts come."""
        start = time.perf_counter()
        arrivals = [self._device.bring(self._arena.copies(slot, self._sources)) for slot in range(self.few)]
        arrivals[-1].finish()
        return time.perf_counter() - start

    def product(self, count: int) -> float:
        """Seconds of one token's product with so many experts, and of its way to the CPU and back."""
        # Others at each time, which no cache of the CPU has.
        numbers = torch.arange(self._next, self._next + count).remainder(self._experts).view(1, -1)
        self._next, seconds, layer = self._next + count, 0.0, self._layer
        for matrices, chosen in self._host.portions(layer, numbers, _CPU):
            start = time.perf_counter()
            given = self._x.cpu(), chosen, torch.ones(chosen.shape)
            backend_for(_CPU).experts(matrices, *given, layer.act_fn, layer.mode).to(self._device.place)
            seconds += time.perf_counter() - start
        return seconds

"""Which experts tokens choose, and what caches of them would have hit: a recorded trace, replayed under each policy.

A cache holds so many experts of all layers together, as `StreamingStore` does. Tokens come one after the other and
visit the layers in order, as in decoding. Belady's policy knows the future and drops what is used last: no other hits
more often.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moepack.errors import LoadError
from moepack.runtime.streaming.records import HALF_LIFE
from moepack.runtime.streaming.residency import CANDIDATES
from moepack.runtime.streaming.store import expert_layers

__all__ = ["POLICIES", "Trace", "hit_rate", "recorded"]


@dataclass(frozen=True)
class Trace:
    """The choices of some tokens.

    Attributes:
        chosen: [T, L, k] int64, the experts of each token in each layer; -1 where it has fewer.
        experts: of a layer.
    """

    chosen: NDArray[np.int64]
    experts: int

    @property
    def requests(self) -> list[int]:
        """Experts in the order in which they are needed, numbered over all layers."""
        numbers = self.chosen + self.experts * np.arange(self.chosen.shape[1])[:, None]
        requests: list[int] = numbers[self.chosen >= 0].tolist()
        return requests

    @property
    def size(self) -> int:
        """Experts of all layers."""
        return self.experts * int(self.chosen.shape[1])

    def save(self, file: Path) -> None:
        """Write the trace, as NumPy's `npz`."""
        with file.open("wb") as out:
            np.savez_compressed(out, chosen=self.chosen.astype(np.int32), experts=self.experts)

    @classmethod
    def open(cls, file: Path) -> "Trace":
        """Read a trace.

        Raises:
            LoadError: the file holds none.
        """
        try:
            with np.load(file, allow_pickle=False) as found:
                chosen, experts = found["chosen"].astype(np.int64), int(found["experts"])
        except Exception as error:  # NumPy's errors, errors of zip files and their compression, and others
            raise LoadError("holds no trace of routing", file=file) from error
        if chosen.ndim != 3 or experts < 1 or not ((chosen >= -1) & (chosen < experts)).all():
            raise LoadError("holds no trace of routing", file=file)
        return cls(chosen, experts)


@contextmanager
def recorded(model: Any) -> Iterator[Callable[[], Trace]]:
    """Record what a packed model's routers choose; the function that is given returns the trace so far.

    Raises:
        LoadError: the model has no packed experts whose routers could be watched.
    """
    layers = expert_layers(model)
    if not layers or any(not hasattr(layer, "num_experts") for layer in layers):
        raise LoadError("the model has no packed experts whose routing could be recorded")
    seen: list[list[torch.Tensor]] = [[] for _ in layers]

    def note(at: int) -> Callable[..., None]:
        return lambda _, given: seen[at].append(given[1].detach().cpu().long())

    hooks = [layer.register_forward_pre_hook(note(at)) for at, layer in enumerate(layers)]
    experts = max(layer.shapes[layer.projections[0]][0] for layer in layers)

    def trace() -> Trace:
        if not seen[0]:
            return Trace(np.zeros((0, len(layers), 0), np.int64), experts)
        chosen = torch.stack([torch.cat(calls) for calls in seen], dim=1)
        return Trace(torch.where((chosen >= 0) & (chosen < experts), chosen, -1).numpy(), experts)

    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()


def hit_rate(trace: Trace, policy: str, capacity: int) -> float:
    """The share of requests that a cache of so many experts hits, from an empty one on.

    Args:
        trace: the requests.
        policy: one of `POLICIES`.
        capacity: experts that fit, at least 1.
    """
    requests = trace.requests
    return POLICIES[policy](requests, capacity) / max(len(requests), 1)


def _by_score(score: Callable[[Sequence[int]], Iterable[float]]) -> Callable[[Sequence[int], int], int]:
    """A policy that drops the expert with the least score, given at its last request by `score` for all requests."""

    def hits(requests: Sequence[int], capacity: int) -> int:
        resident: dict[int, float] = {}
        heap: list[tuple[float, int]] = []
        found = 0
        for request, own in zip(requests, score(requests), strict=True):
            if request in resident:
                found += 1
            elif len(resident) == capacity:
                while True:
                    value, victim = heappop(heap)
                    if resident.get(victim) == value:  # else it was asked for again since
                        break
                del resident[victim]
            resident[request] = own
            heappush(heap, (own, request))
        return found

    return hits


def _uses(requests: Sequence[int]) -> Iterator[float]:
    """How often an expert was asked for; of several, later ones count more."""
    counts = Counter[int]()
    for time, request in enumerate(requests):
        counts[request] += 1
        yield counts[request] + time / len(requests)


def _decayed(requests: Sequence[int]) -> Iterator[float]:
    """The logarithm of the uses of an expert, each counting half after `HALF_LIFE` requests (LRFU)."""
    scores: dict[int, float] = {}
    for time, request in enumerate(requests):
        scores[request] = float(np.logaddexp2(scores.get(request, -np.inf), time / HALF_LIFE))
        yield scores[request]


def _next_use(requests: Sequence[int]) -> list[float]:
    """How soon an expert is asked for again, as a score."""
    scores, coming = [0.0] * len(requests), dict[int, float]()
    for time in reversed(range(len(requests))):
        scores[time] = -coming.get(requests[time], float(2 * len(requests) - time))
        coming[requests[time]] = float(time)
    return scores


def _least_of_oldest(requests: Sequence[int], capacity: int) -> int:
    """The policy of `Residency`: of the experts whose last use is longest ago the least used one goes."""
    resident, uses, found = OrderedDict[int, None](), Counter[int](), 0
    for request in requests:
        if request in resident:
            found += 1
        elif len(resident) == capacity:
            victim = min(islice(resident, CANDIDATES), key=lambda expert: uses[expert])
            del resident[victim]
            uses[victim] //= 2
        uses[request] += 1
        resident[request] = None
        resident.move_to_end(request)
    return found


POLICIES: dict[str, Callable[[Sequence[int], int], int]] = {
    "lru": _by_score(lambda requests: map(float, range(len(requests)))),
    "lfu": _by_score(_uses),
    "lrfu": _by_score(_decayed),
    "whole experts": _least_of_oldest,
    "belady": _by_score(_next_use),
}
"""Hits by requests and capacity: the last use, all uses, uses that fade (as `Blocks`), `Residency`'s, the best."""

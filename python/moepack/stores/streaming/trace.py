"""Recorded traces of routing, and the hit rates that caches would have had under each policy.

A cache holds a number of experts of all layers together, like `StreamingStore`. Tokens are processed one after another
and visit the layers in order, as in decoding. Belady's policy knows the future and drops the expert that is used last;
it is optimal.
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
from moepack.stores.streaming.experts import expert_layers
from moepack.stores.streaming.records import HALF_LIFE
from moepack.stores.streaming.residency import CANDIDATES

__all__ = ["POLICIES", "Trace", "hit_rate", "recorded"]


@dataclass(frozen=True)
class Trace:
    """The routing of a sequence of tokens.

    Attributes:
        chosen: [T, L, k] int64, the experts of each token in each layer; padded with -1.
        experts: experts per layer.
    """

    chosen: NDArray[np.int64]
    experts: int

    @property
    def requests(self) -> list[int]:
        """Requested experts in order, numbered over all layers."""
        numbers = self.chosen + self.experts * np.arange(self.chosen.shape[1])[:, None]
        requests: list[int] = numbers[self.chosen >= 0].tolist()
        return requests

    @property
    def size(self) -> int:
        """The number of experts in all layers."""
        return self.experts * int(self.chosen.shape[1])

    def save(self, file: Path) -> None:
        """Write the trace in NumPy's `npz` format."""
        with file.open("wb") as out:
            np.savez_compressed(out, chosen=self.chosen.astype(np.int32), experts=self.experts)

    @classmethod
    def open(cls, file: Path) -> "Trace":
        """Read a trace.

        Raises:
            LoadError: the file is not a trace.
        """
        try:
            with np.load(file, allow_pickle=False) as found:
                chosen, experts = found["chosen"].astype(np.int64), int(found["experts"])
        except Exception as error:  # errors of NumPy, of zip files and their compression, and others
            raise LoadError("is not a routing trace", file=file) from error
        if chosen.ndim != 3 or experts < 1 or not ((chosen >= -1) & (chosen < experts)).all():
            raise LoadError("is not a routing trace", file=file)
        return cls(chosen, experts)


@contextmanager
def recorded(model: Any) -> Iterator[Callable[[], Trace]]:
    """Record what a packed model's routers choose; yields a function that returns the trace so far.

    Raises:
        LoadError: the model has no packed experts with observable routing.
    """
    layers = expert_layers(model)
    if not layers or any(not hasattr(layer, "num_experts") for layer in layers):
        raise LoadError("the model has no packed experts with routing to record")
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
    """Return the fraction of requests that a cache hits, starting empty.

    Args:
        trace: the requests.
        policy: one of `POLICIES`.
        capacity: the number of experts that fit, at least 1.
    """
    requests = trace.requests
    return POLICIES[policy](requests, capacity) / max(len(requests), 1)


def _by_score(score: Callable[[Sequence[int]], Iterable[float]]) -> Callable[[Sequence[int], int], int]:
    """A policy that drops the expert with the lowest score; `score` returns one for each request."""

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
                    if resident.get(victim) == value:  # otherwise it was requested again since
                        break
                del resident[victim]
            resident[request] = own
            heappush(heap, (own, request))
        return found

    return hits


def _uses(requests: Sequence[int]) -> Iterator[float]:
    """The number of requests for each expert so far; ties favor later requests."""
    counts = Counter[int]()
    for time, request in enumerate(requests):
        counts[request] += 1
        yield counts[request] + time / len(requests)


def _decayed(requests: Sequence[int]) -> Iterator[float]:
    """The logarithm of an expert's uses, whose weight halves every `HALF_LIFE` requests (LRFU)."""
    scores: dict[int, float] = {}
    for time, request in enumerate(requests):
        scores[request] = float(np.logaddexp2(scores.get(request, -np.inf), time / HALF_LIFE))
        yield scores[request]


def _next_use(requests: Sequence[int]) -> list[float]:
    """Scores that are higher for experts that are requested again sooner."""
    scores, coming = [0.0] * len(requests), dict[int, float]()
    for time in reversed(range(len(requests))):
        scores[time] = -coming.get(requests[time], float(2 * len(requests) - time))
        coming[requests[time]] = float(time)
    return scores


def _least_of_oldest(requests: Sequence[int], capacity: int) -> int:
    """The policy of `Residency`: drop the least used of the least recently used experts."""
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
"""Functions that return hits for requests and capacity: LRU, LFU, LFU with decay (as in `RecordCache`), `Residency`'s
policy, and the optimum."""

"""Bookkeeping of a device's slots: which experts they contain, without their bytes.

A slot has room for one expert. If an expert needs a slot and none is free, an expert that the call does not need is
evicted: among the `CANDIDATES` least recently used ones, the one with the fewest uses, as on the host (`Residency`).
Nothing is written back.

Invariants:
- An expert has at most one slot, and a slot at most one expert.
- Experts of the current call, and those that it marks as still in use, keep their slots.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence, Set
from itertools import islice
from math import inf

from moepack.stores.streaming.residency import CANDIDATES

__all__ = ["Expert", "Slots"]

Expert = tuple[int, int]
"""The indices of a layer and of an expert within it."""


class Slots:
    """Slots of one size.

    Args:
        count: the number of slots.

    Attributes:
        count: the number of slots.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(reversed(range(count)))
        self._slots: OrderedDict[Expert, int] = OrderedDict()
        self._uses: Counter[Expert] = Counter()

    def __len__(self) -> int:
        """The number of occupied slots."""
        return len(self._slots)

    def experts(self) -> Set[Expert]:
        """The experts that have a slot."""
        return self._slots.keys()

    def uses(self, expert: Expert) -> int:
        """The number of uses of an expert, halved each time it was evicted."""
        return self._uses[expert]

    def use(self, experts: Iterable[Expert]) -> None:
        """Count uses of experts without a slot."""
        self._uses.update(experts)

    def gain(self, expert: Expert, used: Collection[Expert]) -> float:
        """Return how many more uses an expert without a slot has than the next victim.

        Infinite if a slot is free, and minus infinity if nothing can be evicted.

        Args:
            expert: the expert.
            used: experts that keep their slots.
        """
        if self._free:
            return inf
        leaving = self._next(used)
        return -inf if leaving is None else self._uses[expert] - self._uses[leaving]

    def take(self, experts: Sequence[Expert], used: Collection[Expert] = ()) -> tuple[list[int], list[Expert]]:
        """Assign slots to experts.

        Args:
            experts: unique experts; together with `used`, at most as many as there are slots.
            used: other experts that must keep their slots.

        Returns:
            The slot of each expert, and the experts that are new in theirs; the caller must load their bytes.
        """
        missing = [expert for expert in experts if expert not in self._slots]
        held = {*experts, *used}
        for expert in experts:
            self._uses[expert] += 1
            if expert in self._slots:
                self._slots.move_to_end(expert)
        for expert in missing:
            self._slots[expert] = self._free.pop() if self._free else self._vacated(held)
        return [self._slots[expert] for expert in experts], missing

    def forget(self, experts: Iterable[Expert]) -> None:
        """Free the slots of experts whose bytes could not be loaded."""
        self._free += [self._slots.pop(expert) for expert in experts]

    def _vacated(self, held: Collection[Expert]) -> int:
        """Evict an expert and return its slot."""
        victim = self._next(held)
        assert victim is not None
        self._uses[victim] //= 2
        return self._slots.pop(victim)

    def _next(self, held: Collection[Expert]) -> Expert | None:
        """The next victim, if there is one."""
        old = islice((expert for expert in self._slots if expert not in held), CANDIDATES)
        return min(old, key=self._uses.__getitem__, default=None)

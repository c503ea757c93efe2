"""Which experts are in the slots of a device: the accounting, without a byte of them.

A slot has room for one expert. Where an expert needs a slot and none is free, one goes that the call does not need: of
those whose last use is longest ago (`CANDIDATES` of them) the one with the fewest uses, as on the host (`Residency`).
Nothing is written back.

Invariants:
- An expert has one slot or none, a slot at most one expert.
- Experts of the call at hand, and those that it says are still in use, keep their slots.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence, Set
from itertools import islice
from math import inf

from moepack.runtime.streaming.residency import CANDIDATES

__all__ = ["Expert", "Slots"]

Expert = tuple[int, int]
"""The numbers of a layer and of one of its experts."""


class Slots:
    """Slots of one size.

    Args:
        count: how many there are.

    Attributes:
        count: the same.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(reversed(range(count)))
        self._slots: OrderedDict[Expert, int] = OrderedDict()
        self._uses: Counter[Expert] = Counter()

    def __len__(self) -> int:
        """How many hold an expert."""
        return len(self._slots)

    def experts(self) -> Set[Expert]:
        """The experts that have a slot."""
        return self._slots.keys()

    def uses(self, expert: Expert) -> int:
        """How often it was used, less half of that at each time when it lost its slot."""
        return self._uses[expert]

    def use(self, experts: Iterable[Expert]) -> None:
        """Note uses of experts without a slot."""
        self._uses.update(experts)

    def gain(self, expert: Expert, used: Collection[Expert]) -> float:
        """How many more uses an expert without a slot has than the one that would go.

        Infinite where a slot is free, and minus infinity where none may go.

        Args:
            expert: which.
            used: experts that keep their slots.
        """
        if self._free:
            return inf
        leaving = self._next(used)
        return -inf if leaving is None else self._uses[expert] - self._uses[leaving]

    def take(self, experts: Sequence[Expert], used: Collection[Expert] = ()) -> tuple[list[int], list[Expert]]:
        """Give experts slots.

        Args:
            experts: each once; with `used` at most as many as there are slots.
            used: others whose slots must stay as they are.

        Returns:
            The slot of each expert, and those of the experts that are new in theirs: the caller brings their bytes.
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
        """Free the slots of experts whose bytes did not come."""
        self._free += [self._slots.pop(expert) for expert in experts]

    def _vacated(self, held: Collection[Expert]) -> int:
        """The slot of an expert that goes."""
        victim = self._next(held)
        assert victim is not None
        self._uses[victim] //= 2
        return self._slots.pop(victim)

    def _next(self, held: Collection[Expert]) -> Expert | None:
        """The expert that goes next, if any may."""
        old = islice((expert for expert in self._slots if expert not in held), CANDIDATES)
        return min(old, key=self._uses.__getitem__, default=None)

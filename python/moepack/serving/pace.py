"""Which is faster for single tokens of several sequences: one pass, or one after another.

Tokens of different sequences choose different experts, so that few of them share little, while one pass is torch's and
the step of one token the core's. Which is faster depends on the model, the machine and what else it does, so both are
measured as they happen.
"""

__all__ = ["AGAIN", "Pace"]

AGAIN = 64
"""Steps after which one pass is tried again where it was slower."""


class Pace:
    """What steps took, by the number of sequences."""

    def __init__(self) -> None:
        self._alone: float | None = None
        self._together: dict[int, float] = {}
        self._steps = 0

    def is_together(self, count: int) -> bool:
        """Whether a step of so many tokens is one pass; what is unknown, or long ago, is tried."""
        self._steps += 1
        if self._alone is None:
            return False
        return self._together.get(count, 0.0) <= count * self._alone or self._steps % AGAIN == 0

    def note(self, together: bool, count: int, seconds: float) -> None:
        """Learn what a step took."""
        if together:
            self._together[count] = _mean(self._together.get(count), seconds)
        else:
            self._alone = _mean(self._alone, seconds / count)


def _mean(known: float | None, new: float) -> float:
    return new if known is None else (known + new) / 2

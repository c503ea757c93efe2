"""Chooses how to step single tokens of several sequences: in one pass, or one after another.

A pass for several tokens runs in torch; a step for one token runs in the core. Tokens of different sequences choose
different experts, so a pass for few tokens shares little work. Which is faster depends on the model, the machine and
its load, so both are measured during operation.
"""

__all__ = ["AGAIN", "Pace"]

AGAIN = 64
"""Number of steps after which a slower single pass is tried again."""


class Pace:
    """Measured step times, by the number of sequences."""

    def __init__(self) -> None:
        self._alone: float | None = None
        self._together: dict[int, float] = {}
        self._steps = 0

    def is_together(self, count: int) -> bool:
        """Return whether to step `count` tokens in one pass. Unknown or outdated times are measured again."""
        self._steps += 1
        if self._alone is None:
            return False
        return self._together.get(count, 0.0) <= count * self._alone or self._steps % AGAIN == 0

    def note(self, together: bool, count: int, seconds: float) -> None:
        """Record the time of a step."""
        if together:
            self._together[count] = _mean(self._together.get(count), seconds)
        else:
            self._alone = _mean(self._alone, seconds / count)


def _mean(known: float | None, new: float) -> float:
    return new if known is None else (known + new) / 2

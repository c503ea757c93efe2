"""Reading parts of several sequences so that a failure stays with the sequence that caused it.

Parts that fail together are read again in halves, down to the one that fails. Before that, caches go back to what they
held: a forward that raises in the middle of a model has appended keys and values to some of its layers.

Memory that runs out has no culprit. What is kept for later prompts is given up first, then the parts are halved, then
the tokens of a part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moepack.runtime.backends.gpu import lost
from moepack.runtime.cache import Mark
from moepack.runtime.panics import contained

__all__ = ["Outcome", "Part", "is_memory", "isolated"]

Outcome = torch.Tensor | Exception
"""The logits behind a part, [vocabulary]; or why the model could not read it."""


@dataclass
class Part:
    """What a sequence adds to a step.

    Attributes:
        ids: its next tokens.
        position: of the first of them, which is the number of tokens in the cache.
        cache: of the sequence.
        is_whole: the model must read the tokens in one pass.
    """

    ids: list[int]
    position: int
    cache: Any
    is_whole: bool = False

    @property
    def end(self) -> int:
        """The number of tokens in the cache once it is read."""
        return self.position + len(self.ids)


Read = Callable[[Sequence[Part]], Sequence[torch.Tensor]]
"""Reads parts; the logits behind each."""


def isolated(read: Read, parts: Sequence[Part], relieve: Callable[[], bool] = lambda: False) -> list[Outcome]:
    """Read parts together, and where that fails in halves.

    Args:
        read: must leave no trace but in the caches of the parts.
        parts: one at least.
        relieve: gives up memory that is not needed; whether there was some.

    Returns:
        What became of each part. The cache of a part that failed holds what it held before, unless it has states of
        linear attention; then the sequence cannot go on.

    Raises:
        Exception: a GPU is lost (`moepack.runtime.backends.gpu.lost`), which ends all sequences.
    """
    marks = [Mark(part.cache) for part in parts]
    try:
        with contained():
            return list(read(parts))
    except Exception as error:
        if lost(error):
            raise
        # A traceback holds the tensors of its frames, which the memory is needed for.
        failure = error.with_traceback(None) if is_memory(error) else error
    for mark in marks:
        mark.restore()
    if not all(mark.is_exact for mark in marks):
        return [failure] * len(parts)
    if is_memory(failure) and relieve():
        return isolated(read, parts, relieve)
    if len(parts) > 1:
        middle = len(parts) // 2
        return isolated(read, parts[:middle], relieve) + isolated(read, parts[middle:], relieve)
    if is_memory(failure) and len(parts[0].ids) > 1 and not parts[0].is_whole:
        return _in_halves(read, parts[0], relieve)
    return [failure]


def _in_halves(read: Read, part: Part, relieve: Callable[[], bool]) -> list[Outcome]:
    """Read the first tokens of a part, then the others."""
    middle = len(part.ids) // 2
    first = isolated(read, [replace(part, ids=part.ids[:middle])], relieve)
    if isinstance(first[0], Exception):
        return first
    return isolated(read, [replace(part, ids=part.ids[middle:], position=part.position + middle)], relieve)


def is_memory(outcome: Outcome) -> bool:
    """Whether memory has run out, on a device or here."""
    if isinstance(outcome, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(outcome, RuntimeError) and "DefaultCPUAllocator" in str(outcome)

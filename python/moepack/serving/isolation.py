"""Runs parts of several sequences so that a failure affects only the sequence that caused it.

Parts that fail together are run again in halves, down to the single failing part. The caches are restored first,
because a forward that raises midway has appended keys and values to some layers.

Running out of memory has no single cause. The engine frees caches kept for later prompts first, then halves the parts,
then the tokens of a part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moepack.backends.gpu import lost
from moepack.decoding.cache import Mark
from moepack.decoding.drawing import Draw
from moepack.panics import contained
from moepack.serving.text.sampling import Sampler

__all__ = ["Chosen", "Outcome", "Part", "is_memory", "isolated"]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The logits after a part, and the token that the device has chosen.

    Attributes:
        logits: shape (vocabulary,); valid until the next step.
        token: the token by the part's draw, or the likeliest one; negative if the host must choose.
    """

    logits: torch.Tensor
    token: int


Outcome = torch.Tensor | Chosen | Exception
"""The logits after a part, shape (vocabulary,), or of each token of a scored part, shape (tokens, vocabulary); or the
error that reading it raised."""


@dataclass
class Part:
    """The tokens of one sequence in a step.

    Attributes:
        ids: the next token ids.
        position: position of the first of them, equal to the number of tokens in the cache.
        cache: the cache of the sequence.
        is_whole: the model must read the tokens in one pass.
        is_scored: the logits of all tokens are needed, not only those of the last.
        adapter: name of the adapter that reads them; None for the model itself.
        draw: how the token after the part is drawn; None if it is the likeliest, or if the host draws it.
        sampler: makes the draws of following parts.
    """

    ids: list[int]
    position: int
    cache: Any
    is_whole: bool = False
    is_scored: bool = False
    adapter: str | None = None
    draw: Draw | None = None
    sampler: Sampler | None = None

    def following(self) -> "Part":
        """The part of the token that a device chooses after this part."""
        draw = self.sampler.draw(self.end + 1) if self.draw is not None and self.sampler is not None else None
        return replace(self, ids=[0], position=self.end, draw=draw)

    @property
    def end(self) -> int:
        """The number of tokens in the cache after this part."""
        return self.position + len(self.ids)


Read = Callable[[Sequence[Part]], Sequence[torch.Tensor | Chosen]]
"""Reads parts and returns the logits after each."""


def isolated(read: Read, parts: Sequence[Part], relieve: Callable[[], bool] = lambda: False) -> list[Outcome]:
    """Read parts together, and in halves if that fails.

    Args:
        read: the function to run. It must have no side effects except on the caches of the parts.
        parts: at least one part.
        relieve: frees memory that is not needed; returns whether it freed any.

    Returns:
        The outcome of each part. The cache of a failed part is restored, unless it has states of linear attention; then
        the sequence cannot continue.

    Raises:
        Exception: a GPU is lost (`moepack.backends.gpu.lost`), which ends all sequences.
    """
    marks = [Mark(part.cache) for part in parts]
    try:
        with contained():
            return list(read(parts))
    except Exception as error:
        if lost(error):
            raise
        # A traceback keeps the tensors of its frames alive, and that memory is needed.
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
    """Read the first half of a part's tokens, then the second."""
    middle = len(part.ids) // 2
    first = isolated(read, [replace(part, ids=part.ids[:middle])], relieve)
    if isinstance(first[0], Exception):
        return first
    second = isolated(read, [replace(part, ids=part.ids[middle:], position=part.position + middle)], relieve)
    if part.is_scored and not isinstance(second[0], Exception):
        assert isinstance(first[0], torch.Tensor) and isinstance(second[0], torch.Tensor)
        return [torch.cat([first[0], second[0]])]
    return second


def is_memory(outcome: Outcome) -> bool:
    """Return whether the device or the host ran out of memory."""
    if isinstance(outcome, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(outcome, RuntimeError) and "DefaultCPUAllocator" in str(outcome)

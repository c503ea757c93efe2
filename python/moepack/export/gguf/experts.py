"""Stacks the experts that a packed directory leaves unpacked by projection, as llama.cpp stores them.

Checkpoints hold one matrix per expert, or tensors of all experts with their projections one below the other.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moepack.checkpoint.architectures import ARCHITECTURES, Architecture
from moepack.errors import UnsupportedModelError
from moepack.format.shard import Entry

__all__ = ["Stack", "stacks"]


@dataclass
class Stack:
    """A projection of all experts of a layer.

    Attributes:
        layer: path of the layer.
        projection: name of the projection.
        matrices: the entry of each expert that has one of its own.
        whole: the entry that stacks all experts, the position of the projection in its rows, and their number.
    """

    layer: str
    projection: str
    matrices: dict[int, Entry] = field(default_factory=dict)
    whole: tuple[Entry, int, int] | None = None

    @property
    def entries(self) -> list[Entry]:
        """The entries, by expert."""
        return [self.whole[0]] if self.whole else [self.matrices[number] for number in sorted(self.matrices)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Experts, rows and columns."""
        if self.whole is None:
            return (len(self.matrices), *self.entries[0].shape)
        entry, _, count = self.whole
        return (entry.shape[0], entry.shape[1] // count, entry.shape[2])

    @property
    def dtype(self) -> str:
        """The dtype of all experts.

        Raises:
            UnsupportedModelError: experts are missing or differ in dtype or shape.
        """
        kinds = {(entry.dtype, entry.shape) for entry in self.entries}
        if len(kinds) > 1 or sorted(self.matrices) != [*range(len(self.matrices))]:
            message = f"the experts of '{self.projection}' are incomplete, or differ in dtype or shape"
            raise UnsupportedModelError(message, tensor=self.entries[0].name)
        return self.entries[0].dtype

    def data(self) -> NDArray[np.uint8]:
        """Return the bytes of all experts."""
        if self.whole is None:
            return np.concatenate([np.frombuffer(entry.data(), np.uint8) for entry in self.entries])
        entry, position, count = self.whole
        return np.frombuffer(entry.data(), np.uint8).reshape(entry.shape[0], count, -1)[:, position].reshape(-1)


def stacks(model_type: str, entries: Iterable[Entry]) -> tuple[list[Stack], list[Entry]]:
    """Collect the unpacked experts among entries; also return the other entries."""
    found: dict[tuple[str, str], Stack] = {}
    patterns = list(_patterns(ARCHITECTURES[model_type]))
    others = [entry for entry in entries if not _collect(found, patterns, entry)]
    return list(found.values()), others


_Pattern = tuple[Callable[[str], re.Match[str] | None], tuple[str, ...]]


def _patterns(architecture: Architecture) -> Iterator[_Pattern]:
    """Yield what matches the name of a tensor of experts, and its projections."""
    for layout in architecture.layouts:
        for name, projections in layout.tensors.items():
            below = re.escape(name).replace(r"\{\}", r"(?P<expert>\d+)")
            yield re.compile(rf"{architecture.layer}\.{architecture.block}\.{below}").fullmatch, projections


def _collect(found: dict[tuple[str, str], Stack], patterns: Iterable[_Pattern], entry: Entry) -> bool:
    """Add an entry to its stacks; return whether it holds experts."""
    for match, projections in patterns:
        if (place := match(entry.name)) is None:
            continue
        groups: Mapping[str, str] = place.groupdict()
        for position, projection in enumerate(projections):
            stack = found.setdefault((groups["layer"], projection), Stack(groups["layer"], projection))
            if "expert" in groups:
                stack.matrices[int(groups["expert"])] = entry
            else:
                stack.whole = entry, position, len(projections)
        return True
    return False

"""Divides shards into parts. A part is downloaded, kept and removed as a whole.

A shard is one part, unless it is larger than `WHOLE`, as a GGUF model in a single file is. Such a shard is cut between
tensors, so that packing it needs the disk space of some parts only.

Invariants: the parts of a shard cover it in order without holes; every tensor lies in one part.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from moepack.format.header import Header, TensorInfo

__all__ = ["Part", "Parts"]

WHOLE = 6 << 30
"""Largest shard in bytes that is one part. Most checkpoints have shards of at most 5 * 10^9 bytes."""

LEAST = 1 << 30
"""Smallest part of a larger shard in bytes, except for the last one."""


@dataclass(frozen=True)
class Part:
    """A range of a shard.

    Attributes:
        name: its name, and that of its file.
        shard: the name of the shard.
        start, stop: its first byte, and the byte after its last one.
        is_whole: whether it is the whole shard.
    """

    name: str
    shard: str
    start: int
    stop: int
    is_whole: bool

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.stop - self.start


class Parts(Mapping[str, Part]):
    """The parts of the shards of a model, by name and in order."""

    def __init__(self, shards: Mapping[str, Header], whole: Collection[str]) -> None:
        """Divide shards, except those in `whole`."""
        self._of = {name: _cut(name, header, name in whole) for name, header in shards.items()}
        self._starts = {name: [part.start for part in parts] for name, parts in self._of.items()}
        self._by_name = {part.name: part for parts in self._of.values() for part in parts}

    def __getitem__(self, name: str) -> Part:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def of(self, shard: str) -> list[Part]:
        """Return the parts of a shard in order."""
        return self._of[shard]

    def name_of(self, info: TensorInfo) -> str:
        """Return the name of the part that a tensor lies in."""
        shard = info.file.name
        return self._of[shard][bisect_right(self._starts[shard], info.offset) - 1].name


def _cut(name: str, header: Header, whole: bool) -> list[Part]:
    """Return the parts of a shard."""
    if whole or header.size <= WHOLE:
        return [Part(name, name, 0, header.size, True)]
    cuts, last = [0], 0
    for info in header.tensors.values():  # in the order of their data; those of a pickle may overlap
        if info.offset >= last and info.offset - cuts[-1] >= LEAST:
            cuts.append(info.offset)
        last = max(last, info.offset + info.span)
    ends = [*cuts[1:], header.size]
    if len(cuts) == 1:
        return [Part(name, name, 0, header.size, True)]
    return [Part(f"{name}-{start}", name, start, stop, False) for start, stop in zip(cuts, ends, strict=True)]

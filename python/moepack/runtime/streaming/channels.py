"""A store that keeps the records of experts' channels on disk and reads those that a token asks for.

What decides which channels a token computes is always in memory; records come and go one by one (`RecordCache`),
whichever expert they are of. Where the records of a call are larger than the memory, as those of a prompt may be, they
come in portions in the order of the file. A call that waits for its records has the time to guess what the next layer
wants: that is read as soon as nobody waits.

Invariant: outputs depend on weights, inputs and the budget alone, never on what happens to be in memory.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moepack.errors import LoadError, MoepackWarning
from moepack.format import PackedDirectory
from moepack.runtime.backends import backend_for
from moepack.runtime.backends.cpu.views import RecordMemory, StreamedChannels, expert_payloads
from moepack.runtime.packed import PackedModule
from moepack.runtime.store import Layer, Matrices, Portions
from moepack.runtime.streaming.records import Numbers, RecordCache
from moepack.runtime.streaming.source import Source
from moepack.runtime.streaming.store import READERS, StreamingStore, expert_layers
from moepack.units import size

__all__ = ["ChannelStore", "RecordFile"]

RECORDS = ("channels", "residuals")
"""Projections that hold records; such a layer has one of them, its last."""

LEAST = 768 << 10
"""Bytes for which there must be room: a buffer of reads and some records of any common size."""

NOTES = 48
"""Bytes that are kept of each record, in memory or not."""

APART = 128
"""Bytes that memory of its own costs a record beside what it holds."""


class RecordFile:
    """The records of a tensor, which come from a file.

    Args:
        records: the tensor.
        source: the file.
    """

    def __init__(self, records: StreamedChannels, source: Source) -> None:
        self.matrix, self._source = records, source
        experts, channels, _ = records.shape
        self.count = experts * channels

    def read(self, records: Numbers, threads: int) -> tuple[int, int]:
        """Read records; see `RecordTensor`.

        Raises:
            CorruptionError: the file ends before.
            LoadError: the drive reports an error.
        """
        try:
            with _failures_of(self._source):
                return self.matrix.read(records, threads)
        finally:
            if not self._source.is_direct:
                self._source.forget()

    def drop(self, records: Numbers) -> None:
        """Let records go."""
        self.matrix.drop(records)


@contextmanager
def _failures_of(source: Source) -> Iterator[None]:
    """Let what goes wrong with a file name it."""
    try:
        yield
    except EOFError as error:
        raise source.ended(error.args[0]) from error
    except OSError as error:
        raise LoadError(f"cannot be read: {error.strerror}", file=source.file) from error


@dataclass(frozen=True)
class _Layer:
    """A layer of the model.

    Attributes:
        matrices: of all projections.
        file: the records.
        channels: records of an expert.
        first: the number of the first record, once it is known.
    """

    matrices: Matrices
    file: RecordFile
    channels: int
    first: int = 0


class ChannelStore(StreamingStore):
    """Keeps a model's weights within a number of bytes, records of channels coming and going one by one."""

    by_channels = True

    def __init__(self, memory: int) -> None:
        super().__init__(memory)
        self._slots = RecordMemory()

    @classmethod
    def suits(cls, model: Any, memory: int) -> bool:
        """Whether all experts of a model are kept by channels, and memory takes what decides over them."""
        layers = expert_layers(model)
        if not layers or any(layer.projections[-1] not in RECORDS for layer in layers):
            return False
        total: int = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        for layer in layers:
            experts, channels, _ = layer.shapes[layer.projections[-1]]
            total += NOTES * experts * channels - layer.get_buffer(layer.projections[-1]).nbytes
        return total + LEAST <= memory

    def _streamed(self, layer: PackedModule) -> tuple[str, ...]:
        return layer.projections[-1:]

    def _take_layer(self, layer: PackedModule) -> int:
        *deciders, mapped = layer.store.fetch(layer, None, torch.device("cpu"))
        name, head = layer.projections[-1], int(expert_payloads(mapped)[0, 0])
        source, place, data = self._located(layer, name)
        with _failures_of(source):
            records = StreamedChannels(self._slots, data[:head], str(source.file), place, source.is_direct)
        layer._buffers.pop(name)
        layer.readers[name], layer.store = (0, records), self
        file = RecordFile(records, source)
        self._layers[layer] = _Layer((*deciders, records), file, records.shape[1])
        return head + NOTES * file.count

    def _begin(self, always: int, top_k: int) -> Any:
        layers: list[_Layer] = list(self._layers.values())
        nbytes = max(own.file.matrix.record_bytes for own in layers)
        buffer, budget = max(own.file.matrix.buffer_bytes for own in layers), self._memory - always
        if budget < LEAST:
            raise LoadError(
                f"{size(self._memory)} of memory for the weights are too little: what every token needs takes "
                f"{size(always)} of them, and channels at least {size(LEAST)}"
            )
        readers = min(max(budget // 8 // buffer, 1), READERS)
        records = (budget - readers * buffer) // (nbytes + APART)
        demand = sum(top_k * self._share(layer) * own.channels for layer, own in self._layers.items())
        if records < demand:
            needed = int(demand) * (nbytes + APART)
            message = (
                f"{size(budget)} of memory are left for channels, less than the {size(needed)} that one token uses; "
                f"{size(always + needed + readers * buffer)} or more keep them"
            )
            warnings.warn(message, MoepackWarning, stacklevel=2)
        cache = RecordCache(records, nbytes + APART, [own.file for own in layers], readers)
        for layer, first in zip(list(self._layers), cache.first.tolist(), strict=False):
            self._layers[layer] = replace(self._layers[layer], first=first)
        return cache

    def _share(self, layer: PackedModule) -> float:
        """The share of channels that tokens are expected to compute, by the manifest; all where it does not say."""
        place = layer.places[layer.projections[-1]]
        details = PackedDirectory.open(Path(place["file"]).parent).manifest.tensors[place["tensor"]].details
        skipped = [share for share in details.get("achieved_sparsity", ()) if share is not None]
        return 1 - sum(skipped) / len(skipped) if skipped else 1.0

    def portions(self, layer: Layer, experts: Tensor, device: torch.device) -> Portions:
        """Give all experts; the bytes of records are there while `channels` says so."""
        self._refuse_elsewhere(device)
        yield self._layers[layer].matrices, experts

    def channels(self, layer: Layer, experts: Tensor, ups: Tensor) -> Iterator[Tensor]:
        """Read the records of the channels that are wanted, in portions; see `ExpertStore.channels`."""
        own: _Layer = self._layers[layer]
        wanted = _records(layer, experts, ups)
        parts = _portions(wanted, self._residency.budget)
        foreseen: list[tuple[Layer, Tensor, Tensor]] = []
        ahead = partial(self._foreseen, layer, foreseen) if len(parts) == 1 and layer in self._next else None
        for number, _ in enumerate(self._held([own.first + part for part in parts], ahead)):
            for following, index, next_wanted in foreseen:
                self._residency.guess(self._layers[following].first + _records(following, index, next_wanted))
            if len(parts) == 1:
                yield ups
            else:
                all_records = experts[..., None] * own.channels + torch.arange(own.channels)
                inside = (all_records >= int(parts[number][0])) & (all_records <= int(parts[number][-1]))
                yield torch.where(inside, ups, 0)

    def _foreseen(self, layer: Layer, into: list[tuple[Layer, Tensor, Tensor]]) -> None:
        """Guess what the next layer will choose: it, the experts [T, k] and their channels [T, k, I]."""
        following, foresight = self._next[layer]
        if (found := foresight.choice()) is not None:
            x, index, weights = found
            matrices = self._layers[following].matrices
            wanted = backend_for(x.device).wanted_channels(matrices, x, index, following.mode, weights)
            into.append((following, index, wanted))


def _records(layer: Layer, experts: Tensor, ups: Tensor) -> NDArray[np.int64]:
    """The records that experts [T, k] want, ascending, each once; `ups` [T, k, I] is zero for skipped channels."""
    count, channels, _ = list(layer.shapes.values())[-1]
    known = (experts >= 0) & (experts < count)
    tokens, slots, wanted = torch.where((ups != 0) & known[..., None])
    numbers = (experts[tokens, slots].long() * channels + wanted).numpy()
    records: NDArray[np.int64] = np.unique(numbers) if len(experts) > 1 else np.sort(numbers)
    return records


def _portions(records: Numbers, budget: int) -> list[Numbers]:
    """Cut ascending records in portions: one if the budget takes all, else of half of it."""
    if len(records) <= budget:
        return [records]
    half = max(1, budget // 2)
    return np.split(records, range(half, len(records), half))

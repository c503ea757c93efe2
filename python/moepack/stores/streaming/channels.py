"""A store that keeps channel records of experts on disk and reads those that a token needs.

The weights that select channels are always in memory. Records are loaded and evicted one by one (`RecordCache`),
regardless of their expert. If the records of a call exceed the memory, as they may for a prompt, they are read in
portions in file order. While a call waits for its records, it predicts what the next layer needs; those records are
read once no thread waits.

Invariant: outputs depend only on weights, inputs and the budget, never on the current contents of memory.
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

from moepack.backends import backend_for
from moepack.backends.cpu.views import RecordMemory, StreamedChannels, expert_payloads
from moepack.errors import LoadError, MoepackWarning
from moepack.format import PackedDirectory
from moepack.stores.base import Layer, Matrices, Portions
from moepack.stores.module import PackedModule
from moepack.stores.streaming.experts import READERS, StreamingStore, expert_layers
from moepack.stores.streaming.records import Numbers, RecordCache
from moepack.stores.streaming.source import Source
from moepack.units import size

__all__ = ["ChannelStore", "RecordFile"]

RECORDS = ("channels", "residuals")
"""Projections that hold records; each layer has one of them, as its last projection."""

LEAST = 768 << 10
"""The least memory in bytes for records: one read buffer and some records of any common size."""

NOTES = 48
"""Bytes of bookkeeping per record, in memory or not."""

APART = 128
"""Bytes of allocation overhead for each record in memory."""


class RecordFile:
    """The records of a tensor, read from a file.

    Args:
        records: the tensor.
        source: its file.
    """

    def __init__(self, records: StreamedChannels, source: Source) -> None:
        self.matrix, self._source = records, source
        experts, channels, _ = records.shape
        self.count = experts * channels

    def read(self, records: Numbers, threads: int) -> tuple[int, int]:
        """Read records; see `RecordTensor`.

        Raises:
            CorruptionError: the file is too short.
            LoadError: the drive reports an error.
        """
        try:
            with _failures_of(self._source):
                return self.matrix.read(records, threads)
        finally:
            if not self._source.is_direct:
                self._source.forget()

    def drop(self, records: Numbers) -> None:
        """Evict records."""
        self.matrix.drop(records)


@contextmanager
def _failures_of(source: Source) -> Iterator[None]:
    """Make errors name the file."""
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
        matrices: the matrices of all projections.
        file: the records.
        channels: records per expert.
        first: the index of the first record in the cache, once known.
    """

    matrices: Matrices
    file: RecordFile
    channels: int
    first: int = 0


class ChannelStore(StreamingStore):
    """Keeps a model's weights within a number of bytes by loading and evicting single channel records."""

    by_channels = True

    def __init__(self, memory: int) -> None:
        super().__init__(memory)
        self._slots = RecordMemory()

    @classmethod
    def suits(cls, model: Any, memory: int) -> bool:
        """Whether all experts of a model are stored by channel, and the weights that select channels fit in memory."""
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
                f"{size(self._memory)} of memory for weights is too little: what every token needs takes "
                f"{size(always)}, and channels need at least {size(LEAST)}"
            )
        readers = min(max(budget // 8 // buffer, 1), READERS)
        records = (budget - readers * buffer) // (nbytes + APART)
        demand = sum(top_k * self._share(layer) * own.channels for layer, own in self._layers.items())
        if records < demand:
            needed = int(demand) * (nbytes + APART)
            message = (
                f"{size(budget)} of memory is left for channels, less than the {size(needed)} that one token uses; "
                f"at least {size(always + needed + readers * buffer)} in total avoids this"
            )
            warnings.warn(message, MoepackWarning, stacklevel=2)
        cache = RecordCache(records, nbytes + APART, [own.file for own in layers], readers)
        for layer, first in zip(list(self._layers), cache.first.tolist(), strict=False):
            self._layers[layer] = replace(self._layers[layer], first=first)
        return cache

    def _share(self, layer: PackedModule) -> float:
        """The expected fraction of computed channels according to the manifest; 1 if it does not specify it."""
        place = layer.places[layer.projections[-1]]
        details = PackedDirectory.open(Path(place["file"]).parent).manifest.tensors[place["tensor"]].details
        skipped = [share for share in details.get("achieved_sparsity", ()) if share is not None]
        return 1 - sum(skipped) / len(skipped) if skipped else 1.0

    def portions(self, layer: Layer, experts: Tensor, device: torch.device) -> Portions:
        """Yield all experts at once; record bytes are only available during `channels`."""
        self._refuse_elsewhere(device)
        yield self._layers[layer].matrices, experts

    def channels(self, layer: Layer, experts: Tensor, ups: Tensor) -> Iterator[Tensor]:
        """Read the records of the requested channels in portions; see `ExpertStore.channels`."""
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
        """Predict what the next layer will choose: append it, its experts [T, k] and their channels [T, k, I]."""
        following, foresight = self._next[layer]
        if (found := foresight.choice()) is not None:
            x, index, weights = found
            matrices = self._layers[following].matrices
            wanted = backend_for(x.device).wanted_channels(matrices, x, index, following.mode, weights)
            into.append((following, index, wanted))


def _records(layer: Layer, experts: Tensor, ups: Tensor) -> NDArray[np.int64]:
    """The unique records that experts [T, k] need, ascending; `ups` [T, k, I] is zero for skipped channels."""
    count, channels, _ = list(layer.shapes.values())[-1]
    known = (experts >= 0) & (experts < count)
    tokens, slots, wanted = torch.where((ups != 0) & known[..., None])
    numbers = (experts[tokens, slots].long() * channels + wanted).numpy()
    records: NDArray[np.int64] = np.unique(numbers) if len(experts) > 1 else np.sort(numbers)
    return records


def _portions(records: Numbers, budget: int) -> list[Numbers]:
    """Split ascending records into portions: one if all fit into the budget, otherwise portions of half the budget."""
    if len(records) <= budget:
        return [records]
    half = max(1, budget // 2)
    return np.split(records, range(half, len(records), half))

"""A store that keeps the records of experts' channels on disk and reads those that a token asks for.

What decides which channels a token computes is always in memory; of the records, whole blocks of bytes come and go
(`Blocks`), whichever expert they are of. Where the records of a call are larger than the memory, as those of a prompt
may be, they come in portions in the order of the file. A call that waits for its records has the time to guess what the
next layer wants: that is read as soon as nobody waits.

Invariant: outputs depend on weights, inputs and the budget alone, never on what happens to be in memory.
"""

import warnings
from collections.abc import Iterator
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
from moepack.runtime.backends.cpu.views import expert_payloads
from moepack.runtime.packed import PackedModule
from moepack.runtime.store import Layer, Matrices, Portion
from moepack.runtime.streaming.blocks import BLOCK, Blocks, Numbers
from moepack.runtime.streaming.region import Region
from moepack.runtime.streaming.store import READERS, StreamingStore, expert_layers
from moepack.units import size

__all__ = ["ChannelStore", "Records"]

RECORDS = ("channels", "residuals")
"""Projections that hold records; such a layer has one of them, its last."""

LEAST_BLOCKS = (256 << 10) // BLOCK
"""Blocks for which there must be room: those of two records of any common size."""


@dataclass(frozen=True)
class Records:
    """The records of a layer.

    Attributes:
        matrices: of all projections.
        region: the records' tensor.
        offset: where the first record lies in the region's run, negative if before it.
        nbytes: of a record.
        channels: records of an expert.
        first: number of the tensor's first block, once it is known.
        blocks: how many it has.
    """

    matrices: Matrices
    region: Region
    offset: int
    nbytes: int
    channels: int
    first: int = 0
    blocks: int = 0

    def touched(self, records: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first and the last block of records, numbered in this tensor."""
        start = self.offset + records * self.nbytes
        first, last = (np.clip(byte // BLOCK, 0, self.blocks - 1) for byte in (start, start + self.nbytes - 1))
        return first, last

    def needed(self, records: NDArray[np.int64]) -> Numbers:
        """The blocks in which records lie, numbered over all tensors."""
        first, last = self.touched(records)
        opened = np.bincount(first, minlength=self.blocks + 1) - np.bincount(last + 1, minlength=self.blocks + 1)
        return self.first + np.flatnonzero(opened.cumsum()[: self.blocks] > 0)

    def portions(self, records: NDArray[np.int64], budget: int) -> list[NDArray[np.int64]]:
        """Ascending records in portions: one if the budget of blocks takes them, else each of at most half of it."""
        if not self.blocks or not len(records):
            return [records]
        first, last = self.touched(records)
        opened = (last - np.maximum(first, np.concatenate(([-1], last[:-1])) + 1) + 1).cumsum()
        if opened[-1] <= budget:
            return [records]
        # A portion may begin within a block of the one before.
        most = max(1, budget // 2 - int((last - first).max()) - 1)
        return np.split(records, np.flatnonzero(np.diff((opened - 1) // most)) + 1)


class ChannelStore(StreamingStore):
    """Keeps a model's weights within a number of bytes, records of channels coming and going one by one."""

    by_channels = True

    @classmethod
    def suits(cls, model: Any, memory: int) -> bool:
        """Whether all experts of a model are kept by channels, and memory takes what decides over them."""
        layers = expert_layers(model)
        if not layers or any(layer.projections[-1] not in RECORDS for layer in layers):
            return False
        records = sum(layer.get_buffer(layer.projections[-1]).nbytes for layer in layers)
        total: int = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        return total - records + LEAST_BLOCKS * BLOCK <= memory

    def _streamed(self, layer: PackedModule) -> tuple[str, ...]:
        return layer.projections[-1:]

    def _take_layer(self, layer: PackedModule) -> list[Region]:
        matrices = list(layer.store.fetch(layer, None, torch.device("cpu")))
        name, payloads = layer.projections[-1], expert_payloads(matrices[-1])
        experts, channels, _ = layer.shapes[name]
        whole = np.array([[payloads[0, 0], payloads[-1, 1]]])
        region = self._region(layer, name, whole)
        matrices[-1] = self._adopt(layer, name, region)
        nbytes = int(whole[0, 1] - whole[0, 0]) // max(experts * channels, 1)
        self._layers[layer] = Records(tuple(matrices), region, int(whole[0, 0]) - region.start(0), nbytes, channels)
        return [region]

    def _begin(self, always: int, top_k: int) -> Any:
        budget = self._memory - always
        if budget < LEAST_BLOCKS * BLOCK:
            raise LoadError(
                f"{size(self._memory)} of memory for the weights are too little: what every token needs takes "
                f"{size(always)} of them, and channels at least {size(LEAST_BLOCKS * BLOCK)}"
            )
        demand = sum(top_k * self._share(layer) * own.channels * own.nbytes for layer, own in self._layers.items())
        if budget < demand:
            message = (
                f"{size(budget)} of memory are left for channels, less than the {size(demand)} that one token uses; "
                f"{size(always + demand)} or more keep them"
            )
            warnings.warn(message, MoepackWarning, stacklevel=2)
        blocks = Blocks(budget, [own.region for own in self._layers.values()], READERS)
        first = blocks.first.tolist()
        for number, (layer, own) in enumerate(list(self._layers.items())):
            self._layers[layer] = replace(own, first=first[number], blocks=first[number + 1] - first[number])
        return blocks

    def _share(self, layer: PackedModule) -> float:
        """The share of channels that tokens are expected to compute, by the manifest; all where it does not say."""
        place = layer.places[layer.projections[-1]]
        details = PackedDirectory.open(Path(place["file"]).parent).manifest.tensors[place["tensor"]].details
        skipped = [share for share in details.get("achieved_sparsity", ()) if share is not None]
        return 1 - sum(skipped) / len(skipped) if skipped else 1.0

    def portions(self, layer: Layer, experts: Tensor, device: torch.device) -> Iterator[Portion]:
        """Give all experts; the bytes of records are there while `channels` says so."""
        self._refuse_elsewhere(device)
        yield self._layers[layer].matrices, experts

    def channels(self, layer: Layer, experts: Tensor, ups: Tensor) -> Iterator[Tensor]:
        """Read the records of the channels that are wanted, in portions; see `ExpertStore.channels`."""
        own, channels = self._layers[layer], self._layers[layer].channels
        parts = own.portions(_records(layer, experts, ups), self._residency.budget)
        foreseen: list[tuple[Layer, Tensor, Tensor]] = []
        ahead = partial(self._foreseen, layer, foreseen) if len(parts) == 1 and layer in self._next else None
        for number, _ in enumerate(self._held([own.needed(part) for part in parts], ahead)):
            for following, index, wanted in foreseen:
                self._residency.guess(self._layers[following].needed(_records(following, index, wanted)))
            if len(parts) == 1:
                yield ups
            else:
                all_records = experts[..., None] * channels + torch.arange(channels)
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

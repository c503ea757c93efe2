"""A store that keeps experts on disk and reads them when they are chosen, within a budget for all weights.

Weights that every token needs (parameters, packed linear layers, shared parts of experts) stay in memory; the rest of
the budget is for experts. If the experts of a call exceed it, as they may for a prompt, they are processed in portions,
and each portion is read while the previous one is multiplied. For a single token, experts are multiplied as they
arrive.

If a prediction of the next layer's experts is available (`Foresight`), they are read while this layer computes.

Invariant: outputs depend only on weights, inputs and the budget, never on the current contents of memory. Portions are
split by expert index, and their outputs are added in that order.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moepack.arrays import AnyTensor
from moepack.backends import Matrix
from moepack.backends.cpu.views import expert_payloads
from moepack.checkpoint.architectures import described
from moepack.errors import CorruptionError, LoadError, MoepackWarning
from moepack.format.header import Header, read_header
from moepack.stores.base import Call, ExpertStore, Layer, Matrices, Multiply, Portions
from moepack.stores.mapped import matrix_over
from moepack.stores.module import PackedModule
from moepack.stores.streaming.prediction import Foresight
from moepack.stores.streaming.region import Region
from moepack.stores.streaming.residency import Expert, Residency, Statistics
from moepack.stores.streaming.source import Source
from moepack.units import size

__all__ = ["READERS", "StreamingStore", "cut_portions", "expert_layers", "statistics_of"]

READERS = 16
"""Reading threads: drives reach their full rate with 8 to 16 concurrent reads."""

AHEAD = 4
"""Threads that read a call's next portion."""

_CPU = torch.device("cpu")


class StreamingStore(ExpertStore):
    """Keeps a model's weights within a number of bytes.

    Args:
        memory: the most bytes for weights, including those that are always in memory.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._layers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._next: WeakKeyDictionary[Any, tuple[Any, Foresight]] = WeakKeyDictionary()
        self._sources: dict[Path, tuple[Source, Header]] = {}
        self._ahead = ThreadPoolExecutor(AHEAD, thread_name_prefix="moepack-ahead")
        self._residency: Any

    @property
    def statistics(self) -> Statistics:
        """Counters of streaming."""
        found: Statistics = self._residency.statistics
        return found

    def take(self, model: Any) -> None:
        """Take over the experts of a packed model that is mapped on the CPU.

        Args:
            model: a packed model from `moepack.load`.

        Raises:
            CorruptionError: a file has changed since it was mapped.
            LoadError: the weights that every token needs plus one expert exceed the memory, a file cannot be read, or
                the model has no packed experts.
        """
        layers = expert_layers(model)
        if not layers:
            raise LoadError("the model has no packed experts to keep on disk")
        taken = {id(layer._buffers.get(name)) for layer in layers for name in self._streamed(layer)}
        always = sum(tensor.nbytes for tensor in model.parameters())
        always += sum(buffer.nbytes for buffer in model.buffers() if id(buffer) not in taken)
        always += sum(self._take_layer(layer) for layer in layers)
        for source, _ in self._sources.values():
            source.forget()
        self._residency = self._begin(always, described(model.config.model_type).top_k(vars(model.config)))

    def foresee(self, layer: Layer, following: Layer, foresight: Foresight) -> None:
        """Read ahead what a prediction says the following layer needs."""
        self._next[layer] = following, foresight

    def _streamed(self, layer: PackedModule) -> tuple[str, ...]:
        """The projections with codes that stay on disk."""
        return layer.projections

    def _take_layer(self, layer: PackedModule) -> int:
        """Move the streamed projections of a layer to regions; return their bytes that stay in memory."""
        mapped = [expert_payloads(matrix) for matrix in layer.store.fetch(layer, None, _CPU)]
        located = [self._located(layer, projection) for projection in layer.projections]
        regions = [Region(*each, payloads) for each, payloads in zip(located, mapped, strict=True)]
        matrices = tuple(self._adopt(layer, *each) for each in zip(layer.projections, regions, strict=True))
        experts = [Expert(regions, number) for number in range(len(regions[0].sizes))]
        self._layers[layer] = matrices, experts
        return sum(region.shared for region in regions)

    def _adopt(self, layer: PackedModule, projection: str, region: Region) -> Matrix:
        """Make a region's bytes those of a projection."""
        layer._buffers.pop(projection)
        matrix = matrix_over(region.data, **layer.places[projection])
        layer.readers[projection], layer.store = (region.data.data_ptr(), matrix), self
        return matrix

    def _located(self, layer: PackedModule, projection: str) -> tuple[Source, int, NDArray[np.uint8]]:
        """The file of a projection, its offset in the file, and its mapped bytes."""
        place, buffer = layer.places[projection], layer.get_buffer(projection)
        if place.get("file") is None:
            raise LoadError(f"the bytes of {projection} do not come from a file, so experts cannot be read from disk")
        file, tensor = Path(place["file"]), place["tensor"]
        if file not in self._sources:
            self._sources[file] = Source(file), read_header(file, CorruptionError)
        source, header = self._sources[file]
        info = header.tensors.get(tensor)
        if info is None or info.nbytes != buffer.nbytes:
            raise CorruptionError("has changed since it was opened", **place)
        return source, info.offset, buffer.numpy()

    def _begin(self, always: int, top_k: int) -> Any:
        """Create the cache for the remaining memory, or raise if it is too small."""
        sizes = [max(expert.nbytes for expert in experts) for _, experts in self._layers.values()]
        least, budget, demand = always + max(sizes), self._memory - always, top_k * sum(sizes)
        if self._memory < least:
            raise LoadError(
                f"{size(self._memory)} of memory for weights is too little: every token needs {size(always)} and an "
                f"expert takes {size(max(sizes))}; {size(always + demand)} holds the experts of one token"
            )
        if budget < demand:
            message = (
                f"{size(budget)} of memory is left for experts, less than the {size(demand)} that one token uses: "
                f"most are read again for each token; at least {size(always + demand)} for weights avoids this"
            )
            warnings.warn(message, MoepackWarning, stacklevel=2)
        return Residency(budget, READERS, recent_first=budget < demand)

    def put(self, layer: Layer, projection: str, data: AnyTensor, **place: Any) -> None:
        """Raise: weights are only set by `take`."""
        raise LoadError("a model that streams its experts does not accept new weights", **place)

    def fetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> Matrices:
        """Raise: experts are only in memory during `portions`."""
        raise LoadError("experts that stay on disk cannot be loaded all at once")

    def prefetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> None:
        """Read experts while no thread waits for others; see `ExpertStore.prefetch`."""
        own = self._layers[layer][1]
        numbers = range(len(own)) if experts is None else _numbers(experts, len(own))
        self._residency.guess([own[number] for number in numbers])

    def portions(self, layer: Layer, experts: Tensor, device: torch.device) -> Portions:
        """Read the chosen experts, in portions if they exceed the memory; see `ExpertStore.portions`."""
        self._refuse_elsewhere(device)
        matrices, own = self._layers[layer]
        parts = cut_portions(own, _numbers(experts, len(own)), self._residency.budget)
        for part in self._held([[own[number] for number in part] for part in parts]):
            if len(parts) == 1:
                self._look_ahead(layer)
                yield matrices, experts
            else:
                yield matrices, _only(part, experts, len(own))

    def summed(self, layer: Layer, call: Call, multiply: Multiply) -> Tensor:
        """Multiply a single token's experts as they arrive, if all fit into memory; see `ExpertStore.summed`.

        The outputs are added in the order of the router's choice.
        """
        x, experts, weights = call
        self._refuse_elsewhere(x.device)
        matrices, own = self._layers[layer]
        needed = [own[number] for number in _numbers(experts, len(own))]
        if len(x) != 1 or sum(expert.nbytes for expert in needed) > self._residency.budget:
            return super().summed(layer, call, multiply)
        outputs = torch.zeros((experts.shape[1], x.shape[1]), dtype=torch.float32)
        for chosen in self._arrivals(layer, needed, experts):
            here = (chosen[0] < len(own)).nonzero().squeeze(-1)
            pairs = Call(x.expand(len(here), -1), chosen[0, here, None], weights[0, here, None])
            outputs[here] = multiply(matrices, pairs)
        for output in outputs[1:]:
            outputs[0] += output
        return outputs[:1]

    def _arrivals(self, layer: Layer, needed: Sequence[Expert], experts: Tensor) -> Iterator[Tensor]:
        """Yield the experts of a call as they arrive, with others masked; their bytes stay in memory until the end."""
        coming, left = self._residency.come(needed), len(needed)
        try:
            for came in coming:
                if not (left := left - len(came)):
                    self._look_ahead(layer)
                yield _only(came, experts, len(self._layers[layer][1]))
        finally:
            coming.close()
        self._residency.release(needed)

    def _look_ahead(self, layer: Layer) -> None:
        """Predict which experts the next layer will choose, and start to read them."""
        following, foresight = self._next.get(layer, (None, None))
        if following is not None and foresight is not None and (found := foresight.choice()) is not None:
            self.prefetch(following, found[1], _CPU)

    def _refuse_elsewhere(self, device: torch.device) -> None:
        if device != _CPU:
            raise LoadError(f"experts that stay on disk are multiplied on the CPU, not on '{device}'")

    def _held(self, parts: Sequence[Any], meanwhile: Callable[[], None] | None = None) -> Iterator[Any]:
        """Hold parts one after another, and read the next one in the meantime; see `Residency.hold`."""
        ahead: Future[None] | None = None
        try:
            for number, part in enumerate(parts):
                coming, ahead = ahead, None
                self._residency.hold(part, meanwhile) if coming is None else coming.result()
                if number + 1 < len(parts):
                    ahead = self._ahead.submit(self._residency.hold, parts[number + 1])
                try:
                    yield part
                finally:
                    self._residency.release(part)
        finally:
            if ahead is not None and ahead.exception() is None:
                self._residency.release(parts[number + 1])


def expert_layers(model: Any) -> list[PackedModule]:
    """Return the packed expert layers of a model."""
    modules = (module for module in model.modules() if isinstance(module, PackedModule))
    return [module for module in modules if module.shapes[module.projections[0]][0] > 1]


def statistics_of(model: Any) -> Statistics | None:
    """Return the streaming counters of a model; None if its experts are not streamed."""
    stores = (module.store for module in model.modules() if isinstance(module, PackedModule))
    return next((store.statistics for store in stores if store.statistics is not None), None)


def _only(part: Sequence[Expert], experts: Tensor, count: int) -> Tensor:
    """Expert indices with those outside of a part replaced by `count`."""
    chosen = torch.isin(experts, torch.tensor([expert.number for expert in part]))
    return torch.where(chosen, experts, count)


def _numbers(experts: Tensor, count: int) -> list[int]:
    """The unique valid indices (0 to `count` - 1), ascending."""
    return [number for number in sorted(set(experts.flatten().tolist())) if 0 <= number < count]


def cut_portions(experts: Sequence[Expert], numbers: Sequence[int], budget: int) -> list[list[int]]:
    """Split expert indices into portions: one if all fit, otherwise portions of half the budget or one expert."""
    if sum(experts[number].nbytes for number in numbers) <= budget:
        return [list(numbers)]
    portions: list[list[int]] = [[]]
    left = budget // 2
    for number in numbers:
        if portions[-1] and experts[number].nbytes > left:
            portions.append([])
            left = budget // 2
        portions[-1].append(number)
        left -= experts[number].nbytes
    return portions

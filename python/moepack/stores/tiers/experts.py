"""A store with all experts on the host and as many on the device as fit into its memory.

Weights that every token needs are on the device. When a layer is called, the router's choice is copied to the host,
which waits for it: only the host knows which experts are missing, and bookkeeping on the device would need kernels that
keep the state of every expert up to date. Missing experts are copied while those on the device are computed, or the CPU
multiplies the missing ones, depending on measured costs (`misses`). A prompt chooses nearly all experts. If they do not
fit, they are processed in portions, and the next one is copied while the current one is multiplied.

Invariants:
- If all missing experts are moved, outputs depend only on weights, inputs and the number of slots, never on the slots'
  contents: sums follow the order of the router's choice, and portions the order of expert indices. If the CPU
  multiplies some, its sum is added to the device's, and the split depends on slots and measured times.
- Only one thread uses slots at a time; work that another thread launches on its stream is ordered after it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from threading import RLock
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moepack.arrays import AnyTensor
from moepack.errors import DeviceMemoryError, LoadError
from moepack.stores.base import Call, ExpertStore, Layer, Matrices, Multiply, Portions, sum_portions
from moepack.stores.streaming.residency import Statistics
from moepack.stores.tiers.accelerator import Arrival, Device
from moepack.stores.tiers.arena import Arena, Budget, Stack, arena_bytes
from moepack.stores.tiers.host import Host
from moepack.stores.tiers.misses import COMPUTED, MOVED, SECONDS, Misses, Shares, measured
from moepack.units import size

__all__ = ["TierStore"]

_CPU = torch.device("cpu")


class _Layer(NamedTuple):
    """A layer's arena.

    Attributes:
        arena: the arena.
        number: the index of the layer.
    """

    arena: Arena
    number: int


class _Portion(NamedTuple):
    """Experts that are on the device or being moved there.

    Attributes:
        matrices: the arena's matrices; they wait for late experts themselves if a call can start without them.
        places: [T, k], slots of these experts.
        arrival: otherwise, the copies to wait for.
    """

    matrices: Matrices
    places: Tensor
    arrival: Arrival | None


class TierStore(ExpertStore):
    """Keeps experts within a number of bytes on a device.

    Args:
        device: the device.
        host: creates the object that holds all experts; called once the slots are allocated.
        stacks: the projections of each layer; the experts of a layer have one layout.
        budget: the device memory.
        top_k: experts per token in a layer.
        misses: how to handle chosen experts that have no slot.

    Raises:
        DeviceMemoryError: the experts of one token do not fit, so each would be evicted before its next use; the
            message contains the required size.
    """

    asks_host = True

    def __init__(
        self,
        device: Device,
        host: Callable[[], Host],
        stacks: dict[Any, list[Stack]],
        budget: Budget,
        top_k: int,
        misses: Misses,
    ) -> None:
        self._device, self._lock = device, RLock()
        self._multiplier = ThreadPoolExecutor(1, thread_name_prefix="moepack-multiply")
        self._counts = Statistics()
        self._layers: WeakKeyDictionary[Any, _Layer] = WeakKeyDictionary()
        counts = slot_counts(stacks, budget, top_k)
        forms = {form_of(own): own for own in stacks.values()}
        self._arenas = {form: Arena(device, own, counts[form]) for form, own in forms.items()}
        for number, (layer, own) in enumerate(stacks.items()):
            self._layers[layer] = _Layer(self._arenas[form_of(own)], number)
        self._host = host()
        rates = COMPUTED if misses == "computed" else MOVED
        self._shares = {arena: Shares(rates) for arena in self._arenas.values()}
        if misses == "auto":
            shared = {arena: layer for layer, (arena, _) in self._layers.items() if layer.is_shared}
            each = SECONDS / max(len(shared), 1)
            for arena, layer in shared.items():
                self._shares[arena] = Shares(measured(device, arena, self._host, layer, top_k, each), follow=True)

    @property
    def statistics(self) -> Statistics:
        """Counters; bytes and reads are transfers from the host, and `waited` is the waiting time of the device."""
        self._counts.waited = self._device.stalled
        return self._counts

    @property
    def host_statistics(self) -> Statistics | None:
        """Counters of reads from the drive; None if all experts are in host memory."""
        return self._host.statistics

    def put(self, layer: Layer, projection: str, data: AnyTensor, **place: Any) -> None:
        """Raise: bytes are set when the store is created."""
        raise LoadError("a model with offloaded experts does not accept new weights", **place)

    def fetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> Matrices:
        """Raise: experts are only on the device during `portions`."""
        raise LoadError("offloaded experts cannot be loaded all at once")

    def prefetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> None:
        """Do nothing: the bus is needed for demanded experts."""

    def portions(self, layer: Layer, experts: Tensor, device: torch.device) -> Portions:
        """Move the chosen experts to the device, in portions if they do not fit; see `ExpertStore.portions`."""
        self._refuse_elsewhere(device)
        yield from self._portions(layer, _on_host(layer, experts))

    def summed(self, layer: Layer, call: Call, multiply: Multiply) -> Tensor:
        """Move some of the chosen experts while the CPU computes the others; see `ExpertStore.summed`."""
        self._refuse_elsewhere(call.x.device)
        chosen = _on_host(layer, call.experts)
        with self._lock:
            if left := self._left(layer, chosen):
                return self._shared(layer, call, multiply, chosen, left)
            return sum_portions(self._portions(layer, chosen), call, multiply)

    def _shared(
        self, layer: Layer, call: Call, multiply: Multiply, chosen: NDArray[np.int64], left: list[int]
    ) -> Tensor:
        """Sum the outputs of a call; the CPU multiplies the experts in `left`."""
        start, reads, none = perf_counter(), self._counts.reads, _expert_count(layer)
        is_left = np.zeros(none + 1, bool)
        is_left[left] = True
        of_cpu = is_left[chosen]
        on_cpu, others = torch.from_numpy(np.where(of_cpu, chosen, none)), np.where(of_cpu, none, chosen)
        # Copy before launching anything that these copies would have to wait for.
        home = Call(call.x.cpu(), on_cpu, call.weights.cpu())
        share = self._multiplier.submit(_timed, self._host.portions(layer, on_cpu, _CPU), home, multiply, start)
        try:
            outputs = sum_portions(self._portions(layer, others), call, multiply) if (others < none).any() else 0
        finally:
            wait([share])  # must be done before the lock is released, even after an error
        of_share, seconds = share.result()
        shares = self._shares[self._layers[layer].arena]
        shares.note(len(left), int(of_cpu.sum()), seconds, concurrent=self._counts.reads > reads)
        return of_share.to(call.x.device, non_blocking=True).add_(outputs)

    def _refuse_elsewhere(self, device: torch.device) -> None:
        if device.type != self._device.place.type:
            raise LoadError(f"experts of '{self._device.place}' cannot be used on '{device}'")

    def _left(self, layer: Layer, chosen: NDArray[np.int64]) -> list[int]:
        """Return the missing experts for the CPU: those with the fewest tokens, and among them the least used.

        If the CPU would finish all of them before one is moved, the most used one is still moved if that pays off
        (`Rates.patience`).
        """
        arena, own = self._layers[layer]
        slots, shares = arena.slots, self._shares[arena]
        if shares.rates is MOVED:
            return []
        choices = Counter(chosen.ravel().tolist())
        choices.pop(_expert_count(layer), None)
        tokens = {(own, expert): count for expert, count in choices.items()}
        there = slots.experts()
        missing = sorted((count, slots.uses(pair), pair) for pair, count in tokens.items() if pair not in there)
        left = [pair for *_, pair in missing[: shares.cpu_share([count for count, *_ in missing])]]
        if left and len(left) == len(missing) and slots.gain(left[-1], tokens) >= shares.rates.patience:
            left.pop()
        slots.use(left)
        self._counts.misses += len(left)
        self._counts.computed += len(left)
        return [expert for _, expert in left]

    def _portions(self, layer: Layer, chosen: NDArray[np.int64]) -> Portions:
        """Move experts to the device, in portions if they do not fit."""
        arena = self._layers[layer].arena
        parts = _parts(sorted({*chosen.ravel().tolist()} - {_expert_count(layer)}), arena.slots.count)
        with self._lock:
            self._device.enter()
            try:
                coming = self._bring(layer, chosen, parts[0], ())
                for part, following in zip(parts, [*parts[1:], None], strict=True):
                    here, early = coming, following is not None and len(part) + len(following) <= arena.slots.count
                    if following is not None and early:
                        coming = self._bring(layer, chosen, following, part)
                    if here.arrival is not None:
                        here.arrival.wait()
                    yield here.matrices, here.places
                    if following is not None and not early:
                        coming = self._bring(layer, chosen, following, ())
            finally:
                self._device.leave()

    def _bring(self, layer: Layer, chosen: NDArray[np.int64], experts: Sequence[int], used: Sequence[int]) -> _Portion:
        """Start to move a portion's experts while the current portion stays in its slots.

        The slot indices are sent first, because they would otherwise queue behind the experts on the same bus.
        """
        arena, own = self._layers[layer]
        slots, missing = arena.slots.take([(own, expert) for expert in experts], [(own, expert) for expert in used])
        new, of_expert = [expert for _, expert in missing], dict(zip(experts, slots, strict=True))
        there = [expert for expert in experts if expert not in new]
        splits = bool(new and there) and self._device.overlaps(arena.matrices, layer, torch.from_numpy(chosen))
        places = _placed(chosen, [experts, there, new] if splits else [experts], of_expert, arena.slots.count)
        index = self._device.numbers(places)
        arrivals: list[Arrival] = []

        def send(expert: int, sources: Sequence[Tensor]) -> Arrival:
            arrivals.append(self._device.bring(arena.copies(of_expert[expert], sources)))
            self._counts.bytes_read += sum(map(len, sources))
            return arrivals[-1]

        try:
            if new:
                self._host.send(layer, new, send)
        except BaseException:
            arena.slots.forget(missing)
            raise
        self._count(len(there), len(new))
        matrices = arena.matrices
        if splits:
            matrices = tuple(self._device.beginning(matrices, index[1], index[2], arrivals[-1]))
        return _Portion(matrices, index[0], None if splits or not arrivals else arrivals[-1])

    def _count(self, hits: int, misses: int) -> None:
        counts = self._counts
        counts.hits, counts.misses, counts.reads = counts.hits + hits, counts.misses + misses, counts.reads + misses
        if misses:
            counts.resident = sum(len(arena.slots) * arena.expert_bytes for arena in self._arenas.values())
            counts.most = max(counts.most, counts.resident)


def _timed(portions: Portions, call: Call, multiply: Multiply, start: float) -> tuple[Tensor, float]:
    """The sum of a call, and the seconds since `start` without time spent reading experts from the drive."""
    waited = 0.0

    def noted() -> Portions:
        nonlocal waited
        with closing(portions):
            while True:
                asked = perf_counter()
                portion = next(portions, None)
                waited += perf_counter() - asked
                if portion is None:
                    return
                yield portion

    outputs = sum_portions(noted(), call, multiply)
    return outputs, perf_counter() - start - waited


def _expert_count(layer: Layer) -> int:
    """The number of experts in a layer."""
    return next(iter(layer.shapes.values()))[0]


def _on_host(layer: Layer, experts: Tensor) -> NDArray[np.int64]:
    """Copy the router's choice to the host, with invalid indices replaced by the expert count; synchronizes."""
    chosen, count = experts.cpu().numpy(), _expert_count(layer)
    return np.where((chosen >= 0) & (chosen < count), chosen, count)


def form_of(stacks: Sequence[Stack]) -> tuple[Any, ...]:
    """Return a key that is equal for layers whose experts fit into the same slots."""
    return tuple(stack.form for stack in stacks)


def slot_counts(stacks: dict[Any, list[Stack]], budget: Budget, top_k: int) -> dict[Any, int]:
    """Return the number of slots of each layout: those for one token, plus the rest in proportion to expert bytes.

    Raises:
        DeviceMemoryError: the experts of one token do not fit.
    """
    forms = dict[Any, list[list[Stack]]]()
    for own in stacks.values():
        forms.setdefault(form_of(own), []).append(own)
    experts = {form: sum(own[0].experts for own in layers) for form, layers in forms.items()}
    wanted = {form: min(top_k * len(layers), experts[form]) for form, layers in forms.items()}
    sizes = {form: [stack.expert_bytes for stack in layers[0]] for form, layers in forms.items()}
    demand = sum(arena_bytes(each, wanted[form]) + 64 for form, of_form in sizes.items() for each in of_form)
    rest = budget.memory - budget.always - demand
    if rest < 0:
        raise DeviceMemoryError(
            f"{size(budget.memory)} of device memory is too little: every token needs {size(budget.always)}, and its "
            f"experts take {size(demand)}, below which each is evicted before its next use; "
            f"the minimum is {size(budget.always + demand)}"
        )
    total = max(sum(sum(of_form) * experts[form] for form, of_form in sizes.items()), 1)
    return {
        form: min(experts[form], wanted[form] + rest * experts[form] // total) for form in sizes
    }  # rest * (bytes of the form's experts / total) / bytes of an expert


def _parts(numbers: list[int], slots: int) -> list[list[int]]:
    """Split ascending expert indices into portions: one if all fit, otherwise half the slots, so two portions fit."""
    most = max(1, len(numbers) if len(numbers) <= slots else slots // 2)
    return [numbers[first : first + most] for first in range(0, len(numbers), most)] or [[]]


def _placed(
    chosen: NDArray[np.int64], parts: Sequence[Sequence[int]], slots: dict[int, int], none: int
) -> NDArray[np.int64]:
    """Replace expert indices by slots for each part of the experts; experts outside of the part become `none`."""
    table = np.full((len(parts), int(chosen.max(initial=0)) + 1), none)
    for row, part in zip(table, parts, strict=True):
        row[list(part)] = [slots[expert] for expert in part]
    return np.take(table, chosen, axis=1)  # contiguous, as kernels require; `table[:, chosen]` is not

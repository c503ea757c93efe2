"""A store whose experts are on the host, and of which a device holds as many as its memory takes.

What every token needs is on the device. When a layer is called, the router's choice comes to the host, which waits for
it: which experts are missing is known there alone, and accounting on the device would have to keep every expert's state
up to date in kernels of its own. Missing experts are copied beside the computation, and those that are there are
computed meanwhile; or the CPU multiplies the missing ones, by a rule (`misses`). A prompt chooses nearly all experts:
where they do not fit, they come in portions, the next one on its way while one is multiplied.

Invariants:
- Where all missing experts come, outputs depend on weights, inputs and the number of slots, never on what happens to be
  in them: sums have the order of the router's choice, portions that of the experts' numbers. Where the CPU multiplies
  some, its sum is added to the device's, and which experts are in which depends on slots and measured times.
- One thread at a time uses slots; what another launches on its stream comes behind.
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
from moepack.runtime.experts import PackedExperts, PackedSwitchExperts
from moepack.runtime.store import Call, ExpertStore, Layer, Matrices, Multiply, Portions, sum_portions
from moepack.runtime.streaming.residency import Statistics
from moepack.runtime.tiers.arena import Arena, Budget, Stack, arena_bytes
from moepack.runtime.tiers.device import Arrival, Device
from moepack.runtime.tiers.host import Host
from moepack.runtime.tiers.misses import COMPUTED, MOVED, SECONDS, Misses, Shares, measured
from moepack.units import size

__all__ = ["TierStore"]

_CPU = torch.device("cpu")

_SHARED = PackedExperts, PackedSwitchExperts
"""Modules whose calls are shared out with the CPU; others ask for `portions`, and all of theirs come."""


class _Layer(NamedTuple):
    """A layer's place in an arena.

    Attributes:
        arena: which.
        number: of the layer.
    """

    arena: Arena
    number: int


class _Portion(NamedTuple):
    """Experts that are on the device or on their way.

    Attributes:
        matrices: the arena's; they wait themselves if a call can begin without the late experts.
        places: [T, k], slots of these experts.
        arrival: what is to be waited for otherwise.
    """

    matrices: Matrices
    places: Tensor
    arrival: Arrival | None


class TierStore(ExpertStore):
    """Keeps a number of bytes of experts on a device.

    Args:
        device: where.
        host: makes what has all experts, once it is known that the device has room.
        stacks: the projections of each layer, whose experts have one form.
        budget: what slots may take.
        top_k: experts that a token chooses in a layer.
        misses: what becomes of chosen experts that have no slot.

    Raises:
        DeviceMemoryError: the experts of one token do not fit, so that every one would be gone when it is asked for
            again; the message says what is enough.
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
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="moepack-beside")
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
            shared = {arena: layer for layer, (arena, _) in self._layers.items() if isinstance(layer, _SHARED)}
            each = SECONDS / max(len(shared), 1)
            for arena, layer in shared.items():
                self._shares[arena] = Shares(measured(device, arena, self._host, layer, top_k, each), follow=True)

    @property
    def statistics(self) -> Statistics:
        """What happened so far; bytes and reads are those that came from the host, `waited` what the device did."""
        self._counts.waited = self._device.stalled
        return self._counts

    @property
    def host_statistics(self) -> Statistics | None:
        """What reading from the drive did so far; None where the host has all experts."""
        return self._host.statistics

    def put(self, layer: Layer, projection: str, data: AnyTensor, **place: Any) -> None:
        """Refuse: bytes come when the store is made."""
        raise LoadError("a model whose experts come and go does not take new weights", **place)

    def fetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> Matrices:
        """Refuse: experts are on the device while `portions` says so, and no longer."""
        raise LoadError("experts that come and go cannot be had all at once")

    def prefetch(self, layer: Layer, experts: Tensor | None, device: torch.device) -> None:
        """Do nothing: the bus is busy with experts that are needed."""

    def portions(self, layer: Layer, experts: Tensor, device: torch.device) -> Portions:
        """Bring the chosen experts, in portions where they do not fit; see `ExpertStore.portions`."""
        self._refuse_elsewhere(device)
        yield from self._portions(layer, _on_host(layer, experts))

    def summed(self, layer: Layer, call: Call, multiply: Multiply) -> Tensor:
        """Bring some of the chosen experts, and give the CPU the others meanwhile; see `ExpertStore.summed`."""
        self._refuse_elsewhere(call.x.device)
        chosen = _on_host(layer, call.experts)
        with self._lock:
            if left := self._left(layer, chosen):
                return self._shared(layer, call, multiply, chosen, left)
            return sum_portions(self._portions(layer, chosen), call, multiply)

    def _shared(
        self, layer: Layer, call: Call, multiply: Multiply, chosen: NDArray[np.int64], left: list[int]
    ) -> Tensor:
        """Sum the outputs of a call whose experts in `left` the CPU multiplies."""
        start, reads, none = perf_counter(), self._counts.reads, _expert_count(layer)
        is_left = np.zeros(none + 1, bool)
        is_left[left] = True
        of_cpu = is_left[chosen]
        on_cpu, others = torch.from_numpy(np.where(of_cpu, chosen, none)), np.where(of_cpu, none, chosen)
        # Before anything is launched behind which it would have to wait.
        home = Call(call.x.cpu(), on_cpu, call.weights.cpu())
        share = self._beside.submit(_timed, self._host.portions(layer, on_cpu, _CPU), home, multiply, start)
        try:
            outputs = sum_portions(self._portions(layer, others), call, multiply) if (others < none).any() else 0
        finally:
            wait([share])  # which is over when the lock is free, whatever has happened here
        of_share, seconds = share.result()
        shares = self._shares[self._layers[layer].arena]
        shares.note(len(left), int(of_cpu.sum()), seconds, beside=self._counts.reads > reads)
        return of_share.to(call.x.device, non_blocking=True).add_(outputs)

    def _refuse_elsewhere(self, device: torch.device) -> None:
        if device.type != self._device.place.type:
            raise LoadError(f"experts of '{self._device.place}' cannot be used on '{device}'")

    def _left(self, layer: Layer, chosen: NDArray[np.int64]) -> list[int]:
        """The missing experts that the CPU multiplies: those of the fewest tokens, and of them the least used.

        Where it could multiply all of them sooner than one comes, the most used one comes still if that pays
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
        """Bring experts, in portions where they do not fit."""
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
        """Start to bring a portion's experts, beside those of the portion at hand.

        Their slots go to the device first: behind the experts, on the same bus, they would come after them.
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
    """The sum of a call, and the seconds since its start without those in which its experts came from the drive."""
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
    """Experts of a layer."""
    return next(iter(layer.shapes.values()))[0]


def _on_host(layer: Layer, experts: Tensor) -> NDArray[np.int64]:
    """The router's choice, the number of experts in place of what is none; waits for the device."""
    chosen, count = experts.cpu().numpy(), _expert_count(layer)
    return np.where((chosen >= 0) & (chosen < count), chosen, count)


def form_of(stacks: Sequence[Stack]) -> tuple[Any, ...]:
    """What is equal where experts of layers fit the same slots."""
    return tuple(stack.form for stack in stacks)


def slot_counts(stacks: dict[Any, list[Stack]], budget: Budget, top_k: int) -> dict[Any, int]:
    """How many slots each form gets: what a token needs, and of the rest a share by the bytes of its experts.

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
            f"{size(budget.memory)} of the device's memory are too little: every token needs {size(budget.always)} of "
            f"it, and its experts take {size(demand)}, without which each would be gone when it is chosen again; "
            f"{size(budget.always + demand)} is the least that is of use"
        )
    total = max(sum(sum(of_form) * experts[form] for form, of_form in sizes.items()), 1)
    return {
        form: min(experts[form], wanted[form] + rest * experts[form] // total) for form in sizes
    }  # rest * (bytes of the form's experts / total) / bytes of an expert


def _parts(numbers: list[int], slots: int) -> list[list[int]]:
    """Ascending experts in portions: one if all fit, else of half the slots, so that two portions do."""
    most = max(1, len(numbers) if len(numbers) <= slots else slots // 2)
    return [numbers[first : first + most] for first in range(0, len(numbers), most)] or [[]]


def _placed(
    chosen: NDArray[np.int64], parts: Sequence[Sequence[int]], slots: dict[int, int], none: int
) -> NDArray[np.int64]:
    """Slots of some experts in the place of their numbers, and `none` in that of others, for several such parts."""
    table = np.full((len(parts), int(chosen.max(initial=0)) + 1), none)
    for row, part in zip(table, parts, strict=True):
        row[list(part)] = [slots[expert] for expert in part]
    return np.take(table, chosen, axis=1)  # contiguous, as kernels read it, which `table[:, chosen]` is not

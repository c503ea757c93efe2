"""Compares sizes of one model before it is packed: what each would lose and need, and where it would run.

Only headers are read. On request, the loss is predicted if the sensitivity of the model's weights is known from an
earlier run (`calibration.kept`), for a directory of at most `LARGEST` bytes, whose weights are then read.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch

from moepack.allocation.importance import visits
from moepack.calibration.kept import KeptSensitivity
from moepack.checkpoint import Checkpoint, MoeModel, describe
from moepack.checkpoint.architectures import described as architecture
from moepack.errors import CalibrationError
from moepack.methods.auto.method import Auto
from moepack.methods.auto.target import weight_count
from moepack.methods.base import MethodPlan
from moepack.methods.preference import Preference
from moepack.pipeline.assignment import Assignment
from moepack.pipeline.costs import PROCESS, job_memory
from moepack.pipeline.estimate import Pace, Part, dense_bytes, expected_pace, load_of, packed_parts
from moepack.pipeline.machines import DRIVE, GPU, GPU_AND_MEMORY, MEMORY, Machine, this_machine
from moepack.pipeline.outputs import plan_outputs
from moepack.pipeline.source import Source, Streaming, opened
from moepack.units import byte_count

__all__ = ["BITS", "Choice", "Outlook", "outlook"]

BITS = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
"""Bits per weight of the sizes that are compared by default."""

LARGEST = 8_000_000_000
"""Largest checkpoint in bytes whose weights are read to predict the loss; about a minute on one core."""


@dataclass(frozen=True)
class Choice:
    """A size of the packed model.

    Attributes:
        nbytes: bytes of all weight files.
        bits: the same, in bits per weight.
        loss: lower and upper bound of the expected loss increase in nats per token; None if unknown.
        run_memory: memory in bytes to run it, with all weights in memory.
        tokens_per_second: expected decoding speed with the default preference; None for another machine without a
            target.
        preferences: the same for each preference, and its expected loss if `loss` is known; empty if unknown.
        places: where it can run (`Machine.places`).
    """

    nbytes: int
    bits: float
    loss: tuple[float, float] | None
    run_memory: int
    tokens_per_second: float | None
    preferences: tuple[Preference, ...]
    places: tuple[str, ...]


@dataclass(frozen=True)
class Outlook:
    """The choices for one model.

    Attributes:
        model: the directory or the Hub id.
        architecture: transformers' model type.
        layers, experts: number of sparse layers, and of experts in the first of them.
        weights, stored: number and bytes of the weights in the checkpoint.
        parts: the tensors that `auto` packs, by role; sizes after packing are those of the first choice.
        pack_memory: approximate memory in bytes to pack any of the choices.
        streaming: how a model on the hub is downloaded; None for a directory.
        machine: the machine.
        target: the machine of the decoding speeds; "" if they are unknown.
        choices: the sizes, smallest first.
        notes: remarks, as complete sentences.
    """

    model: str
    architecture: str
    layers: int
    experts: int
    weights: int
    stored: int
    parts: tuple[Part, ...]
    pack_memory: int
    streaming: Streaming | None
    machine: Machine
    target: str
    choices: tuple[Choice, ...]
    notes: tuple[str, ...]

    @property
    def best(self) -> Choice | None:
        """The largest choice that fits the fastest place that any choice fits; None if none fits."""
        for place in (GPU, MEMORY, GPU_AND_MEMORY, DRIVE):
            for choice in reversed(self.choices):
                if place in choice.places:
                    return choice
        return None


def outlook(
    model: str | PathLike[str],
    sizes: Sequence[str | int] = (),
    machine: Machine | None = None,
    place: Path | None = None,
    keep_source: bool = False,
    disk_budget: str | int | None = None,
    loss: bool = False,
    target: str | None = None,
    config: Path | None = None,
) -> Outlook:
    """Compare sizes of a packed model.

    Args:
        model: a directory, a file of weights, or the name of a model on the Hub.
        sizes: sizes of all weight files; empty means those of `BITS` that are smaller than the checkpoint.
        machine: the machine that would run the model; None means this one.
        place: folder in which the model would be packed; None means the current one.
        keep_source, disk_budget: as for `compress`.
        loss: predict the loss if the sensitivity is known; samples the weights once for each size, which takes a few
            seconds per size and 10^7 weights.
        target: the machine whose decoding speeds are expected, as for `auto`; None means this one.
        config: folder of config.json and tokenizer of a file of weights, as for `configured`.

    Raises:
        CheckpointError, UnsupportedModelError: as for `compress`.
        ValueError: the target or a size is invalid, impossibly small, or not smaller than the checkpoint.
    """
    out = (place or Path.cwd()).absolute() / "packed"
    with opened(model, out, keep_source, disk_budget, config=config) as source:
        return _compared(source, sizes, machine or this_machine(out.parent), out, loss, target)


def _compared(
    source: Source, sizes: Sequence[str | int], machine: Machine, out: Path, loss: bool, target: str | None
) -> Outlook:
    checkpoint = source.checkpoint
    found = describe(checkpoint)
    weights, stored = weight_count(checkpoint), checkpoint.stored
    methods = [Auto(size=each, target=target) for each in sorted(map(byte_count, sizes))]
    methods = methods or _usual(checkpoint, found, weights, target)
    if not methods:
        raise ValueError(f"the weights of {source.model} already take less than {BITS[0]:g} bits each")
    assignment = Assignment(methods[0])
    outputs = plan_outputs(checkpoint, found, assignment)
    dense, share = dense_bytes(outputs, checkpoint), _share(checkpoint, found)
    plans, choices, parts, pace = _plans(source, found, methods) if loss else {}, [], [], Pace()
    for method in methods:
        goal = method.goal(checkpoint, found)
        parts.append(packed_parts(outputs, assignment, None, goal.nbytes - dense))
        plan = plans.get(goal.nbytes)
        if machine.here or target is not None:
            pace = expected_pace(checkpoint, found, outputs, parts[-1], share, method, plan)
        experts = int(sum(part.after for part in parts[-1] if part.role == "experts"))
        bits, needed = 8 * goal.nbytes / max(weights, 1), PROCESS + goal.nbytes
        places = machine.places(goal.nbytes, experts, PROCESS)
        rise = None if plan is None else plan.loss
        choices.append(Choice(goal.nbytes, bits, rise, needed, pace.tokens_per_second, pace.preferences, places))
    largest = choices[-1].bits
    load = load_of(
        checkpoint, found, outputs, methods[-1], methods[-1].request, share, largest, torch.get_num_threads()
    )
    free = shutil.disk_usage(next(above for above in out.parents if above.exists())).free
    streaming = source.streaming(assignment.layers(found), methods[0].looks_ahead, free - choices[-1].nbytes)
    return Outlook(
        model=str(source.model),
        architecture=found.architecture,
        layers=len(found.layers),
        experts=found.layers[0].experts if found.layers else 0,
        weights=weights,
        stored=stored,
        parts=parts[0],
        pack_memory=job_memory(load),
        streaming=streaming,
        machine=machine,
        target=pace.target,
        choices=tuple(choices),
        notes=(*found.notes, *((streaming.note,) if streaming is not None and streaming.note else ())),
    )


def _usual(checkpoint: Checkpoint, model: MoeModel, weights: int, target: str | None) -> list[Auto]:
    """Return the method for each of `BITS` that is smaller than the checkpoint and can be reached."""
    found = []
    for bits in BITS:
        method = Auto(size=max(int(weights * bits / 8), 1), target=target)
        try:
            method.goal(checkpoint, model)
        except ValueError:
            continue
        found.append(method)
    return found


def _share(checkpoint: Checkpoint, model: MoeModel) -> float:
    experts = model.layers[0].experts if model.layers else 0
    return visits(architecture(model.architecture).top_k(checkpoint.config), experts)


def _plans(source: Source, model: MoeModel, methods: Sequence[Auto]) -> Mapping[int, MethodPlan]:
    """Return the plan of each size, if the sensitivity is known, and with it the loss."""
    checkpoint, request = source.checkpoint, methods[0].request
    if source.remote is not None or request is None or checkpoint.stored > LARGEST:
        return {}
    try:
        known = KeptSensitivity(checkpoint, request.load(checkpoint)).read()
    except CalibrationError:
        return {}
    if not known:
        return {}
    checkpoint, model = Assignment(methods[0]).balanced(checkpoint, model)
    plans = [method.plan(checkpoint, model) for method in methods]
    return {plan.goal.nbytes: plan for plan in plans if plan.goal is not None}

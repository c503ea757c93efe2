"""Estimates the sizes, memory, disk space and time of a `compress` job before it starts.

Sizes come from the methods (`Method.expected`). They are exact if shapes and settings determine them; otherwise they
are extrapolated from one expert of a middle layer. `costs` estimates time and memory. Nothing is written.
"""

import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from moepack.allocation.importance import visits
from moepack.backends.speeds import kept_speeds
from moepack.calibration import CalibrationRequest
from moepack.calibration.fisher import LENGTH, WINDOWS, needed_bytes
from moepack.calibration.stage import layer_tensors
from moepack.checkpoint import Checkpoint, MoeModel, describe
from moepack.checkpoint.architectures import EMBEDDING
from moepack.checkpoint.architectures import described as architecture
from moepack.checkpoint.balanced import BalancedCheckpoint
from moepack.errors import DiskError
from moepack.format.atomic import refuse_existing, try_creating
from moepack.memory import available_bytes
from moepack.methods import Auto, Goal, Method, MethodPlan, Rate, Weights
from moepack.methods.base import Expected
from moepack.methods.mixins import goal_of, is_sized_by_plan, requested
from moepack.methods.preference import Preference, expected_preferences
from moepack.methods.rate.pinned import pinned_bytes
from moepack.methods.reads import is_tied, kept_reads
from moepack.pipeline.assignment import Assignment
from moepack.pipeline.costs import PROCESS, TEXT_STAGES, Load, job_memory, job_seconds
from moepack.pipeline.outputs import Outputs, check_text, plan_outputs, space_bound
from moepack.pipeline.soundness import check_names
from moepack.pipeline.source import Source, Streaming, opened
from moepack.progress import Progress

__all__ = ["Estimate", "Part", "dense_bytes", "estimate", "expected_pace", "load_of", "packed_parts"]


@dataclass(frozen=True)
class Part:
    """The packed tensors of one role.

    Attributes:
        role: "experts", "attention", "shared", "mlp" or "head".
        weights: number of weights.
        before, after: bytes in the checkpoint and packed.
        exact: whether `after` is exact.
    """

    role: str
    weights: int
    before: int
    after: float
    exact: bool

    @property
    def bits_per_weight(self) -> float:
        """Packed bits per weight, including all metadata."""
        return 8 * self.after / max(self.weights, 1)


@dataclass(frozen=True)
class Estimate:
    """The expected resources and results of a job.

    Attributes:
        model: directory of the checkpoint, or its Hub id.
        architecture: transformers' model type.
        layers, experts: number of sparse layers, and of experts in the first of them.
        method, settings: name and settings of the method.
        parts: the packed tensors by role, experts first.
        kept: bytes of tensors and small files that are copied unchanged.
        factors: bytes of the factors of the balanced form, which are stored beside the packed tensors.
        goal: the requested size of all weight files, or None.
        plan: the plan of the method, if sizes depend on it; pass it to `compress` as `method`.
        memory: approximate private memory of the process in bytes.
        free_memory: available memory of the machine in bytes, or None if unknown.
        disk: maximum number of bytes written.
        free_disk: free disk space in bytes.
        threads: number of threads.
        load: the job, as far as its costs are concerned.
        seconds: approximate time on an idle machine; None on a device other than the CPU.
        text_seconds: the part of it that a calibration text takes; 0 without a text.
        run_memory: approximate memory in bytes to run the packed model: a process plus all weight files.
        tokens_per_second: expected decoding speed of one sequence after a short prompt, on the target of `auto` or on
            this machine's processor. None if it was not measured (`moepack doctor` measures).
        preferences: what each preference of `auto` gives at this size; empty for other methods.
        target: the machine of these speeds; "" if there are none.
        notes: remarks on the source and on a text that is not read, as complete sentences.
        streaming: how a model on the hub is downloaded; None for a directory.
    """

    model: Path
    architecture: str
    layers: int
    experts: int
    method: str
    settings: Mapping[str, Any]
    parts: tuple[Part, ...]
    kept: int
    factors: int
    goal: Goal | None
    plan: MethodPlan | None
    memory: int
    free_memory: int | None
    disk: int
    free_disk: int
    threads: int
    load: Load
    seconds: float | None
    text_seconds: float | None
    run_memory: int
    tokens_per_second: float | None
    preferences: tuple[Preference, ...] = ()
    target: str = ""
    notes: tuple[str, ...] = ()
    streaming: Streaming | None = None

    @property
    def before(self) -> int:
        """Size of the checkpoint in bytes."""
        return self.kept + sum(part.before for part in self.parts)

    @property
    def after(self) -> float:
        """Approximate size of the packed directory in bytes."""
        if self.goal is not None and self.plan is None:
            return self.goal.nbytes
        return self.kept + self.factors + sum(part.after for part in self.parts)


def estimate(
    model: str | PathLike[str] | Source,
    out: str | PathLike[str],
    method: Method,
    threads: int | None = None,
    progress: Progress | None = None,
    mtp_bits: int | None = None,
    keep_source: bool = False,
    disk_budget: str | int | None = None,
) -> Estimate:
    """Estimate the resources and results of `compress` with the same arguments.

    Args:
        model, out, mtp_bits, keep_source, disk_budget: as for `compress`. Of a model on the hub, only headers and
            single experts are read, so that `auto` cannot predict the loss.
        method: the method with its settings.
        threads: number of threads; None means torch's setting.
        progress: shows the progress of the method's measurements.

    Raises:
        CheckpointError, UnsupportedModelError, InvalidTensorError, CalibrationError, ValueError: as for `compress`.
        OutputExistsError, DiskError: `out` exists or cannot be created, or the disk cannot hold the requested size.
    """
    target = Path(os.path.abspath(out))
    refuse_existing(target)
    check_text(method)
    with opened(model, target, keep_source, disk_budget) as source:
        return _estimated(source, target, method, threads or torch.get_num_threads(), progress, mtp_bits)


def _estimated(
    source: Source, target: Path, method: Method, workers: int, progress: Progress | None, mtp_bits: int | None
) -> Estimate:
    """Estimate a job from an open checkpoint; arguments and errors as for `estimate`."""
    checkpoint, found, assignment, goal = _sound(source.checkpoint, target, method, mtp_bits)
    method = assignment.method
    outputs = plan_outputs(checkpoint, found, assignment)
    disk, free = _disk(outputs, checkpoint, target, goal)
    streaming = source.streaming(assignment.layers(found), method.looks_ahead, free - disk)
    made = method.plan(checkpoint, found, progress) if is_sized_by_plan(method) and streaming is None else None
    room = None if goal is None else goal.nbytes - dense_bytes(outputs, checkpoint)
    parts = packed_parts(outputs, assignment, made, room)
    kept, request = _kept(outputs, checkpoint), requested(method) if made is None else made.request
    factors = checkpoint.form.nbytes if isinstance(checkpoint, BalancedCheckpoint) else 0
    experts = found.layers[0].experts if found.layers else 0
    share = visits(architecture(found.architecture).top_k(checkpoint.config), experts)
    bits = 8 * sum(part.after for part in parts) / max(sum(part.weights for part in parts), 1)
    load = load_of(checkpoint, found, outputs, method, request, share, bits, workers)
    seconds = job_seconds(load)
    pace = expected_pace(checkpoint, found, outputs, parts, share, method, made)
    return Estimate(
        notes=(*found.notes, *dict.fromkeys(note for each in assignment.methods for note in each.notes({})))
        + (() if made is None else made.notes)
        + ((streaming.note,) if streaming is not None and streaming.note else ()),
        streaming=streaming,
        model=checkpoint.path if source.remote is None else Path(source.model),
        architecture=found.architecture,
        layers=len(found.layers),
        experts=experts,
        method=method.name,
        settings=assignment.with_others(method.settings if made is None else made.settings),
        parts=parts,
        kept=kept,
        factors=factors,
        goal=goal,
        plan=made,
        memory=job_memory(load),
        load=load,
        free_memory=available_bytes(),
        disk=disk + (0 if streaming is None else streaming.disk),
        free_disk=free,
        threads=workers,
        seconds=None if seconds is None else sum(seconds.values()),
        text_seconds=None if seconds is None else sum(seconds[stage] for stage in TEXT_STAGES),
        run_memory=PROCESS + kept + factors + int(sum(part.after for part in parts)),
        tokens_per_second=pace.tokens_per_second,
        preferences=pace.preferences,
        target=pace.target,
    )


def _sound(
    checkpoint: Checkpoint, target: Path, method: Method, mtp_bits: int | None
) -> tuple[Checkpoint, MoeModel, Assignment, Goal | None]:
    """Check a job as `compress` does; return the checkpoint to pack, its description, its methods and its size."""
    assignment, found = Assignment(method).with_overrides(checkpoint, describe(checkpoint))
    method = assignment.method
    method.check(checkpoint, found)
    goal = goal_of(method, checkpoint, found)
    try_creating(target)
    assignment = assignment.with_beyond(found, mtp_bits)
    check_names(checkpoint, found, assignment)
    return *assignment.balanced(checkpoint, found), assignment, goal


def _kept(outputs: Outputs, checkpoint: Checkpoint) -> int:
    """Return the bytes of small files and unpacked tensors, which are copied unchanged."""
    files = sum((checkpoint.path / name).stat().st_size for name in outputs.copies)
    return files + dense_bytes(outputs, checkpoint)


def dense_bytes(outputs: Outputs, checkpoint: Checkpoint) -> int:
    """Return the bytes of tensors that are copied unchanged."""
    return sum(checkpoint.info(name).nbytes for shard in outputs.shards for name in shard.names)


def _disk(outputs: Outputs, checkpoint: Checkpoint, target: Path, goal: Goal | None) -> tuple[int, int]:
    """Return the maximum bytes written and the free bytes; raise DiskError if a requested size does not fit."""
    needed = space_bound(outputs, checkpoint, (), None if goal is None else goal.nbytes)
    free = _free_disk(target)
    if goal is not None and needed > free:
        raise DiskError(f"needs up to {needed:,} bytes, but {free:,} are free", file=target.parent)
    return needed, free


def _free_disk(target: Path) -> int:
    return shutil.disk_usage(next(above for above in target.parents if above.exists())).free


def packed_parts(
    outputs: Outputs, assignment: Assignment, made: MethodPlan | None, room: int | None
) -> tuple[Part, ...]:
    """Sum up packed tensors by role.

    A method whose plan would know the sizes, but was not made, is assumed to spread `room` bytes evenly.

    Unless a plan knows each tensor, tensors with the same shape and position in a layer are assumed to pack
    to the same size.
    """
    alike: dict[tuple[str, str, tuple[int, ...]], list[Weights]] = {}
    for name, weights in _packed_tensors(outputs):
        assigned = weights.name in assignment.others
        place = weights.name if made is not None or assigned else name if weights.role == "experts" else ""
        alike.setdefault((weights.role, place, weights.shape), []).append(weights)
    parts: dict[str, list[Part]] = {}
    shared = [each for members in alike.values() for each in members if each.name not in assignment.others]
    every = sum(math.prod(each.shape) for each in shared)
    if room is not None:
        room -= math.ceil(sum(pinned_bytes(assignment.method).values()))
    for (role, _, shape), members in alike.items():
        middle = members[len(members) // 2]
        chosen = assignment.of(middle)
        assert isinstance(chosen, Method), "estimates do not include tensors that are already packed"
        sized = made.packer if made is not None and chosen is made.method else chosen
        if made is None and is_sized_by_plan(chosen) and room is not None:
            found = Expected(math.prod(shape) * room / max(every, 1), exact=False)
        else:
            found = sized.expected(middle)
        before = sum(member.nbytes for member in members)
        weights_count = len(members) * math.prod(shape) if before else 0  # what refines weights stands for no more
        parts.setdefault(role, []).append(Part(role, weights_count, before, len(members) * found.nbytes, found.exact))
    summed = [_sum(role, found) for role, found in parts.items()]
    return tuple(sorted(summed, key=lambda part: part.role != "experts"))


def _packed_tensors(outputs: Outputs) -> Iterable[tuple[str, Weights]]:
    return (pair for shard in outputs.shards if shard.layer is not None for pair in layer_tensors(shard.layer).items())


def _sum(role: str, parts: list[Part]) -> Part:
    weights, before = sum(part.weights for part in parts), sum(part.before for part in parts)
    return Part(role, weights, before, sum(part.after for part in parts), all(part.exact for part in parts))


def load_of(
    checkpoint: Checkpoint,
    model: MoeModel,
    outputs: Outputs,
    method: Method,
    request: CalibrationRequest | None,
    share: float,
    packed: float,
    threads: int,
) -> Load:
    """Describe a job by what its costs depend on.

    Args:
        checkpoint, model: the model to pack.
        outputs: its packed tensors.
        method: the main method.
        request: its calibration.
        share: share of the tokens that visit an expert.
        packed: expected bits per packed weight.
        threads: number of threads.
    """
    layers = [list(layer_tensors(shard.layer).values()) for shard in outputs.shards if shard.layer is not None]
    sizes = [sum(math.prod(weights.shape) for weights in layer) for layer in layers]
    measures = request is not None and isinstance(method, Auto | Rate)
    measures = measures and not checkpoint.config.get("is_encoder_decoder")
    tokens = 0 if request is None else request.samples * request.length
    return Load(
        method=method.name,
        seconds=method.seconds if getattr(method, "device", "cpu") == "cpu" else None,
        kernel=method.kernel,
        layers=tuple(tuple((weights.role, *weights.shape) for weights in layer) for layer in layers),
        packed=packed / 8 * max(sizes, default=0),
        tokens=tokens,
        length=0 if request is None else request.length,
        group=1 if request is None else request.settings.group,
        share=share,
        width=int(checkpoint.config.get("hidden_size") or checkpoint.config.get("d_model", 0)),
        measured=min(tokens, WINDOWS * LENGTH) if measures else 0,
        measuring=needed_bytes(checkpoint, model) if measures else 0,
        threads=threads,
    )


@dataclass(frozen=True)
class Pace:
    """The expected decoding speed; attributes as of `Estimate`."""

    tokens_per_second: float | None = None
    preferences: tuple[Preference, ...] = ()
    target: str = ""


def expected_pace(
    checkpoint: Checkpoint,
    model: MoeModel,
    outputs: Outputs,
    parts: Sequence[Part],
    share: float,
    method: Method,
    made: MethodPlan | None,
) -> Pace:
    """Estimate the decoding speed from the plan, or without one from the sizes of the parts.

    Embedding rows are looked up, so an embedding counts only if it is also the head.
    """
    if made is not None and made.token_seconds is not None:
        return Pace(1 / made.token_seconds, made.preferences, made.machine)
    speeds = method.speeds if isinstance(method, Auto) else kept_speeds()
    if method.kernel is None or speeds is None:
        return Pace()
    packed = {weights.name for _, weights in _packed_tensors(outputs)}
    rest = speeds.step(max(len(model.dense), len(model.layers)), kept_reads(checkpoint, model, packed))
    shares = {"experts": share, EMBEDDING: float(is_tied(checkpoint))}
    reads = [(part, part.weights * shares.get(part.role, 1.0)) for part in parts]
    if isinstance(method, Auto):
        weights = sum(read for _, read in reads)
        bits = sum(part.bits_per_weight * read for part, read in reads) / max(weights, 1)
        preferences = expected_preferences(bits, weights, rest, speeds)
        own = next(each for each in preferences if each.name == method.prefer)
        return Pace(own.tokens_per_second, preferences, speeds.machine)
    times = (
        speeds.seconds(method.kernel, part.bits_per_weight, read, read * part.bits_per_weight / 8)
        for part, read in reads
    )
    return Pace(1 / (rest + sum(times)), (), speeds.machine)

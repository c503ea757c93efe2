"""What `compress` is going to do, in numbers, before any of the work: sizes, memory, disk, time.

Sizes are what methods expect (`Method.expected`): exact where shapes and settings fix them, otherwise from one expert
of a layer in the middle. Times follow from speeds that were measured once, on processors without other work, and memory
from what is held at a time: both may be wrong by a factor of two on another machine, which is enough to know whether to
wait or to look for a larger one. Nothing is written.
"""

import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from moepack.allocation.importance import visits
from moepack.calibration.stage import layer_tensors
from moepack.checkpoint import Checkpoint, describe
from moepack.checkpoint.architectures import EMBEDDING
from moepack.checkpoint.architectures import described as architecture
from moepack.checkpoint.quantized import open_checkpoint
from moepack.checkpoint.resolve import resolve_model
from moepack.errors import DiskError
from moepack.format.atomic import refuse_existing, try_creating
from moepack.memory import available_bytes
from moepack.methods import Method, Weights
from moepack.methods.parallel import MAX_WORKERS
from moepack.pipeline.assignment import Assignment
from moepack.pipeline.plan import Plan, check_text, make_plan, space_bound
from moepack.pipeline.soundness import check_names
from moepack.progress import Progress
from moepack.runtime.speeds import kept_speeds, token_seconds

__all__ = ["Estimate", "Part", "estimate"]

SECONDS = {"auto": 90, "ternary": 15, "rate": 60, "finequant": 90, "milo": 600, "codequant": 2000, "qmoe": 500}
"""Seconds in which one thread of a Zen 3 packs 10^9 weights, by method; calibration comes on top."""

TOKEN_SECONDS = 3e-10
"""Seconds of one thread for each weight that is packed and each token of the calibration set that visits it."""

SOLVER = {"each": 0.33, "column": 3.2e-4, "weight": 8e-8, "cube": 9e-11}
"""Seconds of solving on a text by `auto` and `rate`, of one thread of a Xeon (Sapphire Rapids): to begin a layer of
experts or a linear layer; for each column, and each weight, in each pass; and to factorise a Hessian, for its columns
cubed."""

DENSE_PASSES, EXPERT_PASSES = 3.7, 2.5
"""Passes over a linear layer and over experts, in the mean."""

PROCESS = 450 << 20
"""Bytes of a process that has imported torch."""

RUNNING = 250 << 20
"""Bytes that it takes beyond that once transformers has run a model in it."""

WORKING = 32
"""Bytes a weight of the experts in work at a time: copies in float32 and candidates."""

HESSIAN = 16
"""Bytes of calibration for each expert in work and pair of columns: sums of the inputs, and their inverse."""


@dataclass(frozen=True)
class Part:
    """What is packed of one role.

    Attributes:
        role: "experts", "attention", "shared", "mlp" or "head".
        weights: how many.
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
        """Packed bits a weight, all metadata counted."""
        return 8 * self.after / max(self.weights, 1)


@dataclass(frozen=True)
class Estimate:
    """What a job is going to need and to make.

    Attributes:
        model: directory of the checkpoint.
        architecture: transformers' model type.
        layers, experts: how many sparse layers, and experts in the first of them.
        method, settings: name and settings of the method.
        parts: what is packed, experts first.
        kept: bytes that are taken over as they are: other tensors and small files.
        budget: bytes that all files of weights may take where the method was given that number, or None.
        reason: how that number came about, in words; "" without one.
        planned: whether the method has shared out the bytes already.
        loss: the least and the most nats a token that the model is expected to lose, or None where the method does not
            know.
        memory: bytes of the process's own memory, about.
        free_memory: bytes that the machine has left, or None where it does not say.
        disk: the most bytes that will be written.
        free_disk: bytes that the disk has left.
        threads: threads that work.
        seconds: time, about; None on a device that is not the CPU.
        run_memory: bytes that running the packed model takes, about: a process, and all files of weights.
        tokens_per_second: of one sequence on this machine's processor, about and at most: products of packed weights
            alone. None where the format was not measured (`moepack doctor` does).
        notes: what a user should know of the source, and of a text that is not read, in full sentences.
    """

    model: Path
    architecture: str
    layers: int
    experts: int
    method: str
    settings: Mapping[str, Any]
    parts: tuple[Part, ...]
    kept: int
    budget: int | None
    reason: str
    planned: bool
    loss: tuple[float, float] | None
    memory: int
    free_memory: int | None
    disk: int
    free_disk: int
    threads: int
    seconds: float | None
    run_memory: int
    tokens_per_second: float | None
    notes: tuple[str, ...] = ()

    @property
    def before(self) -> int:
        """Bytes of the checkpoint."""
        return self.kept + sum(part.before for part in self.parts)

    @property
    def after(self) -> float:
        """Bytes of the packed directory, about."""
        if self.budget and not self.planned:
            return self.budget
        return self.kept + sum(part.after for part in self.parts)


def estimate(
    model: str | PathLike[str],
    out: str | PathLike[str],
    method: Method,
    threads: int | None = None,
    progress: Progress | None = None,
    mtp_bits: int | None = None,
) -> Estimate:
    """Estimate what `compress` with the same arguments needs and makes.

    Args:
        model, out, mtp_bits: as for `compress`; a model of the hub is fetched.
        method: the method with its settings.
        threads: threads to use; None means torch's setting.
        progress: where the method shows what it measures.

    Raises:
        CheckpointError, UnsupportedModelError, InvalidTensorError, CalibrationError, ValueError: as for `compress`.
        OutputExistsError, DiskError: `out` exists or cannot be made, or the disk has too little room for a size.
    """
    target = Path(os.path.abspath(out))
    refuse_existing(target)
    check_text(method)
    checkpoint = open_checkpoint(resolve_model(model))
    found = describe(checkpoint)
    method.aim(checkpoint, found)
    try_creating(target)
    assignment = Assignment(method).with_beyond(found, mtp_bits)
    check_names(checkpoint, found, assignment)
    plan = make_plan(checkpoint, found, assignment)
    disk, free = _disk(plan, checkpoint, target)
    if method.plans:
        method.prepare(checkpoint, found, progress)
    parts = _parts(plan, method)
    kept = _kept(plan, checkpoint)
    workers = threads or torch.get_num_threads()
    experts = found.layers[0].experts if found.layers else 0
    share = visits(architecture(found.architecture).top_k(checkpoint.config), experts)
    return Estimate(
        notes=(*found.notes, *dict.fromkeys(note for each in assignment.methods for note in each.notes({}))),
        model=checkpoint.path,
        architecture=found.architecture,
        layers=len(found.layers),
        experts=experts,
        method=method.name,
        settings=method.settings,
        parts=parts,
        kept=kept,
        budget=method.budget,
        reason=getattr(method, "reason", ""),
        planned=method.plans,
        loss=method.expected_loss,
        memory=_memory(plan, method, checkpoint, workers),
        free_memory=available_bytes(),
        disk=disk,
        free_disk=free,
        threads=workers,
        seconds=_seconds(plan, parts, share, method, workers),
        run_memory=PROCESS + kept + int(sum(part.after for part in parts)),
        tokens_per_second=_tokens_per_second(parts, share, method, bool(checkpoint.config.get("tie_word_embeddings"))),
    )


def _kept(plan: Plan, checkpoint: Checkpoint) -> int:
    """Bytes that are taken over as they are: small files, and tensors that are not packed."""
    files = sum((checkpoint.path / name).stat().st_size for name in plan.copies)
    return files + sum(checkpoint.info(name).nbytes for shard in plan.shards for name in shard.names)


def _disk(plan: Plan, checkpoint: Checkpoint, target: Path) -> tuple[int, int]:
    """The most bytes that are written, and those that are free; a size that was asked for must fit."""
    needed, free = space_bound(plan, checkpoint, ()), _free_disk(target)
    if plan.assignment.method.budget is not None and needed > free:
        raise DiskError(f"needs up to {needed:,} bytes, {free:,} are free", file=target.parent)
    return needed, free


def _free_disk(target: Path) -> int:
    return shutil.disk_usage(next(above for above in target.parents if above.exists())).free


def _parts(plan: Plan, method: Method) -> tuple[Part, ...]:
    """Add up what is packed, by role; tensors of equal shape and place in a layer are expected to pack alike, where the
    method did not plan each of them."""
    alike: dict[tuple[str, str, tuple[int, ...]], list[Weights]] = {}
    for name, weights in _packed_tensors(plan):
        assigned = weights.name in plan.assignment.others
        place = weights.name if method.plans or assigned else name if weights.role == "experts" else ""
        alike.setdefault((weights.role, place, weights.shape), []).append(weights)
    parts: dict[str, list[Part]] = {}
    for (role, _, shape), members in alike.items():
        middle = members[len(members) // 2]
        chosen = plan.assignment.of(middle)
        assert isinstance(chosen, Method), "tensors that come packed are no part of an estimate"
        found = chosen.expected(middle)
        before = sum(member.nbytes for member in members)
        weights_count = len(members) * math.prod(shape) if before else 0  # what refines weights stands for no more
        parts.setdefault(role, []).append(Part(role, weights_count, before, len(members) * found.nbytes, found.exact))
    summed = [_sum(role, found) for role, found in parts.items()]
    return tuple(sorted(summed, key=lambda part: part.role != "experts"))


def _packed_tensors(plan: Plan) -> Iterable[tuple[str, Weights]]:
    return (pair for shard in plan.shards if shard.layer is not None for pair in layer_tensors(shard.layer).items())


def _sum(role: str, parts: list[Part]) -> Part:
    weights, before = sum(part.weights for part in parts), sum(part.before for part in parts)
    return Part(role, weights, before, sum(part.after for part in parts), all(part.exact for part in parts))


def _memory(plan: Plan, method: Method, checkpoint: Checkpoint, workers: int) -> int:
    """The process, codes of one tensor (a byte a weight), the packed tensors of a layer, and the experts in work; with
    calibration the layer itself in float32, Hessians, and the states of all tokens before and after a block."""
    layers = [shard.layer for shard in plan.shards if shard.layer is not None]
    shapes = [weights.shape for _, weights in _packed_tensors(plan)]
    if not shapes:
        return PROCESS
    codes = max(math.prod(shape) for shape in shapes)
    working = max(rows * columns * min(experts, workers, MAX_WORKERS) for experts, rows, columns in shapes) * WORKING
    packed = max(map(plan.assignment.bound, layers))
    total = PROCESS + codes + working + packed
    if (request := method.request) is not None:
        largest = max(sum(math.prod(weights.shape) for weights in layer_tensors(layer).values()) for layer in layers)
        states = _tokens(method) * int(checkpoint.config.get("hidden_size") or checkpoint.config.get("d_model", 0))
        squares = max(min(experts, request.settings.group) * columns**2 for experts, _, columns in shapes)
        total += RUNNING + 4 * largest + 2 * 4 * states + HESSIAN * squares
    return total


def _tokens_per_second(parts: Iterable[Part], share: float, method: Method, tied: bool) -> float | None:
    """What products of packed weights take; the rows of an embedding are looked up, but for one that is a head, too."""
    if seconds := getattr(method, "token_seconds", None):
        return float(1 / seconds)
    kind, speeds = method.kernel, kept_speeds()
    if kind is None or speeds is None:
        return None
    visits = {"experts": share, EMBEDDING: float(tied)}
    seconds = (
        token_seconds(kind, part.bits_per_weight, part.weights * visits.get(part.role, 1.0), speeds) for part in parts
    )
    return 1 / (sum(seconds) or math.inf)


def _tokens(method: Method) -> int:
    """Tokens of the calibration set, at most."""
    return 0 if method.request is None else method.request.samples * method.request.length


def _solving(plan: Plan, method: Method, workers: int) -> float:
    """Seconds of solving uniform integers on a text: fixed ones, and those that threads share."""
    if method.request is None or method.name not in ("auto", "rate"):
        return 0.0
    fixed, shared = 0.0, 0.0
    for shard in plan.shards:
        tensors = [] if shard.layer is None else list(layer_tensors(shard.layer).values())
        solved = [weights for weights in tensors if weights.role not in (EMBEDDING, "head")]
        sparse = any(weights.role == "experts" for weights in solved)
        fixed += SOLVER["each"] * (1 if sparse else len(solved))
        passes = EXPERT_PASSES if sparse else DENSE_PASSES
        for experts, rows, columns in (weights.shape for weights in solved):
            groups = math.ceil(experts / method.request.settings.group)
            fixed += passes * SOLVER["column"] * columns * groups
            shared += passes * SOLVER["weight"] * experts * rows * columns + 2 * SOLVER["cube"] * experts * columns**3
    return fixed + shared / min(workers, MAX_WORKERS)


def _seconds(plan: Plan, parts: Iterable[Part], share: float, method: Method, workers: int) -> float | None:
    """The time, if a `share` of the calibration set's tokens visits an expert."""
    if method.name not in SECONDS or getattr(method, "device", "cpu") != "cpu":
        return None
    seen = sum(part.weights * _tokens(method) * (share if part.role == "experts" else 1) for part in parts)
    work = SECONDS[method.name] / 1e9 * sum(part.weights for part in parts) + TOKEN_SECONDS * seen
    return work / min(workers, MAX_WORKERS) + _solving(plan, method, workers)

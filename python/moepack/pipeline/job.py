"""`compress`: packs a checkpoint into a directory, one layer at a time.

All output goes to `OUT.partial` next to `OUT`: one shard per MoE layer, shards of dense tensors copied byte for byte,
the small files, and finally the manifest. The directory is then renamed, so `OUT` is either complete or absent.
Without a text, anonymous memory stays below 1 GiB + 4 x the largest layer: the codes of one projection, one expert in
floating point, and the blobs of two layers, one of which is written while the next is packed. With a text, Hessians and
activations are additional (`pipeline.costs.job_memory`).
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from moepack import _core
from moepack.backends.threads import set_threads
from moepack.calibration.stage import PackedLayer, layer_tensors
from moepack.checkpoint import Checkpoint, MoeModel, describe
from moepack.checkpoint.balanced import BalancedCheckpoint
from moepack.checkpoint.remote import Altered
from moepack.errors import (
    CalibrationError,
    CheckpointError,
    DiskError,
    InvalidTensorError,
    MoepackError,
    OutputExistsError,
)
from moepack.format.atomic import refuse_existing, try_creating, write_file, write_inside
from moepack.format.balance import serialized
from moepack.format.directory import map_tensors, read_manifest
from moepack.format.header import read_header
from moepack.format.hub import BALANCE, CONFIG, INDEX, config_bytes, index_bytes, quantization_config
from moepack.format.manifest import BEYOND, DENSE, MANIFEST, VERSION, FileRecord, Manifest, TensorRecord
from moepack.format.shard import DTYPE_NAMES, Entry, write_shard
from moepack.format.side import RECIPE
from moepack.memory import PeakMemory
from moepack.methods import METHODS, Method, MethodPlan, PackedBytes, Rearranges, create
from moepack.methods.mixins import goal_of
from moepack.pipeline.assignment import Assignment, PlannedAssignment
from moepack.pipeline.check import checked, is_checked
from moepack.pipeline.digests import Digests
from moepack.pipeline.executor import Executor, Here
from moepack.pipeline.journal import PARTIAL, ShardRecord, Workspace
from moepack.pipeline.outputs import Outputs, Shard, check_text, plan_outputs, space_bound
from moepack.pipeline.overflow import LARGEST, is_half, overflow_notes, warn_all
from moepack.pipeline.pruning import Pruning
from moepack.pipeline.recipe import Recipe
from moepack.pipeline.report import CompressReport, Totals, directory_bytes
from moepack.pipeline.rewrite import STATE, rewritten
from moepack.pipeline.share import leave_out
from moepack.pipeline.solving import LayerPacker
from moepack.pipeline.soundness import check_names, check_source
from moepack.pipeline.source import KEPT_OUT, Source, opened, sources_of
from moepack.pipeline.writer import ShardWriter
from moepack.precision import single_precision
from moepack.progress import Progress, Silent
from moepack.system import files

WEIGHT = "weight"
"""Name of a linear layer's projection in the manifest."""

_METADATA = {"format": "pt"}


@single_precision()
def compress(
    model: str | PathLike[str] | Source,
    out: str | PathLike[str],
    *,
    method: str | Method | MethodPlan | None = None,
    others: Mapping[str, Method | PackedBytes] | None = None,
    mtp_bits: int | None = None,
    threads: int | None = None,
    ray: str | None = None,
    resume: bool = True,
    check: bool | None = None,
    progress: Progress | None = None,
    keep_source: bool = False,
    disk_budget: str | int | None = None,
    recipe: str | PathLike[str] | Recipe | None = None,
    prune: str | float | None = None,
    prune_by: str | None = None,
    **settings: Any,
) -> CompressReport:
    """Compress a Mixture-of-Experts checkpoint into a packed directory, to a given size or with a given method.

        compress("examples/tiny-moe", "packed", size="3MB", calibration="text.txt")
        compress("examples/tiny-moe", "packed", method="finequant", bits=8)

    Args:
        model: directory of a Hugging Face checkpoint (safetensors), or the id of a model on the Hugging Face Hub,
            `ORGANIZATION/NAME[@REVISION]`, which is packed while it is downloaded.
        out: directory to create; it must not exist.
        method: name of a method, a method object, or a plan that `Method.plan` returned for this model, which avoids
            planning twice. The default, `auto`, packs a model to a given size (`moepack.methods.Auto`).
        others: tensors that are packed by another method or are already packed. Keys are names of packed tensors: an
            experts module's path and projection, such as `model.layers.0.mlp.experts.down_proj`, or a linear layer's
            name in the checkpoint. Values are methods or packed tensors.
        mtp_bits: packs multi-token-prediction experts as group-wise integers of 2, 3, 4 or 8 bits; None copies them. A
            requested size counts them at their original size, so the output is smaller than requested.
        threads: number of threads; None keeps the current setting. The output is the same for any number, except with
            methods that calibrate, whose sums are rounded differently.
        ray: address of a Ray cluster that shares the work, or "local" to start one on this machine; each task uses
            `threads`. The output is identical to that of a run without Ray if all processors have the same
            instruction sets; otherwise a warning is issued. Requires the extra `ray`.
        resume: continue an interrupted run of the same job in `out`.partial; False starts over.
        check: after `out` is complete, run both models on 2,000 tokens of the calibration text (or of the built-in text
            if there is none) and report the loss increase. None runs the check only if the method uses calibration
            and the model has at least 10^8 weights; it then takes less than a tenth of the compression time.
        progress: receives progress; None shows nothing.
        keep_source: keep downloaded shards in the Hugging Face cache instead of deleting them.
        disk_budget: maximum size of downloaded shards on disk, in bytes or as text such as `20GB`. None means the size
            of the three largest shards, or more if a layer spans more shards; or of all shards, if the method reads
            the weights several times and the disk has room.
        recipe: a recipe, its file, or a packed directory that has one (`recipe.yaml`). Its method and settings apply,
            except those that are given, which notes in the report name.
        prune: share of each layer's experts to leave out before packing, as 0.25 or "25%": those that matter least on
            the calibration text, or on the built-in text if there is none (`moepack.pipeline.pruning`). "auto" leaves
            out a share if that loses less than fewer bits (`moepack.pipeline.share`), with method `auto` and a text.
        prune_by: "drop" (the default), or "merge" to average them with similar experts.
        settings: settings of the method if it is given by its name; for `auto`: size, bits_per_weight or ratio,
            calibration, prefer. For any method, `bits` may give bits by name, as text, a mapping or a file:
            `bits={"down_proj": 4, "layers.0": 16}` (`moepack.methods.overrides`).

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
        DownloadError: the checkpoint cannot be downloaded.
        UnsupportedModelError: the architecture or the quantization of the checkpoint is not supported, or transformers
            cannot build the model.
        CalibrationError: the calibration text is unusable, or the model computes NaN on it.
        ClusterError: a node of the cluster cannot run the job, or no node is left.
        InvalidTensorError: a weight or a copied value is NaN or infinite.
        OutputExistsError: `out` exists.
        ResumeError: `out`.partial belongs to another job.
        DiskError: the disk is full or a write fails.
        OverrideError: bits by name do not fit the model or the method.
        RecipeError: the recipe cannot be read, or has an unknown entry.
        ValueError: a setting is invalid, or the size cannot be reached.

    After any exception, and after Ctrl-C, finished layers remain in `out`.partial, and the same call continues once the
    cause is fixed. If no layer is finished, an error of moepack other than DiskError removes `out`.partial. After a
    failed download, the shards in `out`.source are kept.
    """
    started, peak, target = time.perf_counter(), PeakMemory(), Path(os.path.abspath(out))
    refuse_existing(target)
    known = recipe if recipe is None or isinstance(recipe, Recipe) else Recipe.read(recipe)
    said, pruning = tuple[str, ...](), Pruning.of(prune, prune_by)
    if known is not None and (method is None or isinstance(method, str)):
        method, settings, said = known.merged(method, settings)
        mtp_bits = known.mtp_bits if mtp_bits is None else mtp_bits
        pruning = pruning or known.pruning
    chosen, plan = _chosen("auto" if method is None else method, settings)
    progress = progress or Silent()
    check_text(chosen)
    if threads is not None:
        set_threads(threads)
    whole, shared = pruning is not None, ray is not None
    with opened(model, target, keep_source, disk_budget, whole=whole, shared=shared) as source:
        assignment = Assignment(leave_out(source, pruning, chosen, target, progress, mtp_bits), others or {})
        if check and not source.has_original:
            raise ValueError(
                "the check needs the original model, which is deleted after packing; add keep_source (--keep-source)"
            )
        source.show(progress)
        sound = _sound(source, target, assignment, mtp_bits, plan)
        registered = assignment.method.name in METHODS  # a recipe names its method
        made = partial(Recipe.of, source=source, mtp_bits=mtp_bits) if registered else None
        report, plan = _packed(*sound, plan, target, ray, resume, progress, peak, started, made)
        if known is not None and made is not None:
            said += known.differences(Recipe.read(target))
            report = replace(report, notes=(*said, *report.notes))
        if source.remote is not None:
            report = replace(report, notes=(*report.notes, *source.remote.notes))
        return _checked(report, plan, source, check, progress)


def _checked(
    report: CompressReport, plan: MethodPlan, source: Source, check: bool | None, progress: Progress
) -> CompressReport:
    """Return the report with the measured loss increase if the check is wanted and possible."""
    if not is_checked(check, plan.request, report.expert_weights + report.dense_weights):
        return report
    if not source.has_original:
        return replace(report, notes=(*report.notes, KEPT_OUT))
    progress.prepare("measuring the loss of the packed model")
    return checked(report, source.directory(), plan)


def _packed(
    checkpoint: Checkpoint,
    described: MoeModel,
    assignment: Assignment,
    plan: MethodPlan | None,
    target: Path,
    ray: str | None,
    resume: bool,
    progress: Progress,
    peak: PeakMemory,
    started: float,
    recipe: Callable[..., Recipe] | None,
) -> tuple[CompressReport, MethodPlan]:
    """Plan and run the job of a checkpoint that passed all checks; also return the plan of the main method."""
    state = target.with_name(target.name + STATE)
    with _executor(ray, checkpoint, assignment) as executor:
        checkpoint, described, planned, keep = _planned(
            checkpoint, described, assignment, plan, state, resume, progress
        )
        with _unneeded_state_removed(state, target.with_name(target.name + PARTIAL)):
            job = Job(checkpoint, described, planned, progress, peak, keep, executor, recipe)
            return job.run(target, resume, started), planned.plan


@contextmanager
def _unneeded_state_removed(state: Path, partial: Path) -> Iterator[None]:
    """On exit, remove the state kept for resumed runs if no partial directory is left to resume."""
    try:
        yield
    finally:
        if os.path.lexists(state) and not os.path.lexists(partial):
            files.remove(state)


def _executor(ray: str | None, checkpoint: Checkpoint, assignment: Assignment) -> Executor:
    """Return the executor that packs the tensors."""
    if ray is None:
        return Here()
    from moepack.pipeline.distributed import RayExecutor

    return RayExecutor(ray, checkpoint, assignment)


def _chosen(method: str | Method | MethodPlan, settings: Mapping[str, Any]) -> tuple[Method, MethodPlan | None]:
    """Create a method from its name and settings, or return the given one, which has its own settings, and its plan."""
    if isinstance(method, str):
        return create(method, **settings), None
    if settings:
        raise ValueError(f'{", ".join(settings)}: pass settings only with method="name"')
    return (method.method, method) if isinstance(method, MethodPlan) else (method, None)


def _sound(
    source: Source, target: Path, assignment: Assignment, mtp_bits: int | None, plan: MethodPlan | None
) -> tuple[Checkpoint, MoeModel, Assignment]:
    """Check a checkpoint before the work starts, and start its download.

    Returns:
        The checkpoint, its description, and the assignment.
    """
    checkpoint = source.checkpoint
    assignment, described = assignment.with_overrides(checkpoint, describe(checkpoint))
    assignment = assignment.with_beyond(described, mtp_bits)
    if plan is not None and plan.source.partition("+")[0] != checkpoint.fingerprint().partition("+")[0]:
        raise ValueError(f"the plan was made for another checkpoint than {checkpoint.path}")
    assignment.method.check(checkpoint, described)
    goal_of(assignment.method, checkpoint, described)  # before all weights are read
    try_creating(target)  # before all weights are read
    notes = _downloading(source, target, described, assignment)
    copied = check_source(checkpoint, described, assignment)
    if any(method.looks_ahead for method in assignment.methods):
        checkpoint.expect([sources_of(layer) for layer in assignment.layers(described)])
    warn_all(halves := tuple(overflow_notes(copied, {})))
    return checkpoint, replace(described, notes=(*described.notes, *notes, *halves)), assignment


def _downloading(source: Source, target: Path, model: MoeModel, assignment: Assignment) -> tuple[str, ...]:
    """Prepare to download the shards of a model on the hub; return notes about the disk space."""
    if source.remote is None:
        return ()
    check_names(source.checkpoint, model, assignment)  # before anything is downloaded
    outputs = plan_outputs(source.checkpoint, model, assignment)
    goal = goal_of(assignment.method, source.checkpoint, model)
    packed = space_bound(outputs, source.checkpoint, (), None if goal is None else goal.nbytes)
    free = shutil.disk_usage(next(above for above in target.parents if above.exists())).free
    layers, looks_ahead = assignment.layers(model), any(method.looks_ahead for method in assignment.methods)
    streaming = source.streaming(layers, looks_ahead, free - packed)
    source.begin(streaming)
    return (streaming.note,) if streaming is not None and streaming.note else ()


def _planned(
    checkpoint: Checkpoint,
    model: MoeModel,
    assignment: Assignment,
    plan: MethodPlan | None,
    state: Path,
    resume: bool,
    progress: Progress,
) -> tuple[Checkpoint, MoeModel, PlannedAssignment, Callable[[], None]]:
    """Let methods change the checkpoint and plan.

    A plan that is given holds if it was made for the changed checkpoint.

    Returns:
        The checkpoint to pack, its description, the plans, and a function that saves the change for a resumed run.
    """
    if plan is None and any(method.looks_ahead for method in assignment.methods):
        progress.prepare(f"{assignment.method.name} reads the whole model first")
    checkpoint, model = assignment.balanced(checkpoint, model)
    with naming_files(checkpoint):
        changed, keep = rewritten(checkpoint, model, assignment.method, state, resume)
    if changed is not checkpoint:
        checkpoint, model = changed, assignment.described(changed, model.notes)
    known = plan if plan is not None and plan.source == checkpoint.fingerprint() else None
    with naming_files(checkpoint):
        return checkpoint, model, assignment.planned(checkpoint, model, progress, known), keep


@contextmanager
def naming_files(checkpoint: Checkpoint) -> Iterator[None]:
    """Add the file name to errors about a weight; methods know tensors but not files."""
    try:
        yield
    except InvalidTensorError as error:
        known = error.tensor in checkpoint
        file = checkpoint.info(error.tensor).file if error.tensor and known else checkpoint.path
        raise InvalidTensorError(error.detail, file=file, tensor=error.tensor) from error


class Job:
    """One compression, from an open checkpoint and its plans to a published directory."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: MoeModel,
        assignment: PlannedAssignment,
        progress: Progress,
        peak: PeakMemory,
        keep_state: Callable[[], None] = lambda: None,
        executor: Executor | None = None,
        recipe: Callable[..., Recipe] | None = None,
    ) -> None:
        """Plan the job; raises as `plan_outputs` and `LayerPacker`.

        Args:
            checkpoint: the checkpoint to pack.
            model: its description.
            assignment: the plan of each tensor.
            progress: receives progress.
            peak: tracks peak memory.
            keep_state: saves the methods' state for a resumed run; called once this job owns the directory.
            executor: where tensors are packed; None packs them in this process.
            recipe: makes the recipe from the plan and the fingerprint of the calibration set; None writes none.
        """
        self._keep_state, self._recipe = keep_state, recipe
        self.checkpoint, self.model, self.assignment = checkpoint, model, assignment
        self.method = assignment.plan.method
        self.progress, self.peak = progress, peak
        self.outputs: Outputs = plan_outputs(checkpoint, model, assignment)
        self.packer = LayerPacker(checkpoint, model, assignment, self._advance, executor)
        self.settings = assignment.settings
        if self.packer.samples is not None:
            self.settings["calibration_sha256"] = self.packer.samples.fingerprint()
        self._digests = Digests(checkpoint, self.outputs, assignment)

    def run(self, target: Path, resume: bool, started: float) -> CompressReport:
        """Do the missing work, publish the directory and return the report."""
        partial = target.with_name(target.name + PARTIAL)
        stamps = self.checkpoint.stamps()
        workspace = Workspace.open(partial, self._fingerprint(), resume, self._digests.of, stamps)
        try:
            self._keep_state()
            before = self._done_weights(workspace)
            if not workspace.complete:
                self._write(workspace)
            manifest = read_manifest(workspace.path)
            if os.path.lexists(target):
                raise OutputExistsError("was created by another process in the meantime", file=target)
            workspace.publish(target)
        except MoepackError as error:
            self._keep_or_discard(workspace, error)
            raise
        finally:
            workspace.close()
        return self._report(target, manifest, before, time.perf_counter() - started)

    def _keep_or_discard(self, workspace: Workspace, error: MoepackError) -> None:
        """Prepare a failed job's directory for the next run."""
        if isinstance(error, Altered) or not (workspace.done or workspace.complete or isinstance(error, DiskError)):
            # An empty working directory would only block the same job with other settings.
            workspace.discard()
        elif workspace.done and isinstance(error, InvalidTensorError | CalibrationError):
            # The checkpoint is at fault; its fingerprint will change when it is repaired.
            if not self.checkpoint.files.is_local:
                return  # the digests would need all its weights again
            with suppress(MoepackError):
                workspace.note(self._digests.of(workspace.done))

    def _fingerprint(self) -> dict[str, str]:
        """Return the values that must be equal for two runs to be the same job."""
        settings = ", ".join(f"{key}={value}" for key, value in sorted(self.settings.items()))
        return {
            "model": self.checkpoint.fingerprint(),
            "method": self.method.name,
            "settings": settings,
            "format": str(VERSION),
            "moepack": _core.__version__,
        }

    def _done_weights(self, workspace: Workspace) -> int:
        return sum(
            _weights(shard) for shard in self.outputs.shards if workspace.complete or shard.file in workspace.done
        )

    def _write(self, workspace: Workspace) -> None:
        need = space_bound(self.outputs, self.checkpoint, workspace.done, self.assignment.goal)
        workspace.reserve(need + self.checkpoint.files.needs)
        self.packer.keep_states_in(workspace.path)
        self.progress.start(sum(map(_weights, self.outputs.shards)), self._done_weights(workspace))
        try:
            with ShardWriter(workspace) as writer:
                self._write_layers(workspace, writer)
                self.checkpoint.files.clear()
                for shard in self.outputs.shards:
                    if shard.layer is None and shard.file not in workspace.done:
                        self.progress.stage("dense tensors")
                        path = workspace.path / shard.file
                        writer.begin(partial(_write_dense, path, self.checkpoint, shard.names))
            self.progress.stage("manifest")
            self._write_small_files(workspace)
        finally:
            self.progress.finish()

    def _write_layers(self, workspace: Workspace, writer: ShardWriter) -> None:
        """Pack the missing layers. The model also runs through the layers that an interrupted run finished."""
        shards = [(shard, shard.layer) for shard in self.outputs.shards if shard.layer is not None]
        missing = [number for number, (shard, _) in enumerate(shards) if shard.file not in workspace.done]
        self.packer.expect([shards[number][1] for number in missing])
        read = range(len(shards)) if self.packer.samples is not None and missing else missing
        if self.packer.executor.reads_here:
            self.checkpoint.expect([sources_of(shards[number][1]) for number in read])
        else:
            self.checkpoint.files.clear()
        with closing(self.packer.runs()) as runs:
            for shard, layer in shards[: max(missing, default=-1) + 1]:
                record = workspace.done.get(shard.file)
                if record is None or self.packer.samples is not None:
                    self.progress.stage(layer.name if record is None else f"{layer.name} (done before)")
                with naming_files(self.checkpoint):
                    run = next(runs)
                    if record is None:
                        packed = self.packer.pack(layer, run, {})
                        beyond = layer in self.model.beyond
                        writer.begin(partial(_write_layer, workspace.path / shard.file, layer, packed, beyond))
                        self._advance(0)
                    else:
                        packed = _read_layer(workspace.path / record.name, layer, record)
                        if run is not None:
                            self.packer.pack(layer, run, packed)
                    self.packer.record_sizes(layer, packed)

    def _advance(self, weights: int) -> None:
        self.progress.advance(weights, self.peak.sample())
        self.checkpoint.files.report()

    def _write_small_files(self, workspace: Workspace) -> None:
        """Write copies, config, index and manifest. This is cheap, so a resumed job rewrites all of them."""
        tensors = {name: record for shard in workspace.done.values() for name, record in shard.tensors.items()}
        method = self.method.name
        quantization = quantization_config(method, self.settings, tensors)
        content = {CONFIG: config_bytes(self.checkpoint.config, quantization), INDEX: index_bytes(tensors)}
        content |= self.assignment.plan.files
        if isinstance(self.checkpoint, BalancedCheckpoint):
            in_order = not isinstance(self.method, Rearranges)
            content[BALANCE] = serialized(self.checkpoint.form.record(self.model, channels=in_order))
        files = {name: shard.file for name, shard in workspace.done.items()}
        for name, data in [*_read_copies(self.checkpoint.path, self.outputs), *content.items()]:
            write_inside(workspace.path, name, data)
            files[name] = FileRecord.of(data)
        manifest = Manifest(method, self.settings, self.model.architecture, self._fingerprint(), tensors, files)
        kept = [*files]
        if self._recipe is not None:
            text = str(self.settings.get("calibration_sha256", ""))
            write_file(workspace.path / RECIPE, self._recipe(self.assignment.plan, calibration_sha256=text).to_bytes())
            kept.append(RECIPE)
        workspace.sweep(kept)
        write_file(workspace.path / MANIFEST, manifest.to_bytes())

    def _notes(self, manifest: Manifest) -> tuple[str, ...]:
        records = manifest.packed().values()
        seen = {record.module: record.details for record in records if "tokens" in record.details}
        layers = {layer.name: seen[layer.name] for layer in self.model.layers if layer.name in seen}
        notes = (note for plan in self.assignment.plans for note in (*plan.notes, *plan.packer.notes(layers)))
        return (*dict.fromkeys(notes), *_rounded_notes(records), *self._overflow_notes(manifest))

    def _overflow_notes(self, manifest: Manifest) -> tuple[str, ...]:
        """Warn about weights and activations near the float16 limit of the source; return the notes."""
        sizes = {name: record.details.get(LARGEST) for name, record in manifest.packed().items()}
        weights = {name: float(size) for name, size in sizes.items() if size is not None}
        activations = self.packer.activations if is_half(self.checkpoint) else {}
        notes = tuple(overflow_notes(weights, activations))
        warn_all(notes)
        return notes

    def _report(self, target: Path, manifest: Manifest, before: int, seconds: float) -> CompressReport:
        totals = Totals.of(manifest)
        source = self.checkpoint.stored + sum(manifest.files[name].size for name in self.outputs.copies)
        return CompressReport(
            path=target,
            method=self.method.name,
            source_bytes=source,
            packed_bytes=directory_bytes(manifest) + ((target / RECIPE).stat().st_size if self._recipe else 0),
            expert_source_bytes=totals.experts.source_bytes,
            expert_bytes=totals.experts.packed_bytes,
            expert_weights=totals.experts.weights,
            bits_per_weight=totals.experts.bits_per_weight,
            dense_source_bytes=totals.dense.source_bytes,
            dense_bytes=totals.dense.packed_bytes,
            dense_weights=totals.dense.weights,
            seconds=seconds,
            weights_per_second=(sum(map(_weights, self.outputs.shards)) - before) / seconds,
            peak_memory=self.peak.sample(),
            resumed_weights=before,
            skipped=self.outputs.skipped,
            notes=self.model.notes + self._notes(manifest),
        )


def _weights(shard: Shard) -> int:
    """Return the number of weights that a shard compresses."""
    return 0 if shard.layer is None else sum(math.prod(each.shape) for each in layer_tensors(shard.layer).values())


def _read_layer(file: Path, layer: PackedLayer, record: ShardRecord) -> dict[str, PackedBytes]:
    """Memory-map the packed tensors of a finished layer."""
    mapped, records = map_tensors(file, read_header(file), list(record.tensors)), record.tensors
    names = {name: weights.name for name, weights in layer_tensors(layer).items()}
    return {key: PackedBytes(records[name].kind, mapped[name], records[name].details) for key, name in names.items()}


def _packed_entry(name: str, tensor: PackedBytes) -> Entry:
    return Entry(name, "U8", (tensor.data.nbytes,), lambda: _view(tensor.data), packed=True)


def _view(data: Any) -> memoryview:
    return memoryview(data)


def _write_layer(path: Path, layer: PackedLayer, packed: Mapping[str, PackedBytes], beyond: bool) -> ShardRecord:
    """Write the packed tensors of a layer; `beyond` marks a layer that transformers' model does not have."""
    tensors = {name: (weights, packed[name]) for name, weights in layer_tensors(layer).items()}
    entries = [_packed_entry(weights.name, tensor) for weights, tensor in tensors.values()]
    written, records, more = write_shard(path, entries, _METADATA), {}, {BEYOND: True} if beyond else {}
    for name, (weights, tensor) in tensors.items():
        place = (layer.name, name) if weights.ndim == 3 else (name, WEIGHT)
        records[weights.name] = TensorRecord(
            path.name, tensor.kind, "U8", weights.shape[-weights.ndim :], tensor.data.nbytes,
            written.crc32[weights.name], *place, weights.nbytes, {**tensor.details, **more},
        )  # fmt: skip
    return ShardRecord(path.name, FileRecord(written.size, written.sha256), records)


def _write_dense(path: Path, checkpoint: Checkpoint, names: tuple[str, ...]) -> ShardRecord:
    """Copy tensors byte for byte from their mapped pages, without anonymous memory."""
    entries, records = [], {}
    for name in names:
        info = checkpoint.info(name)
        entries.append(Entry(name, DTYPE_NAMES[info.dtype], info.shape, _raw(checkpoint, name)))
    written = write_shard(path, entries, _METADATA)
    for entry in entries:
        crc32 = written.crc32[entry.name]
        records[entry.name] = TensorRecord(path.name, DENSE, entry.dtype, entry.shape, entry.nbytes, crc32)
    return ShardRecord(path.name, FileRecord(written.size, written.sha256), records)


def _raw(checkpoint: Checkpoint, name: str) -> Callable[[], memoryview]:
    def read() -> memoryview:
        data = checkpoint.raw(name)
        checkpoint.release([name])  # the mapping stays valid until it is written
        return _view(data)

    return read


def _read_copies(source: Path, outputs: Outputs) -> Iterator[tuple[str, bytes]]:
    for name in outputs.copies:
        try:
            yield name, (source / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", file=source / name) from error


def _rounded_notes(records: Iterable[TensorRecord]) -> Iterator[str]:
    """Yield one sentence for each reason why linear layers were rounded without calibration."""
    layers: dict[str, list[str]] = {}
    for record in records:
        if record.projection == WEIGHT and (reason := record.details.get("rounded")):
            layers.setdefault(reason, []).append(record.module)
    for reason, names in layers.items():
        more = f" and {len(names) - 1} more linear layers" if len(names) > 1 else ""
        yield f"{min(names)}{more} rounded to nearest: {reason}."

"""`tune`: fine-tunes centroids, scales and norm gains against the original model; codes do not change."""

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from moepack import _core
from moepack.calibration.load import load_samples
from moepack.checkpoint.quantized import open_checkpoint
from moepack.checkpoint.resolve import resolve_model
from moepack.errors import CorruptionError, MoepackWarning, UnsupportedModelError
from moepack.format.atomic import refuse_existing, write_file, write_inside
from moepack.format.directory import PackedDirectory, check_size
from moepack.format.header import read_header
from moepack.format.hub import CONFIG, INDEX, config_bytes, index_bytes, quantization_config
from moepack.format.manifest import MANIFEST, FileRecord, TensorRecord
from moepack.format.shard import DTYPE_NAMES, Entry, write_shard
from moepack.format.side import is_editable
from moepack.integrations.loading import load, open_model
from moepack.mapping import map_file
from moepack.memory import PeakMemory
from moepack.pipeline.journal import PARTIAL, Workspace
from moepack.pipeline.report import directory_bytes
from moepack.progress import Progress, Silent
from moepack.textfile import BUILT_IN
from moepack.tuning import Tuned, TuneSettings, tune_model
from moepack.tuning.tensors import KINDS

__all__ = ["tune"]


def tune(
    packed: str | PathLike[str],
    original: str | PathLike[str],
    out: str | PathLike[str],
    *,
    calibration: str = BUILT_IN,
    samples: int = 128,
    sequence_length: int = 512,
    settings: TuneSettings | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Tuned:
    """Fine-tune a packed directory of codebooks or coded integers into a new directory.

    Codebooks keep their size. Rows of coded tensors that share a scale each get their own 2-byte scale if they are long
    (`moepack.tuning.tensors.LONG`).

    Args:
        packed: a directory packed by the method `codequant`, `rate` or `auto`.
        original: the original checkpoint, a directory or a hub id.
        out: directory to create; it must not exist.
        calibration: text file, JSON lines, directory, hub data set, "built-in" or "self".
        samples, sequence_length: maximum number of windows, and tokens per window.
        settings: see `TuneSettings`.
        device: where both models run, in float32, with gradients.
        progress: receives progress in tokens; None shows nothing.

    Raises:
        UnsupportedModelError: the directory has tensors of another kind, or experts without a gate.
        CalibrationError: the text is unusable, or the loss is not finite.
        OutputExistsError, DiskError, LoadError, CorruptionError: as for `compress` and `load`. After any exception,
            including KeyboardInterrupt, nothing is left behind: a run cannot be resumed.
        ResumeError: `out`.partial is unfinished work of `compress`.
    """
    target, settings = Path(os.path.abspath(out)), settings or TuneSettings()
    refuse_existing(target)
    original = resolve_model(original)
    source = _tunable(Path(packed))
    checkpoint = open_checkpoint(original)
    # The part after "+" describes a change of the checkpoint before packing.
    if source.manifest.fingerprint.get("model", "").split("+")[0] != checkpoint.fingerprint():
        message = f"{original} differs from the checkpoint that {packed} was packed from"
        warnings.warn(f"{message}; it is used as the reference all the same", MoepackWarning, stacklevel=2)
    windows = load_samples(checkpoint, calibration, samples, sequence_length)
    # Fail before the work starts if the location is not writable.
    with Workspace.fresh(target.with_name(target.name + PARTIAL), "tune") as workspace:
        workspace.reserve(_space(source))
        tuned = _tuned(source, original, windows.inputs, settings, torch.device(device), progress or Silent())
        _write(source, workspace, tuned, {**asdict(settings), "calibration_sha256": windows.fingerprint()})
        workspace.publish(target)
    return tuned


def _tunable(packed: Path) -> PackedDirectory:
    """Open the directory; check that its tensors can be fine-tuned and its files are complete."""
    source = PackedDirectory.open(packed)
    if others := {record.kind for record in source.manifest.packed().values()} - {*KINDS}:
        message = f"only {' and '.join(KINDS)} tensors can be fine-tuned, not {min(others)}"
        raise UnsupportedModelError(message, file=packed)
    for file, record in source.manifest.files.items():
        if not is_editable(file):
            check_size(source.path / file, record.size)
    return source


def _space(source: PackedDirectory) -> int:
    """Return the maximum output size in bytes: coded tensors gain a scale per row, config and manifest the settings."""
    coded = (record for record in source.manifest.packed().values() if record.kind == "coded")
    return directory_bytes(source.manifest) + sum(2 * math.prod(record.shape[:-1]) for record in coded) + (1 << 20)


def _gains(source: PackedDirectory) -> dict[str, torch.dtype]:
    """Return the dtypes of unpacked vectors; those that are norm gains may be tuned."""
    found: dict[str, torch.dtype] = {}
    for file in source.manifest.files:
        names = [name for name, record in source.manifest.tensors.items() if record.file == file and not record.packed]
        infos = read_header(source.path / file, CorruptionError).tensors if names else {}
        found |= {name: infos[name].dtype for name in names if len(infos[name].shape) == 1}
    return found


def _tuned(
    source: PackedDirectory,
    original: str | PathLike[str],
    samples: torch.Tensor,
    settings: TuneSettings,
    device: torch.device,
    progress: Progress,
) -> Tuned:
    """Load both models and fine-tune the packed one."""
    peak, tokens = PeakMemory(), settings.batch * samples.shape[1]
    progress.start(settings.steps * tokens, 0, "tokens")
    try:
        progress.stage("loading both models")
        models = load(source.path, torch.float32), open_model(original, torch.float32)
        progress.stage("fine-tuning")
        return tune_model(
            *models, samples, settings, device,
            lambda steps: progress.advance(steps * tokens, peak.sample()), _gains(source),
        )  # fmt: skip
    finally:
        progress.finish()


def _write(source: PackedDirectory, workspace: Workspace, tuned: Tuned, settings: Mapping[str, Any]) -> None:
    """Copy the directory and replace the tuned tensors."""
    manifest = source.manifest
    tensors, files = dict(manifest.tensors), dict(manifest.files)
    for file in manifest.files:
        names = [name for name, record in manifest.tensors.items() if record.file == file]
        if names:
            entries, records = _shard(source, file, names, tuned)
            written = write_shard(workspace.path / file, entries, {"format": "pt"})
            files[file] = FileRecord(written.size, written.sha256)
            tensors |= {name: replace(records[name], crc32=written.crc32[name]) for name in names}
        elif is_editable(file) and not (source.path / file).is_file():
            del files[file]
        elif file not in (CONFIG, INDEX):
            data = (source.path / file).read_bytes()
            write_inside(workspace.path, file, data)
            if is_editable(file):  # it may have changed since; a change of any other file is damage that verify finds
                files[file] = FileRecord.of(data)
    tuning = {**settings, "before": list(tuned.before), "after": list(tuned.after)}
    _write_manifest(workspace, source, tensors, files, {**manifest.settings, "tuning": tuning})


def _shard(
    source: PackedDirectory, file: str, names: Sequence[str], tuned: Tuned
) -> tuple[list[Entry], dict[str, TensorRecord]]:
    """Return the entries of a file in order, with tuned tensors replaced, and their records without checksums."""
    header, mapped = read_header(source.path / file, CorruptionError), map_file(source.path / file)
    entries, records = [], {}
    for name in names:
        info, record = header.tensors[name], source.manifest.tensors[name]
        data: Any = mapped[info.offset : info.offset + info.nbytes]
        shape = info.shape
        projection = "packed" if record.projection == "weight" else record.projection
        if record.packed and (tensor := tuned.tensors.get(f"{record.module}/{projection}")) is not None:
            data = tensor.blob().numpy()
            found = _core.PackedTensor(data).details()
            details = {name: found.get(name, value) for name, value in record.details.items()}
            shape, record = data.shape, replace(record, nbytes=data.nbytes, details=details)
        elif (gain := tuned.gains.get(name)) is not None:
            data = gain.view(torch.uint8).numpy()
        entries.append(Entry(name, DTYPE_NAMES[info.dtype], shape, partial(_flat, data), packed=record.packed))
        records[name] = record
    return entries, records


def _flat(data: Any) -> memoryview:
    return memoryview(data)


def _write_manifest(
    workspace: Workspace,
    source: PackedDirectory,
    tensors: Mapping[str, TensorRecord],
    files: Mapping[str, FileRecord],
    settings: Mapping[str, Any],
) -> None:
    """Write the files that hold settings and sizes: configuration, index and manifest."""
    manifest = source.manifest
    texts = {CONFIG: config_bytes(source.config, quantization_config(manifest.method, settings, tensors))}
    if INDEX in files:
        texts[INDEX] = index_bytes(tensors)
    for file, text in texts.items():
        write_file(workspace.path / file, text)
    described = {file: FileRecord.of(text) for file, text in texts.items()}
    made = replace(manifest, settings=settings, tensors=tensors, files={**files, **described})
    write_file(workspace.path / MANIFEST, made.to_bytes())

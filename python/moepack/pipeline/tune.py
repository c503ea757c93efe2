"""`tune`: fine-tunes the centroids of a packed directory against the model it was made of; codes and sizes stay."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from moepack.calibration.load import load_samples
from moepack.checkpoint.quantized import open_checkpoint
from moepack.checkpoint.resolve import resolve_model
from moepack.errors import CorruptionError, MoepackWarning, UnsupportedModelError
from moepack.format.atomic import refuse_existing, write_file
from moepack.format.directory import PackedDirectory, check_size
from moepack.format.header import read_header
from moepack.format.hub import CONFIG, config_bytes, quantization_config
from moepack.format.manifest import MANIFEST, FileRecord, TensorRecord
from moepack.format.shard import DTYPE_NAMES, Entry, write_shard
from moepack.integrations.loading import load, open_model
from moepack.mapping import map_file
from moepack.memory import PeakMemory
from moepack.methods.codequant.tuning import Books, Tuned, TuneSettings, tune_model
from moepack.pipeline.job import PARTIAL
from moepack.pipeline.journal import Workspace
from moepack.pipeline.report import directory_bytes
from moepack.progress import Progress, Silent

__all__ = ["tune"]


def tune(
    packed: str | PathLike[str],
    original: str | PathLike[str],
    out: str | PathLike[str],
    *,
    calibration: str,
    samples: int = 128,
    sequence_length: int = 512,
    settings: TuneSettings | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Tuned:
    """Fine-tune a packed directory of codebooks into a new one of the same size.

    Args:
        packed: what `moepack compress --method codequant` wrote.
        original: the checkpoint that it was made of, a directory or an id of the hub.
        out: directory to be made; it must not exist.
        calibration: text file, JSON lines, directory or data set of the hub.
        samples, sequence_length: windows, at most, and tokens of each.
        settings: see `TuneSettings`.
        device: where both models run, in float32, with gradients.
        progress: where progress is shown, in tokens; None shows nothing.

    Raises:
        UnsupportedModelError: the directory holds something but codebooks, or experts without a gate.
        CalibrationError: the text is unusable, or the loss is not finite.
        OutputExistsError, DiskError, LoadError, CorruptionError: as for `compress` and `load`. Whatever is raised,
            KeyboardInterrupt too, nothing is left behind: a run cannot be resumed.
        ResumeError: `out`.partial is the unfinished work of `compress`.
    """
    target, settings = Path(os.path.abspath(out)), settings or TuneSettings()
    refuse_existing(target)
    original = resolve_model(original)
    source = PackedDirectory.open(Path(packed))
    if others := {record.kind for record in source.manifest.packed().values()} - {"codebook"}:
        raise UnsupportedModelError(f"only codebooks can be fine-tuned, not {min(others)}", file=packed)
    for file, record in source.manifest.files.items():
        check_size(source.path / file, record.size)
    checkpoint = open_checkpoint(original)
    # Behind a plus follows what the checkpoint was changed by before it was packed.
    if source.manifest.fingerprint.get("model", "").split("+")[0] != checkpoint.fingerprint():
        message = f"{original}: is not what {packed} was made of, or was changed since"
        warnings.warn(message, MoepackWarning, stacklevel=2)
    windows = load_samples(checkpoint, calibration, samples, sequence_length)
    # Before the work: a place that cannot be written to is to be known at once.
    workspace = Workspace.fresh(target.with_name(target.name + PARTIAL), "tune")
    try:
        workspace.reserve(_space(source))
        tuned = _tuned(packed, original, windows.inputs, settings, torch.device(device), progress or Silent())
        _write(source, workspace, tuned, {**asdict(settings), "calibration_sha256": windows.fingerprint()})
        workspace.publish(target)
    except BaseException:
        workspace.discard()
        raise
    finally:
        workspace.close()
    return tuned


def _space(source: PackedDirectory) -> int:
    """The most bytes of what will be written: tensors keep their sizes, config and manifest gain the settings."""
    return directory_bytes(source.manifest) + (1 << 20)


def _tuned(
    packed: str | PathLike[str],
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
        models = load(packed, torch.float32), open_model(original, torch.float32)
        progress.stage("fine-tuning")
        return tune_model(
            *models, samples, settings, device, lambda steps: progress.advance(steps * tokens, peak.sample())
        )
    finally:
        progress.finish()


def _write(source: PackedDirectory, workspace: Workspace, tuned: Tuned, settings: Mapping[str, Any]) -> None:
    """Copy the directory with the tuned tensors in the places of the old ones."""
    manifest = source.manifest
    tensors, files = dict(manifest.tensors), dict(manifest.files)
    for file in manifest.files:
        names = [name for name, record in manifest.tensors.items() if record.file == file]
        if file == CONFIG:
            continue
        if not names:
            write_file(workspace.path / file, (source.path / file).read_bytes())
            continue
        header = read_header(source.path / file, CorruptionError)
        mapped = map_file(source.path / file)
        entries = []
        for name in names:
            info, record = header.tensors[name], manifest.tensors[name]
            data = mapped[info.offset : info.offset + info.nbytes]
            entries.append(_entry(name, DTYPE_NAMES[info.dtype], info.shape, record, data, tuned.books))
        written = write_shard(workspace.path / file, entries, {"format": "pt"})
        files[file] = FileRecord(written.size, written.sha256)
        tensors |= {name: replace(tensors[name], crc32=written.crc32[name]) for name in names}
    tuning = {**settings, "before": list(tuned.before), "after": list(tuned.after)}
    _write_manifest(workspace, source, tensors, files, {**manifest.settings, "tuning": tuning})


def _write_manifest(
    workspace: Workspace,
    source: PackedDirectory,
    tensors: Mapping[str, TensorRecord],
    files: Mapping[str, FileRecord],
    settings: Mapping[str, Any],
) -> None:
    """Write what names the settings: the configuration and the manifest."""
    manifest = source.manifest
    config = config_bytes(source.config, quantization_config(manifest.method, settings, tensors))
    write_file(workspace.path / CONFIG, config)
    made = replace(manifest, settings=settings, tensors=tensors, files={**files, CONFIG: FileRecord.of(config)})
    write_file(workspace.path / MANIFEST, made.to_bytes())


def _entry(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    record: TensorRecord,
    data: Any,
    books: Mapping[str, Books],
) -> Entry:
    if not record.packed:
        return Entry(name, dtype, shape, lambda: memoryview(data))
    projection = "packed" if record.projection == "weight" else record.projection
    book = books[f"{record.module}/{projection}"]
    blob: Any = book.blob().numpy()
    return Entry(name, dtype, shape, lambda: memoryview(blob), packed=True)

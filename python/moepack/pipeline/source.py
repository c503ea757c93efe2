"""The checkpoint that a job reads: a directory, or a model on the Hub that is packed while it is downloaded.

Shards of a model on the Hub, or parts of large ones, are kept in `OUT.source` while they are needed. Methods that read
all weights before they pack the first layer would download the model once for each pass. Their shards therefore stay
until the job is done, if the disk has room for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from moepack.calibration.stage import PackedLayer, layer_tensors
from moepack.checkpoint import Checkpoint
from moepack.checkpoint.hub_model import hub_model
from moepack.checkpoint.quantized import open_checkpoint
from moepack.checkpoint.remote import Altered, RemoteFiles, open_remote
from moepack.checkpoint.remote.files import AT_ONCE
from moepack.checkpoint.resolve import configured, resolve_model
from moepack.errors import DiskError, DownloadError
from moepack.format.header import TensorInfo
from moepack.methods import Method
from moepack.pipeline.journal import PARTIAL
from moepack.pipeline.pruning import Pruning, pruned
from moepack.progress import Progress
from moepack.units import byte_count, size

__all__ = ["SOURCE", "Source", "Streaming", "opened", "sources_of"]

SOURCE = ".source"
"""Suffix of the folder of downloaded shards."""

KEPT_OUT = "The loss was not measured, because the original is not kept; --keep-source keeps it in the Hub's cache."


@dataclass(frozen=True)
class Streaming:
    """How a model is downloaded.

    Attributes:
        download: bytes of its shards that are not on this machine.
        shards: their number.
        budget: maximum bytes of shards on disk at a time; None keeps all in the Hub's cache.
        whole: whether all shards stay until the job is done, because the method reads them several times.
        repeated: whether they would have to stay, but the budget is smaller.
    """

    download: int
    shards: int
    budget: int | None
    whole: bool
    repeated: bool

    @property
    def disk(self) -> int:
        """The maximum number of bytes on disk."""
        return self.download if self.budget is None else min(self.budget, self.download)

    @property
    def note(self) -> str:
        """The cost of a small budget, as a sentence; empty if there is none."""
        if not self.repeated:
            return ""
        return (
            f"The method reads all weights several times, and {size(self.disk)} of disk cannot hold the model: it is "
            f"downloaded ({size(self.download)}) each time. A larger --disk-budget or --keep-source avoids this."
        )


class Source:
    """An open checkpoint and where it comes from.

    Attributes:
        model: the directory or the Hub id.
        checkpoint: the checkpoint.
        remote: its shards on the Hub; None for a directory.
        pruning: how experts were left out; None if all are there.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        checkpoint: Checkpoint,
        remote: RemoteFiles | None,
        keep: bool = False,
        disk_budget: str | int | None = None,
        config: Path | None = None,
    ) -> None:
        self.model, self.checkpoint, self.remote, self._keep = model, checkpoint, remote, keep
        self._config = config
        self.pruning: Pruning | None = None
        self._budget = None if disk_budget is None else byte_count(disk_budget)

    def streaming(self, layers: Sequence[PackedLayer], looks_ahead: bool, free: int) -> Streaming | None:
        """Return how the shards are downloaded; None for a directory.

        Args:
            layers: the layers to pack.
            looks_ahead: whether the method reads all weights before it packs.
            free: free disk space in bytes, without the packed directory.

        Raises:
            ValueError: the requested budget is less than a layer needs.
        """
        if self.remote is None:
            return None
        missing = self.remote.missing()
        total, largest = sum(missing), sorted(missing)[-AT_ONCE:]
        if self._keep:
            return Streaming(total, self.remote.absent, None, False, False)
        least = self.remote.least(_groups(self.checkpoint, layers))
        if self._budget is not None and self._budget < least:
            raise ValueError(
                f"a disk budget of {size(self._budget)} is too small: a layer of this model needs {size(least)} of "
                "its shards, or of parts of them, at a time"
            )
        usual = min(max(sum(largest), least + max(largest, default=0)), total)
        budget = self._budget or (total if looks_ahead and total <= free else usual)
        return Streaming(
            total, self.remote.absent, budget, looks_ahead and budget >= total, looks_ahead and budget < total
        )

    def prune(self, pruning: Pruning | None, method: Method) -> None:
        """Leave experts out, once; raises as `moepack.pipeline.pruning.pruned`."""
        if pruning is not None and self.pruning is None:
            self.checkpoint, self.pruning = pruned(self.checkpoint, pruning, method), pruning

    def begin(self, streaming: Streaming | None) -> None:
        """Prepare to download shards. Errors as for `RemoteFiles.claim`."""
        if self.remote is not None and streaming is not None:
            self.remote.claim(streaming.budget)

    def show(self, progress: Progress) -> None:
        """Report the download to a display."""
        if (remote := self.remote) is not None:

            def report() -> None:
                traffic = remote.traffic()
                if not traffic.total:
                    return
                progress.traffic(traffic.received, traffic.left, traffic.disk)

            remote.report = report

    @property
    def has_original(self) -> bool:
        """Whether the whole checkpoint is on this machine after the job."""
        return self.remote is None or self._keep

    @property
    def name(self) -> str:
        """The name of a model on the Hub without its revision; empty for a directory."""
        found = hub_model(self.model)
        return "" if found is None else found.title

    @property
    def commit(self) -> str | None:
        """The commit of a model on the Hub; None for a directory."""
        if self.remote is not None:
            return self.remote.commit
        path = self.checkpoint.path
        # The directory of a GGUF file is not always a snapshot of the Hub's cache, which the commit names.
        return path.name if hub_model(self.model) is not None and path.parent.name == "snapshots" else None

    def directory(self) -> Path:
        """Return the directory of the whole checkpoint, if `has_original`; raises as `resolve_model`."""
        return self.checkpoint.path if self.remote is None else resolve_model(configured(self.model, self._config))


@contextmanager
def opened(
    model: str | PathLike[str] | Source,
    target: Path,
    keep_source: bool = False,
    disk_budget: str | int | None = None,
    whole: bool = False,
    shared: bool = False,
    config: Path | None = None,
) -> Iterator[Source]:
    """Open a checkpoint for a job.

    On exit, downloaded shards are removed, unless the job can continue with them.

    Args:
        model: a directory or a Hub id; a source that is already open is returned and stays open.
        target: the directory to create.
        keep_source: download shards into the Hub's cache and keep them.
        disk_budget: maximum bytes of shards on disk; None means three shards, or what the method needs.
        whole: download the whole model first.
        shared: other machines read the checkpoint, too: a directory at its absolute path, a model on the Hub from their
            caches or by ranges. A model that is kept is downloaded first, into a directory.
        config: folder of config.json and tokenizer of a file of weights, as for `configured`.

    Raises:
        CheckpointError, UnsupportedModelError, ValueError: as for `open_remote`, `configured` and
            `open_checkpoint`.
    """
    if isinstance(model, Source):
        yield model
        return
    whole = whole or (shared and keep_source)
    if disk_budget is not None and (whole or hub_model(model) is None):
        raise ValueError("a disk budget applies only to a Hub model that is packed while it is downloaded")
    folder = target.with_name(target.name + SOURCE)
    found = None if whole else open_remote(model, folder, even_cached=shared, config=config)
    if found is None:
        directory = resolve_model(configured(model, config))
        checkpoint = open_checkpoint(directory.absolute() if shared else directory)
        yield Source(model, checkpoint, None, keep_source, disk_budget, config)
        return
    source, keep = Source(model, *found, keep_source, disk_budget, config), False
    try:
        yield source
    except Altered:
        raise
    except (DownloadError, DiskError, KeyboardInterrupt):
        keep = True
        raise
    except BaseException:
        keep = os.path.lexists(target.with_name(target.name + PARTIAL))
        raise
    finally:
        found[1].close(remove=not keep)


def sources_of(layer: PackedLayer) -> list[str]:
    """Return the names of the checkpoint's tensors that a layer packs."""
    return [name for weights in layer_tensors(layer).values() for name in weights.sources]


def _groups(checkpoint: Checkpoint, layers: Sequence[PackedLayer]) -> list[list[TensorInfo]]:
    return [[info for name in sources_of(layer) for info in checkpoint.stored_infos(name)] for layer in layers]

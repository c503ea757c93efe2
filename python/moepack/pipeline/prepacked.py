"""Finds a packed version of a model on the Hub, and downloads it instead of packing the model again.

Versions are found by their model cards, which name the original as `base_model` and moepack as the library
(`moepack.report`). A card is a claim of its author; the caller shows whose version it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from moepack.checkpoint.hub_model import hub_id
from moepack.checkpoint.remote.transfer import Listing, list_model
from moepack.checkpoint.resolve import hub_failures, hub_reason
from moepack.errors import CorruptionError, DownloadError
from moepack.format import verify
from moepack.format.atomic import disk_errors, refuse_existing
from moepack.format.manifest import MANIFEST
from moepack.system import files

__all__ = ["DOWNLOAD", "Prepacked", "fetch_packed", "find_packed"]

DOWNLOAD = ".download"
"""Suffix of the folder into which a packed version is downloaded."""

MOST = 20
"""Maximum number of versions that are compared."""


@dataclass(frozen=True)
class Prepacked:
    """A packed version of a model: its files on the Hub, and the bytes of its weight files."""

    listing: Listing
    nbytes: int


def find_packed(model: str | PathLike[str], most: int | None) -> Prepacked | None:
    """Return a packed version of a Hub model; None if there is none, or `model` is a directory.

    Args:
        model: as for `resolve_model`; its revision is ignored, because cards do not name one.
        most: maximum bytes of the weight files; the largest version within it is returned. None returns the version
            with the most downloads.

    Raises:
        DownloadError: the Hub cannot be reached.
    """
    import huggingface_hub

    found = hub_id(model)
    if found is None:
        return None
    tags = ["moepack", f"base_model:quantized:{found[0]}"]
    try:
        names = [each.id for each in huggingface_hub.HfApi().list_models(filter=tags, sort="downloads", limit=MOST)]
    except hub_failures() as error:
        raise DownloadError(f"packed versions cannot be searched: {hub_reason(error)}", file=found[0]) from error
    versions = [version for name in names if (version := _version(name)) is not None]
    if most is None:
        return versions[0] if versions else None
    return max((each for each in versions if each.nbytes <= most), key=lambda each: each.nbytes, default=None)


def _version(name: str) -> Prepacked | None:
    """Return a version with its size; None if it is not a packed directory or cannot be listed."""
    try:
        listing = list_model(name, None)
    except DownloadError:
        return None
    if MANIFEST not in listing.files:
        return None
    return Prepacked(listing, sum(file.size for name, file in listing.files.items() if name.endswith(".safetensors")))


def fetch_packed(version: Prepacked, out: str | PathLike[str]) -> Path:
    """Download a packed version and verify every bit of it. An interrupted download continues with the same call.

    Raises:
        DownloadError: the download fails.
        CorruptionError: the files contradict their manifest.
        OutputExistsError, DiskError: `out` exists or cannot be written.
    """
    import huggingface_hub

    target = Path(out).absolute()
    refuse_existing(target)
    folder, listing = target.with_name(target.name + DOWNLOAD), version.listing
    try:
        huggingface_hub.snapshot_download(listing.model, revision=listing.commit, local_dir=folder)
    except hub_failures() as error:
        raise DownloadError(f"cannot be downloaded: {hub_reason(error)}", file=listing.model) from error
    report = verify(folder)
    if report.faults:
        files.remove_tree(folder)
        raise CorruptionError(f"the version on the Hub is damaged: {report.faults[0]}", file=listing.model)
    with disk_errors(target, "publish"):
        files.remove_tree(folder / ".cache", ignore_errors=True)
        files.rename(folder, target)
        files.sync_directory(target.parent)
    return target

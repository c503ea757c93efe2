"""Reads a model that is on the Hub without a complete copy on this machine.

`open_remote` reads configuration, index and the headers of all shards, a few megabytes in all. The result is a
`Checkpoint` whose bytes come from `RemoteFiles`. `transfer` lists files and reads ranges; `files` decides which shards
are on disk; `ranges` is what other processes read.
"""

import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path

from moepack.checkpoint.pickles import PICKLED, read_pickled
from moepack.checkpoint.quantized import adapted
from moepack.checkpoint.reader import Checkpoint, check_listed, read_config
from moepack.checkpoint.remote.files import RANGES_AT_ONCE, RemoteFiles, Traffic
from moepack.checkpoint.remote.reading import RangedFile
from moepack.checkpoint.remote.transfer import Listing, Transfer, list_model
from moepack.checkpoint.resolve import hub_id, small_files
from moepack.errors import DownloadError
from moepack.format.header import Header, header_length, parse_header
from moepack.format.weights import PICKLE, pickle_files, weight_files

__all__ = ["RemoteFiles", "Traffic", "open_remote"]

PICKLE_INDEX = f"{PICKLE}.index.json"

ENTRY = 100
"""Approximate bytes of a tensor's entry in a header, without its name."""

LEAST_HEADER = 16 << 10
"""Bytes of a shard that are requested first if the index does not list its tensors."""


def open_remote(
    model: str | PathLike[str], folder: Path | None = None, *, even_cached: bool = False
) -> tuple[Checkpoint, RemoteFiles] | None:
    """Open a model on the Hub. No shard is downloaded.

    Args:
        model: as for `resolve_model`.
        folder: where shards are kept while they are needed; None if only headers and single tensors will be read.
        even_cached: open it also if the Hub's cache of this machine holds all shards, because other machines will read.

    Returns:
        The checkpoint and its shards; None if `model` is a path, the Hub's cache holds all shards, offline mode is set,
        or the model has neither safetensors nor pickles. `resolve_model` then gives the directory.

    Raises:
        DownloadError: the Hub has no such model, denies access, or cannot be reached, and the cache lacks the model.
        CheckpointError, UnsupportedModelError: as for `open_checkpoint`.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    found = hub_id(model)
    if found is None or constants.HF_HUB_OFFLINE:
        return None
    try:
        listing = list_model(*found)
    except DownloadError:
        if _is_cached(*found):
            return None
        raise
    present = listing.files.__contains__
    directory = small_files(*found)
    listed = weight_files(directory, present=present) if _has(listing, ".safetensors") else {}
    if not listed and _has(listing, ".bin"):
        directory = small_files(*found, PICKLE_INDEX)
        listed = pickle_files(directory, present=present)
    paths = {name: try_to_load_from_cache(listing.model, name, revision=listing.commit) for name in listed}
    cached = {name: Path(path) for name, path in paths.items() if isinstance(path, str)}
    if not listed or (cached.keys() == listed.keys() and not even_cached):
        return None
    config, transfer = read_config(directory), Transfer(listing)
    with ThreadPoolExecutor(RANGES_AT_ONCE) as pool:
        headers = pool.map(lambda name: _header(transfer, directory, name, listed[name]), listed)
        shards: Mapping[str, Header] = dict(zip(listed, headers, strict=True))
    for shard, tensors in listed.items():
        check_listed(tensors, shards[shard])
    files = RemoteFiles(shards, transfer, cached, folder)
    checkpoint = Checkpoint(directory, config, shards, files)
    checkpoint.notes = (PICKLED,) if next(iter(listed)).endswith(".bin") else ()
    return adapted(checkpoint), files


def _has(listing: Listing, suffix: str) -> bool:
    return any(name.endswith(suffix) for name in listing.files)


def _is_cached(name: str, revision: str | None) -> bool:
    """Return whether the Hub's cache holds a complete snapshot."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    reference = folder / "refs" / (revision or constants.DEFAULT_REVISION)
    commit = reference.read_text().strip() if reference.is_file() else revision or ""
    return (folder / "snapshots" / commit).is_dir() and bool(commit)


def _header(transfer: Transfer, directory: Path, name: str, tensors: tuple[str, ...]) -> Header:
    """Read the header of a shard: usually with one request, or with one for each block that a pickle's lie in."""
    file, listing = directory / name, transfer.listing
    if name.endswith(".bin"):
        return read_pickled(io.BufferedReader(RangedFile(transfer, name)), file, _stamp(listing, name))
    size = listing.files[name].size
    likely = max(8 + sum(len(tensor) + ENTRY for tensor in tensors), LEAST_HEADER)
    raw = transfer.read(name, 0, min(likely, size))
    stop = 8 + header_length(raw[:8], size, file)
    if len(raw) < stop:
        raw += transfer.read(name, len(raw), stop)
    return parse_header(raw[:stop], size, file, _stamp(listing, name))


def _stamp(listing: Listing, name: str) -> str:
    """Return the stamp of a shard on the Hub, which changes with its content."""
    return f"{listing.files[name].size} {listing.files[name].sha256 or listing.commit}"

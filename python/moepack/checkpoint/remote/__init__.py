"""Reads a model that is on the Hub without a complete copy on this machine.

`open_remote` reads configuration, index and the headers of all shards, a few megabytes in all. The result is a
`Checkpoint` whose bytes come from `RemoteFiles`. `transfer` lists files and reads ranges; `files` decides which shards
are on disk, `parts` divides large ones, `sums` verifies these; `kept` holds tensors that are needed again; `ranges` is
what other processes read; `gguf` opens GGUF files.
"""

import io
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from moepack.checkpoint.gguf.files import SUFFIX, gguf_models
from moepack.checkpoint.hub_model import hub_model
from moepack.checkpoint.pickles import PICKLED, read_pickled
from moepack.checkpoint.quantized import adapted
from moepack.checkpoint.reader import Checkpoint, check_listed, read_config
from moepack.checkpoint.remote.files import RemoteFiles, Traffic
from moepack.checkpoint.remote.gguf import open_parts
from moepack.checkpoint.remote.kept import at_once
from moepack.checkpoint.remote.reading import RangedFile
from moepack.checkpoint.remote.sums import Altered
from moepack.checkpoint.remote.transfer import Listing, Transfer, list_model
from moepack.checkpoint.resolve import NO_FILE, chosen_gguf, small_files
from moepack.errors import DownloadError
from moepack.format.header import Header, header_length, parse_header
from moepack.format.weights import PICKLE, pickle_files, weight_files

__all__ = ["Altered", "RemoteFiles", "Traffic", "open_remote"]

PICKLE_INDEX = f"{PICKLE}.index.json"

ENTRY = 100
"""Approximate bytes of a tensor's entry in a header, without its name."""

LEAST_HEADER = 16 << 10
"""Bytes of a shard that are requested first if the index does not list its tensors."""


def open_remote(
    model: str | PathLike[str],
    folder: Path | None = None,
    *,
    even_cached: bool = False,
    config: Path | None = None,
) -> tuple[Checkpoint, RemoteFiles] | None:
    """Open a model on the Hub. No shard is downloaded.

    Args:
        model: as for `resolve_model`.
        folder: where shards are kept while they are needed; None if only headers and single tensors will be read.
        even_cached: open it also if the Hub's cache of this machine holds all shards, because other machines will read.
        config: folder of config.json and tokenizer of a GGUF model, as for `configured`.

    Returns:
        The checkpoint and its shards; None if `model` is a path, the Hub's cache holds all shards, offline mode is set,
        or the model has no weights in a known format. `resolve_model` or `configured` then gives the directory.

    Raises:
        DownloadError: the Hub has no such model, denies access, or cannot be reached, and the cache lacks the model.
        CheckpointError, UnsupportedModelError: as for `open_checkpoint` and `chosen_gguf`.
        ValueError: as for `configured`.
    """
    from huggingface_hub import constants

    found = hub_model(model)
    if found is None or constants.HF_HUB_OFFLINE:
        return None
    try:
        listing = list_model(found.name, found.revision)
    except DownloadError:
        if _is_cached(found.name, found.revision):
            return None
        raise
    directory = small_files(found.name, found.revision)
    if directory.name != listing.commit:
        raise DownloadError("has a new commit since its files were listed; start again", file=found.name)
    listed: Mapping[str, tuple[str, ...]] = {} if found.is_gguf else _listed(listing, directory)
    if not listed and (found.is_gguf or gguf_models(listing.files)):
        place, _, _ = (parts := chosen_gguf(found, listing.files))[0].rpartition("/")
        listing, directory = listing.within(place), directory / place
        listed = {part.rpartition("/")[2]: () for part in parts}
    elif config is not None:
        raise ValueError(NO_FILE)
    cached = {name: path for name in listed if (path := listing.cached(name)) is not None}
    if not listed or (cached.keys() == listed.keys() and not even_cached):
        return None
    transfer = Transfer(listing)
    if next(iter(listed)).endswith(SUFFIX):
        checkpoint, files = open_parts(transfer, directory, list(listed), cached, folder, config)
    else:
        checkpoint, files = _opened(transfer, directory, listed, cached, folder)
    return adapted(checkpoint), files


def _listed(listing: Listing, directory: Path) -> Mapping[str, tuple[str, ...]]:
    """Return the files of the weights in the root of a repository, as `weight_files` and `pickle_files` do."""
    present = listing.files.__contains__
    listed = weight_files(directory, present=present) if _has(listing, ".safetensors") else {}
    if not listed and _has(listing, ".bin"):
        listed = pickle_files(small_files(listing.model, listing.revision, PICKLE_INDEX), present=present)
    return listed


def _opened(
    transfer: Transfer,
    directory: Path,
    listed: Mapping[str, tuple[str, ...]],
    cached: Mapping[str, Path],
    folder: Path | None,
) -> tuple[Checkpoint, RemoteFiles]:
    """Open a model of safetensors or pickles, from the headers of its shards."""
    config = read_config(directory)
    headers = at_once(transfer, lambda name: _header(transfer, directory, name, listed[name]), listed)
    shards: Mapping[str, Header] = dict(zip(listed, headers, strict=True))
    for shard, tensors in listed.items():
        check_listed(tensors, shards[shard])
    files = RemoteFiles(shards, transfer, cached, folder)
    checkpoint = Checkpoint(directory, config, shards, files)
    checkpoint.notes = (PICKLED,) if next(iter(listed)).endswith(".bin") else ()
    return checkpoint, files


def _has(listing: Listing, suffix: str) -> bool:
    return any(name.endswith(suffix) for name in listing.files)


def _is_cached(name: str, revision: str | None) -> bool:
    """Return whether the Hub's cache holds a complete snapshot."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    reference = folder / "refs" / (revision or constants.DEFAULT_REVISION)
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision or ""
    return (folder / "snapshots" / commit).is_dir() and bool(commit)


def _header(transfer: Transfer, directory: Path, name: str, tensors: tuple[str, ...]) -> Header:
    """Read the header of a shard: usually with one request, or with one for each block that a pickle's lie in."""
    file, listing = directory / name, transfer.listing
    if name.endswith(".bin"):
        return read_pickled(io.BufferedReader(RangedFile(transfer, name)), file, listing.stamp(name))
    size = listing.files[name].size
    likely = max(8 + sum(len(tensor) + ENTRY for tensor in tensors), LEAST_HEADER)
    raw = transfer.read(name, 0, min(likely, size))
    stop = 8 + header_length(raw[:8], size, file)
    if len(raw) < stop:
        raw += transfer.read(name, len(raw), stop)
    return parse_header(raw[:stop], size, file, listing.stamp(name))

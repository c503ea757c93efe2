"""Opens a GGUF model of the Hub whose parts are not on this machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from moepack.checkpoint.companion import sides_of
from moepack.checkpoint.gguf.checkpoint import GgufCheckpoint
from moepack.checkpoint.gguf.header import GgufHeader, parse_gguf
from moepack.checkpoint.gguf.model import model_of
from moepack.checkpoint.reader import Checkpoint, read_config
from moepack.checkpoint.remote.files import RemoteFiles
from moepack.checkpoint.remote.kept import at_once
from moepack.checkpoint.remote.reading import Front
from moepack.checkpoint.remote.transfer import Transfer

__all__ = ["open_parts"]


def open_parts(
    transfer: Transfer,
    snapshot: Path,
    parts: Sequence[str],
    cached: Mapping[str, Path],
    folder: Path | None,
    config: Path | None,
) -> tuple[Checkpoint, RemoteFiles]:
    """Open a model from the headers of its parts. No tensor is read.

    Args:
        transfer: reads ranges of the parts, by their names without a folder.
        snapshot: the small files of the folder of the parts.
        parts: the names of the parts in order.
        cached: as for `RemoteFiles`.
        folder: as for `RemoteFiles`.
        config: folder of config.json and tokenizer; None means the repository's, otherwise the metadata of the file.

    Raises:
        DownloadError: a header cannot be downloaded.
        CheckpointError, UnsupportedModelError, DiskError: as for `open_gguf` and `companion`.
    """
    read = list(at_once(transfer, lambda name: _header(transfer, snapshot / name), parts))
    model = model_of([header for header, _ in read])
    directory = sides_of(model, read[0][1], config, snapshot)
    files = RemoteFiles(model.shards, transfer, cached, folder)
    return GgufCheckpoint(directory, read_config(directory), model, files), files


def _header(transfer: Transfer, file: Path) -> tuple[GgufHeader, bytes]:
    """Return the header of a part, and the bytes before the description of its first tensor."""
    front = Front(transfer, file.name)
    listed = transfer.listing.files[file.name]
    header = parse_gguf(front, listed.size, file, transfer.listing.stamp(file.name))
    return header, front[: header.entries]

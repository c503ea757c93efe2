"""Where the bytes of a checkpoint's shards come from: files of a directory, mapped on access.

A `Checkpoint` knows the headers of all shards and asks its `ShardFiles` for bytes. `checkpoint.remote` replaces this
class for a model whose shards are still on the hub.

Invariant: an array of `raw` is private to its caller. Writes to it never reach a file.
"""

import mmap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moepack.errors import CheckpointError
from moepack.format.header import Header, TensorInfo, stamp_of

__all__ = ["Bytes", "ShardFiles", "map_range", "sample_positions", "sampled"]

Bytes = npt.NDArray[np.uint8]

SAMPLES = 64
SAMPLE_BYTES = 4096


class ShardFiles:
    """The shards of a directory.

    Attributes:
        shards: the validated headers by file name.
        is_local: whether all shards are complete files that stay where they are.
        report: reports the state of downloads to the user.
    """

    shards: Mapping[str, Header]
    is_local: bool = True

    def __init__(self, shards: Mapping[str, Header]) -> None:
        self.shards = shards
        self.report: Callable[[], None] = _no_report

    def raw(self, info: TensorInfo) -> Bytes:
        """Return the bytes of a tensor, shape (nbytes,), at least 1.

        Raises:
            CheckpointError: the file changed after the checkpoint was opened, or cannot be read.
        """
        return map_range(info.file, info, self.shards[info.file.name].stamp)

    def sampled(self, shard: str) -> bytes:
        """Return evenly spaced blocks of a shard (`sample_positions`). Errors as for `raw`."""
        header = self.shards[shard]
        return sampled(header.file, header.size)

    def equal(self, first: TensorInfo, second: TensorInfo) -> bool:
        """Return whether two tensors of the same size have the same bytes. Errors as for `raw`."""
        return first.nbytes == 0 or np.array_equal(self.raw(first), self.raw(second))

    def expect(self, groups: Sequence[Collection[TensorInfo]]) -> None:
        """Announce the tensors that will be read, in order. Those of a group are read together, more than once."""

    def gather(self, infos: Collection[TensorInfo]) -> None:
        """Announce tensors that are read now and again at the end of a job."""

    def release(self, infos: Collection[TensorInfo]) -> None:
        """Announce that tensors given to `gather` are no longer needed."""

    def clear(self) -> None:
        """Announce that only tensors given to `gather` will be read."""

    @property
    def needs(self) -> int:
        """Bytes that the shards will still take on disk."""
        return 0


def _no_report() -> None:
    """Report nothing. Unlike a lambda, it can be pickled."""


def map_range(file: Path, info: TensorInfo, stamp: str | None, offset: int | None = None) -> Bytes:
    """Map the bytes of a tensor from a file.

    The mapping is copy-on-write, because torch requires writable arrays. Each tensor has its own mapping, because the
    kernel may reject a private mapping larger than the machine's memory.

    Args:
        file: the file.
        info: the tensor.
        stamp: the expected stamp of the file (`stamp_of`); None accepts any.
        offset: offset of the tensor in the file; None means `info.offset`.
    """
    place = info.offset if offset is None else offset
    start = place - place % mmap.ALLOCATIONGRANULARITY
    try:
        with file.open("rb") as stream:
            if stamp is not None and stamp_of(stream) != stamp:
                raise CheckpointError("the file was modified during the run; start again", file=file, tensor=info.name)
            mapping = mmap.mmap(stream.fileno(), place - start + info.nbytes, access=mmap.ACCESS_COPY, offset=start)
    except (OSError, ValueError) as cause:
        reason = getattr(cause, "strerror", None) or cause
        raise CheckpointError(f"cannot be mapped: {reason}", file=file, tensor=info.name) from cause
    return np.frombuffer(mapping, dtype=np.uint8, count=info.nbytes, offset=place - start)


def sampled(file: Path, size: int) -> bytes:
    """Read up to 64 evenly spaced blocks of 4 KiB from a file of `size` bytes.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with file.open("rb") as stream:
            blocks = []
            for position in sample_positions(size):
                stream.seek(position)
                blocks.append(stream.read(SAMPLE_BYTES))
    except OSError as cause:
        raise CheckpointError(f"cannot be read: {cause.strerror or cause}", file=file) from cause
    return b"".join(blocks)


def sample_positions(size: int) -> list[int]:
    """Return the offsets of the sampled blocks in a file of `size` bytes. A small file is covered completely."""
    last = max(size - SAMPLE_BYTES, 0)
    return sorted({last * i // (SAMPLES - 1) for i in range(SAMPLES)})

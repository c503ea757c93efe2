"""Writing shards beside the work: one is hashed, written and flushed while the next layer is packed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from types import TracebackType

from moepack.errors import MoepackError
from moepack.pipeline.journal import ShardRecord, Workspace

__all__ = ["ShardWriter"]


class ShardWriter:
    """Writes the shards of a workspace in a thread of its own, one at a time; to be left, as a context manager is.

    The journal is this thread's alone: a shard is entered when the next one is begun, and the last one at the end,
    whatever has ended the work.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace, self._thread = workspace, ThreadPoolExecutor(1)
        self._begun: Future[ShardRecord] | None = None

    def begin(self, write: Callable[[], ShardRecord]) -> None:
        """Begin to write a shard, once the one before is done; raises what that one raised."""
        self._enter()
        self._begun = self._thread.submit(write)

    def _enter(self) -> None:
        """Enter the shard that was begun."""
        if self._begun is not None:
            self._workspace.append(self._begun.result())
            self._begun = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._thread, nullcontext() if error is None else suppress(MoepackError):
            self._enter()

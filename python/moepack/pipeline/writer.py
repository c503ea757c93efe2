"""Writes shards in the background: one shard is hashed, written and flushed while the next layer is packed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from types import TracebackType

from moepack.errors import MoepackError
from moepack.pipeline.journal import ShardRecord, Workspace

__all__ = ["ShardWriter"]


class ShardWriter:
    """Writes the shards of a workspace in its own thread, one at a time. Use it as a context manager.

    Only the calling thread writes the journal: a shard is recorded when the next one starts, and the last one on exit,
    even if an error ended the work.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace, self._thread = workspace, ThreadPoolExecutor(1)
        self._begun: Future[ShardRecord] | None = None

    def begin(self, write: Callable[[], ShardRecord]) -> None:
        """Start writing a shard after the previous one is done; raises the previous shard's error."""
        self._enter()
        self._begun = self._thread.submit(write)

    def _enter(self) -> None:
        """Record the shard that was started."""
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

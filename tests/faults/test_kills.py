"""A job killed with SIGKILL during a write and then resumed gives the bytes of an uninterrupted job.

Three moments of every method are tried; with `MOEPACK_ALL_KILLS=1` all of them, which takes an hour.
"""

import multiprocessing
import os
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

import crash_worker
from moepack.methods import METHODS

KILLS = 0 if os.environ.get("MOEPACK_ALL_KILLS") == "1" else 3


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Starts processes without threads that have imported all libraries."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["crash_worker"])
    return context


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_killed_job_continues_to_the_same_bytes(
    method: str, mixtral: Path, tmp_path: Path, processes: ForkServerContext
) -> None:
    (tmp_path / "text.txt").write_text("".join(f"Line {i} of a text that nobody wrote.\n" for i in range(200)))
    worker = processes.Process(target=crash_worker.main, args=(mixtral, tmp_path, method, KILLS))
    worker.start()
    worker.join(None if KILLS == 0 else 600)
    assert worker.exitcode == 0
    assert int((tmp_path / "kills").read_text()) >= 3

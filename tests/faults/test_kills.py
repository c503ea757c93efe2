"""A job killed with SIGKILL during a write and then resumed gives the bytes of an uninterrupted job.

Three moments of every method are tried; with `MOEPACK_ALL_KILLS=1` all of them, which takes an hour.
"""

import os
from pathlib import Path

import pytest

from fork_support import run_script
from moepack.methods import METHODS
from places import TESTS

KILLS = 0 if os.environ.get("MOEPACK_ALL_KILLS") == "1" else 3


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_killed_job_continues_to_the_same_bytes(method: str, mixtral: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"Line {i} of a text that nobody wrote.\n" for i in range(200)))
    timeout = None if KILLS == 0 else 600
    done = run_script(TESTS / "crash_worker.py", mixtral, tmp_path, method, KILLS, folder=tmp_path, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 3

"""A job that is killed (SIGKILL, in the middle of a write) and continued gives the bytes of one that was not."""

import subprocess
import sys
from pathlib import Path

import pytest

from moepack.methods import METHODS

TESTS = Path(__file__).parent.parent
EVERY = 23
"""Moments between two kills. `python tests/crash_worker.py MODEL DIRECTORY METHOD` tries them all."""


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"ternary"}))
def test_a_killed_job_continues_to_the_same_bytes(method: str, mixtral: Path, tmp_path: Path) -> None:
    """Every method but `ternary`, of which `test_pipeline` tries every moment."""
    (tmp_path / "text.txt").write_text("".join(f"Line {i} of a text that nobody wrote.\n" for i in range(200)))
    command = [sys.executable, TESTS / "crash_worker.py", mixtral, tmp_path, method, str(EVERY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 2

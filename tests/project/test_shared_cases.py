"""Situations reported for other programs, as scripts next to the checkout.

Each script creates its own checkpoint and exits with 0 on success, 1 and a message on failure, and 2 if its setup
fails.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from places import SHARED

CASES = SHARED / "cases"
SCRIPTS = sorted(CASES.glob("*.py"))


@pytest.mark.skipif(not SCRIPTS, reason="there is no folder shared/cases beside the checkout")
@pytest.mark.parametrize("script", SCRIPTS or [None], ids=lambda script: script.stem if script else "none")
def test_a_case_passes(script: Path) -> None:
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), *sys.path)))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""Situations reported for other programs, as scripts next to the checkout.

Each script creates its own checkpoint and exits with 0 on success, 1 and a message on failure, and 2 if its setup
fails.
"""

from pathlib import Path

import pytest

from fork_support import run_script
from places import SHARED

CASES = SHARED / "cases"
SCRIPTS = sorted(CASES.glob("*.py"))

OBEYED = {"fields_that_are_ignored": "FAULT: answered as if they were not there: guided_json, structured_outputs"}
"""Output of scripts whose premise no longer holds, by script.

This script takes any answer to these fields for a fault, because they were not supported. Now they constrain the answer
(`tests/serving/test_serve_sampling.py`). Its other checks still count.
"""


@pytest.mark.skipif(not SCRIPTS, reason="there is no folder shared/cases beside the checkout")
@pytest.mark.parametrize("script", SCRIPTS or [None], ids=lambda script: script.stem if script else "none")
def test_a_case_passes(script: Path, tmp_path: Path) -> None:
    done = run_script(script, folder=tmp_path)
    if done.stdout.strip() != OBEYED.get(script.stem):
        assert done.returncode == 0, done.stdout + done.stderr

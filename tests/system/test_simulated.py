"""The package compresses, resumes, loads and generates without Linux, under the rules of macOS and Windows."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("system", ["darwin"])
def test_a_model_is_compressed_resumed_loaded_and_not_replaced_while_it_is_mapped(system: str, tmp_path: Path) -> None:
    program = Path(__file__).with_name("simulated.py")
    done = subprocess.run([sys.executable, program, system, tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused ")
    assert (done.stdout.split()[1] != "0") == (system == "win32")

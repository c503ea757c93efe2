"""Ctrl-C ends every long-running command with a shell's exit code. Latency: `benches/cpu/interrupts.py`."""

import json
import subprocess
import sys

from places import BENCHES

BENCH = BENCHES / "cpu" / "interrupts.py"


def test_every_command_ends() -> None:
    done = subprocess.run([sys.executable, BENCH], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) == 9
    for command, ends in found.items():
        assert set(ends["codes"]) <= {0, 130} and 130 in ends["codes"], (command, ends)

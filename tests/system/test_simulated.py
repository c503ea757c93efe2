"""The package works under the rules of macOS and Windows: `scenarios.py`."""

import json
from pathlib import Path

import pytest

from fork_support import run_script


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_the_scenarios_pass(system: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    done = run_script(Path(__file__).with_name("simulated.py"), system, work, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert len(outcomes) > 8
    assert not {name: outcome for name, outcome in outcomes.items() if outcome}, done.stderr

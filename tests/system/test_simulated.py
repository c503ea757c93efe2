"""The package works under the rules of macOS and Windows: `scenarios.py`."""

import json
from pathlib import Path

import pytest

from fork_support import run_script

WANTED = {
    "win32": [],
    "darwin": [
        *("interrupted_jobs_continue", "two_jobs_do_not_share_a_folder", "mapped_models_are_not_replaced"),
        *("loaded_models_are_saved", "models_of_the_hub_stream"),
    ],
}
"""The scenarios by system, or none for all. Only Windows refuses what the others are about."""


@pytest.mark.parametrize("system", WANTED)
def test_the_scenarios_pass(system: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    script = Path(__file__).with_name("simulated.py")
    done = run_script(script, system, work, *WANTED[system], folder=tmp_path, timeout=1200)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert len(outcomes) == len(WANTED[system]) or len(outcomes) > 10
    assert not {name: outcome for name, outcome in outcomes.items() if outcome}, done.stderr

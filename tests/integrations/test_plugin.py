"""Programs that never import moepack load packed directories through torch's entry points."""

import os
import subprocess
import sys
import tomllib

import pytest

from places import ROOT

LOAD = """
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({directory!r})
assert type(model.model.layers[0].mlp.experts).__name__ == "PackedExperts"
"""
LIGHT = """
import sys, torch
loaded = {name for name in sys.modules if name.startswith(("moepack", "transformers"))}
assert loaded == {"moepack", "moepack.errors", "moepack.integrations"}, loaded
"""
LATE = "import transformers.quantizers.auto  # which imports torch, which calls moepack before the end of this import\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder for the import path with the entry points of pyproject.toml, like an installed package."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    folder = tmp_path_factory.mktemp("installed")
    information = folder / "moepack_entry_points-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: moepack-entry-points\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in points.items()]
    (information / "entry_points.txt").write_text("\n".join(lines))
    return folder


def run(installed, code):
    path = os.pathsep.join([str(installed), str(ROOT / "python")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.parametrize("first", [LIGHT, LATE], ids=["torch first", "quantizers first"])
def test_from_pretrained_loads_packed_experts(installed, packed, first):
    result = run(installed, first + LOAD.format(directory=str(packed)))
    assert result.returncode == 0, result.stderr

"""Programs that never import moepack load packed directories where it is installed: through torch's entry points."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOAD = """
model = AutoModelForCausalLM.from_pretrained({directory!r})
print(type(model.model.layers[0].mlp.experts).__name__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder for the import path that has the entry points of pyproject.toml, as an installed package has them."""
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


@pytest.mark.parametrize("first", ["", "import transformers.quantizers.auto\n"])
def test_from_pretrained_loads_packed_experts(installed, packed, first):
    code = f"{first}from transformers import AutoModelForCausalLM\n" + LOAD.format(directory=str(packed))
    result = run(installed, code)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "PackedExperts\n"


def test_importing_torch_costs_next_to_nothing(installed):
    code = "import sys, torch, json; print(json.dumps([name for name in sys.modules if name.startswith('moepack')]))"
    modules = json.loads(run(installed, code).stdout)
    assert set(modules) == {"moepack", "moepack.errors", "moepack.integrations"}

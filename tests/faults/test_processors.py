"""Processors without an instruction set, simulated by `MOEPACK_ISA`: everything runs on portable code.

A missing instruction set is an error, not an illegal instruction.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moepack
import packed_support as support
from moepack import _core

USE = """
import sys, torch, moepack
from moepack import _core
moepack.compress(sys.argv[1], sys.argv[2], method="finequant", calibration="none")
assert moepack.verify(sys.argv[2]).ok and _core.isa() == "scalar"
with torch.no_grad():
    torch.save(moepack.load(sys.argv[2], torch.float32)(torch.arange(3, 20)[None]).logits, sys.argv[3])
"""

NAMES = {"scalar", "neon", "avx2", "avx512", "amx", "none"}


def python(code: str, isa: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "MOEPACK_ISA": isa}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_portable_code_does_all_that_vectors_do(mixtral: Path, tmp_path: Path) -> None:
    done = python(USE, "scalar", mixtral, tmp_path / "out", tmp_path / "logits")
    assert done.returncode == 0, done.stderr[-3000:]
    moepack.compress(mixtral, tmp_path / "here", method="finequant")
    assert support.contents(tmp_path / "out") == support.contents(tmp_path / "here")
    with torch.no_grad():
        expected = moepack.load(tmp_path / "here", torch.float32)(torch.arange(3, 20)[None]).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits"), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("isa", sorted(NAMES - set(_core.available_isas())))
def test_a_set_that_is_not_there_is_an_error(isa: str) -> None:
    done = python("from moepack import _core; _core.isa()", isa)
    assert done.returncode == 1
    assert f'unknown instruction set "{isa}"' in done.stderr or f"this processor does not support {isa}" in done.stderr

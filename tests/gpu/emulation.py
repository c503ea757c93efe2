"""Builds launches of warpgroups for the host: functions of host/simt.hpp stand in for instructions."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moepack.backends.gpu.compiler import sources

_COMPILER = shutil.which("g++")
_HOST = Path(__file__).parent / "host"


class Emulator:
    """Builds a host program once per format and specification."""

    def __init__(self, program: str, folder: Path) -> None:
        if _COMPILER is None:
            pytest.skip("g++ is missing")
        self.program, self.folder = _HOST / program, folder
        shutil.copytree(sources(), folder / "cuda")
        for name, old, new in [
            ("ptx", r"#if defined\(__CUDACC__\)", "#if 0"),
            ("warpgroups", r"#if defined\(__CUDACC__\)", "#if 0"),
            ("layer", "extern __shared__", "extern"),
        ]:
            file = folder / "cuda" / "common" / f"{name}.cuh"
            file.write_text(re.sub(old, new, file.read_text(), flags=re.MULTILINE))

    def __call__(self, source: str, kind: str, **definitions: int) -> Path:
        path = self.folder / "-".join(map(str, (source, *definitions.values())))
        if not path.exists():
            options = [f"-D{name}={int(value)}" for name, value in definitions.items()]
            options += [f'-DSOURCE="{source}"', f"-DFORMAT={kind}", f"-I{self.folder / 'cuda'}", f"-I{_HOST}"]
            command = [_COMPILER, "-std=c++20", "-O1", "-pthread", *options, str(self.program), "-o", str(path)]
            subprocess.run(command, check=True)
        return path

"""Builds CUDA sources for the host, also launches of warpgroups, where host/simt.hpp stands in for instructions."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moepack.backends.gpu.compiler import sources

_COMPILER = shutil.which("g++")
_HOST = Path(__file__).parent / "host"


def build(program: str, path: Path, *options: str, standard: str = "c++17") -> Path:
    """Build a program of the folder `host`; skip the test if there is no compiler."""
    if _COMPILER is None:
        pytest.skip("g++ is missing")
    options = (f"-std={standard}", "-O1", *options, f"-I{sources()}")
    subprocess.run([_COMPILER, *options, str(_HOST / program), "-o", str(path)], check=True)
    return path


class Emulator:
    """Builds a host program once per format and specification."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder = program, folder
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
            build(self.program, path, "-pthread", *options, standard="c++20")
        return path

"""Compiles CUDA sources to machine code with NVRTC only; needs no GPU and no CUDA toolkit.

Sources are files in the `cuda` folder; their includes are there or in CUDA's headers from PyPI. Machine code is cached
in a user folder. The cache key covers everything that it depends on: the source, all headers in `cuda`, the options,
the architecture and the version of NVRTC. Any change triggers recompilation, so the code that runs is always that of
the current sources.
"""

import hashlib
import os
import re
import struct
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import moepack
from moepack.errors import DeviceError
from moepack.system import files
from moepack.system.folders import cache_folder

__all__ = ["VARIABLE", "Cubin", "architecture", "compile_source", "require_compiler", "sources"]

VARIABLE = "MOEPACK_CACHE"
"""The environment variable that sets the folder for compiled kernels."""

_LEAST = (8, 0)
"""The oldest supported compute capability, the first with bfloat16 and asynchronous copies."""

_INSTALL = "kernels are compiled by NVRTC through CuPy: pip install 'moepack[gpu]'"


class Cubin(NamedTuple):
    """Machine code of one source.

    Attributes:
        path: the file.
        log: the assembler's output for each kernel: registers, stack, spills, shared memory.
    """

    path: Path
    log: str


def architecture(capability: tuple[int, int]) -> str:
    """Return the target architecture for a compute capability, for example `sm_90a` for (9, 0).

    Raises:
        DeviceError: the GPU is too old.
    """
    if capability < _LEAST:
        have, least = (".".join(map(str, pair)) for pair in (capability, _LEAST))
        raise DeviceError(f"the GPU has compute capability {have}, but packed weights need {least} or newer")
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if capability == (9, 0) else "")


@cache
def sources() -> Path:
    """Return the folder of the CUDA sources in the package; in the repository it is a link to `cuda`.

    Raises:
        DeviceError: the folder is missing.
    """
    folder = Path(moepack.__file__).parent / "cuda"
    if not (folder / "common").is_dir():
        raise DeviceError("the CUDA sources are missing from this installation", file=folder)
    return folder


def compile_source(source: str, arch: str, options: Sequence[str] = ()) -> Cubin:
    """Compile a source, or return the cached machine code.

    Args:
        source: its name in the folder `cuda`.
        arch: `sm_80`, `sm_90a` and so on.
        options: options of NVRTC, mostly definitions (`-DBITS=3`).

    Raises:
        DeviceError: NVRTC is missing or does not know the architecture, or the source does not compile.
    """
    path = sources() / source
    options = (f"-arch={arch}", *_OPTIONS, *options)
    kept = _folder() / f"{path.stem}-{arch}-{_key(path, options)}.cubin"
    notes = kept.with_suffix(".log")
    if not (kept.is_file() and notes.is_file()):
        code, log = _compile(path, options)
        # The code is written last, so its presence implies that of the log.
        _write(notes, log.encode())
        _write(kept, code)
    return Cubin(kept, notes.read_text(encoding="utf-8"))


def require_compiler() -> None:
    """Check that sources can be compiled.

    Raises:
        DeviceError: NVRTC, the CUDA headers or the sources are missing.
    """
    _nvrtc(), _includes()


_OPTIONS = ("--std=c++17", "--ptxas-options=-v")


def _compile(path: Path, options: Sequence[str]) -> tuple[bytes, str]:
    """Compile a source; return its machine code and log."""
    nvrtc = _nvrtc()
    text = path.read_text(encoding="utf-8")
    program = nvrtc.createProgram(text, path.name, (), ())
    try:
        nvrtc.compileProgram(program, (*options, *(f"-I{folder}" for folder in _includes())))
        return _whole(nvrtc.getCUBIN(program)), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        found = re.search(r"^.*error.*$", log, re.MULTILINE)
        reason = found[0] if found else str(error)
        raise DeviceError(f"does not compile for {options[0].removeprefix('-arch=')}: {reason}", file=path) from error
    finally:
        nvrtc.destroyProgram(program)


def _whole(code: bytes) -> bytes:
    """Restore trailing zeros of machine code, which CuPy 14.2 treats as the end of a string and cuts off.

    The file ends with its program headers (ELF: their offset at 32, size and count at 54).
    """
    offset, size, count = *struct.unpack_from("<Q", code, 32), *struct.unpack_from("<HH", code, 54)
    return code.ljust(offset + size * count, b"\0")


@cache
def _nvrtc() -> Any:
    """Return CuPy's NVRTC module, which loads the library on first use.

    Raises:
        DeviceError: CuPy or NVRTC is missing.
    """
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise DeviceError(f"{_INSTALL} ({' '.join(str(error).split())[:200]})") from error
    return nvrtc


@cache
def _includes() -> tuple[Path, ...]:
    """Header folders: our own, CUDA's, and those of its C++ library, which are below the latter."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        found = find_nvidia_header_directory("cudart")
    except ImportError as error:
        raise DeviceError(_INSTALL) from error
    if found is None:
        raise DeviceError("the CUDA headers are missing: pip install 'moepack[gpu]'")
    return sources(), Path(found), Path(found) / "cccl"


def _key(path: Path, options: Sequence[str]) -> str:
    """Hash everything that machine code depends on, to 16 hexadecimal digits."""
    digest = hashlib.sha256(repr((_nvrtc().getVersion(), options)).encode())
    for file in (path, *_headers()):
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _headers() -> Iterator[Path]:
    return iter(sorted(sources().glob("**/*.cuh")))


@cache
def _folder() -> Path:
    """The cache folder; a temporary folder of this process if it is not writable."""
    folder = Path(os.environ.get(VARIABLE) or cache_folder()) / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="moepack-kernels-"))
    return folder


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically, so other processes never see a part of it."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    files.replace(file.name, path)

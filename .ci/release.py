"""Check what a release consists of: its version, its files, and the requirements of its extras.

    python .ci/release.py DIST [--tag v1.2.3] [--no-resolve]

DIST holds wheels and a source distribution, such as `make release-check` builds. Prints every problem; the exit code is
1 if there is one. --tag also checks what only a published version needs. The extras are resolved for each system that
torch has wheels for, which asks the package index.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from packaging.metadata import Metadata
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 12_000_000
"""The most bytes of a wheel."""

EXTENSION = "moepack/_core.*[od]"  # .so or .pyd
IN_WHEEL = (
    "moepack/__main__.py",
    "moepack/py.typed",
    "moepack/_core.pyi",
    EXTENSION,
    "moepack/cuda/*.cu",
    "moepack/cuda/common/*.cuh",
    "moepack-*.dist-info/entry_points.txt",
    "moepack-*.dist-info/licenses/LICENSE",
    "moepack-*.dist-info/sboms/*.cyclonedx.json",
)
IN_SOURCES = (
    "Cargo.toml",
    "Cargo.lock",
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "rust/core/Cargo.toml",
    "rust/core/src/lib.rs",
    "rust/py/Cargo.toml",
    "rust/py/src/lib.rs",
    "python/moepack/py.typed",
    "python/moepack/cuda/*.cu",
    "python/moepack/cuda/common/*.cuh",
)
IN_NEITHER = ("tests/*", "benches/*", "*/__pycache__/*", "*.pyc", "shared/*")

SYSTEMS = ("x86_64-manylinux_2_35", "aarch64-manylinux_2_35", "x86_64-pc-windows-msvc", "aarch64-apple-darwin")
PYTHONS = ("3.11", "3.14")
LINUX_ONLY = ("vllm",)
"""Extras of packages without wheels for other systems."""

BUILT = ("eval", "dev")
"""Extras with lm-eval, some of whose dependencies are published as sources only."""


def version() -> str:
    """Return the version, which Cargo.toml declares and the package takes over."""
    return tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]


def wrong_versions() -> Iterator[str]:
    """Find the files that state another version than Cargo.toml."""
    expected = version()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if "version" in project or "version" not in project["dynamic"]:
        yield "pyproject.toml: the version must be dynamic, so that Cargo.toml alone declares it"
    locked = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    stated = {f"Cargo.lock, {each['name']}": each["version"] for each in locked if "source" not in each}
    for name, pattern in (("CHANGELOG.md", r"^## (\S+)"), ("CITATION.cff", r"^version: (\S+)")):
        found = re.search(pattern, (ROOT / name).read_text("utf-8"), re.MULTILINE)
        stated[name] = found[1] if found else "none"
    for place, value in stated.items():
        # Crates that are in no release keep version 0.0.0.
        if value not in (expected, "0.0.0"):
            yield f"{place}: version {value}, but Cargo.toml has {expected}"


def unfinished(tag: str) -> Iterator[str]:
    """Find what keeps this version from being published under a tag."""
    if tag != f"v{version()}":
        yield f"the tag is {tag}, but the version is {version()}"
    if not re.search(rf"^## {re.escape(version())} \(\d{{4}}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.M):
        yield f"CHANGELOG.md: the heading of {version()} has no date, as in `## {version()} (2026-01-31)`"
    if relative := re.findall(r"\]\((?!https?://|#)([^)]+)\)", (ROOT / "README.md").read_text("utf-8")):
        yield f"README.md: the package index resolves no relative links, such as {relative[0]}"
    if "urls" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]:
        yield "pyproject.toml: [project.urls] is missing; it names the public repository"


def wrong_wheel(path: Path) -> Iterator[str]:
    """Find problems of a wheel: its size, its tags, its files, its metadata."""
    if path.stat().st_size > LARGEST:
        yield f"{path.stat().st_size:,} bytes, more than {LARGEST:,}"
    _, stated, _, tags = parse_wheel_filename(path.name)
    if str(stated) != version():
        yield f"version {stated}, but Cargo.toml has {version()}"
    if {(tag.interpreter, tag.abi) for tag in tags} != {("cp311", "abi3")}:
        yield "its tag must be cp311-abi3, so that every CPython since 3.11 installs it"
    with zipfile.ZipFile(path) as files:
        names = files.namelist()
        yield from wrong_files(names, IN_WHEEL)
        for name in (name for name in names if fnmatch(name, EXTENSION)):
            if b"PyInit__core\0" not in files.read(name):
                yield f"{name} does not export PyInit__core, so Python cannot import it"
        yield from wrong_metadata(files.read(f"moepack-{stated}.dist-info/METADATA"))


def wrong_sources(path: Path) -> Iterator[str]:
    """Find problems of a source distribution: its name, its files, its metadata."""
    folder = f"moepack-{version()}"
    if path.name != f"{folder}.tar.gz":
        yield f"it must be named {folder}.tar.gz"
        return
    with tarfile.open(path) as files:
        names = [name.removeprefix(f"{folder}/") for name in files.getnames()]
        yield from wrong_files(names, IN_SOURCES)
        metadata = files.extractfile(f"{folder}/PKG-INFO")
        assert metadata is not None
        yield from wrong_metadata(metadata.read())


def wrong_files(names: list[str], wanted: tuple[str, ...]) -> Iterator[str]:
    """Find missing files, and files that nobody who installs the package needs."""
    yield from (f"{pattern} is missing" for pattern in wanted if not any(fnmatch(name, pattern) for name in names))
    for pattern in IN_NEITHER:
        yield from (f"{name} does not belong in it" for name in names if fnmatch(name, pattern))


def wrong_metadata(content: bytes) -> Iterator[str]:
    """Find fields that the package index rejects or that are empty."""
    try:
        metadata = Metadata.from_email(content)
    except ExceptionGroup as group:
        yield from (f"metadata: {error}" for error in group.exceptions)
        return
    for field in ("summary", "description", "license_expression", "license_files", "keywords", "classifiers"):
        if not getattr(metadata, field):
            yield f"metadata: {field} is empty"
    if metadata.description_content_type is None or "markdown" not in metadata.description_content_type:
        yield "metadata: the description is not Markdown"
    if not (metadata.author or metadata.author_email or email.message_from_bytes(content)["Author"]):
        yield "metadata: there is no author"


def unresolved() -> Iterator[str]:
    """Find extras that cannot be installed on a system that torch has wheels for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, requirements in {"": [], **project["optional-dependencies"]}.items():
        for system in SYSTEMS:
            if extra in LINUX_ONLY and "linux" not in system:
                continue
            for python in PYTHONS:
                wheels = [] if extra in BUILT else ["--only-binary", ":all:"]
                wanted = [*project["dependencies"], *requirements]
                if error := resolution_error(wanted, wheels, system, python):
                    yield f"moepack[{extra}] on {system}, Python {python}: {error}"


def resolution_error(requirements: list[str], options: list[str], system: str, python: str) -> str:
    """Return why no versions of these requirements go together on a system, or an empty string."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", *options, "-"]
    command += ["--python-platform", system, "--python-version", python]
    # torch's wheels for macOS are made for version 14.
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    done = subprocess.run(command, input="\n".join(requirements), env=environment, capture_output=True, text=True)
    return " ".join(done.stderr.split()) if done.returncode else ""


def problems(dist: Path, tag: str | None, resolve: bool) -> Iterator[str]:
    """Find every problem of a release."""
    yield from wrong_versions()
    if tag is not None:
        yield from unfinished(tag)
    wheels, sources = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    if not wheels or len(sources) != 1:
        yield f"{dist} must have wheels and one source distribution"
    for path in wheels:
        yield from (f"{path.name}: {problem}" for problem in wrong_wheel(path))
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
    for path in sources:
        yield from (f"{path.name}: {problem}" for problem in wrong_sources(path))
    if resolve:
        yield from unresolved()


def main() -> int:
    """Print the problems; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--tag")
    parser.add_argument("--no-resolve", action="store_true")
    arguments = parser.parse_args()
    found = list(problems(arguments.dist, arguments.tag, not arguments.no_resolve))
    print("\n".join(found) or "nothing is wrong with this release")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

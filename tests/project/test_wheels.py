"""`.ci/wheels.py` removes what depends on the build machine from wheels, and links them for other systems."""

import hashlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
import tomllib
import uuid
import zipfile
from pathlib import Path

import pytest

from places import ROOT

SPEC = importlib.util.spec_from_file_location("wheels", ROOT / ".ci" / "wheels.py")
assert SPEC and SPEC.loader
sys.path.insert(0, str(ROOT / ".ci"))  # as for a script
wheels = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(wheels)
INFO = "some-1.dist-info"
LIST = f"{INFO}/sboms/some.cyclonedx.json"


def built(root: Path, minute: int, content: bytes = b"code") -> bytes:
    """A wheel as built in the folder `root` and processed by `.ci/wheels.py`."""
    component = {"bom-ref": f"path+{root.as_uri()}/rust"}
    metadata = {"timestamp": f"2026-01-01T00:{minute}:00Z", "component": component}
    crates = {"serialNumber": uuid.uuid4().urn, "metadata": metadata}
    files = {"some/code.py": content, LIST: json.dumps(crates).encode()}
    record = "".join(wheels.record_line(name, data) for name, data in files.items()) + f"{INFO}/RECORD,,\n"
    root.mkdir(parents=True)
    with zipfile.ZipFile(root / "built.whl", "w") as wheel:
        for name, data in {**files, f"{INFO}/RECORD": record.encode()}.items():
            wheel.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, minute, 0)), data)
    wheels.normalize(root / "built.whl", root / "normal.whl", root)
    return (root / "normal.whl").read_bytes()


def test_two_builders_make_the_same_wheel(tmp_path: Path) -> None:
    assert built(tmp_path / "here", 1) == built(tmp_path / "somewhere" / "else", 2)
    assert built(tmp_path / "other", 3, b"other code") != built(tmp_path / "again", 3)


def test_the_record_matches_the_wheel(tmp_path: Path) -> None:
    built(tmp_path / "here", 1)
    with zipfile.ZipFile(tmp_path / "here" / "normal.whl") as wheel:
        record = wheel.read(f"{INFO}/RECORD").decode().splitlines()
        names = wheel.namelist()
        lines = [wheels.record_line(name, wheel.read(name)).strip() for name in ("some/code.py", LIST)]
        assert record == [*lines, f"{INFO}/RECORD,,"]
        crates = json.loads(wheel.read(LIST))
    assert names[-1] == f"{INFO}/RECORD" and str(tmp_path) not in json.dumps(crates)
    assert uuid.UUID(crates["serialNumber"]) and "timestamp" not in crates["metadata"]


def library(identity: bytes, content: bytes, signed: bool) -> bytes:
    """A library of macOS: load commands, content, and a signature of pages of 64 bytes."""
    commands = [struct.pack("<2I", 0x19, 16) + bytes(8), struct.pack("<2I", 0x1B, 24) + identity]
    end = 32 + 40 + 16 * signed + len(content)
    if signed:
        commands.append(struct.pack("<4I", 0x1D, 16, end, 999))
    head = wheels.macho.MAGIC + struct.pack("<7I", 0, 0, 6, len(commands), sum(map(len, commands)), 0, 0)
    code = head + b"".join(commands) + content
    pages = [hashlib.sha256(code[first : first + 64]).digest() for first in range(0, end, 64)] if signed else []
    directory = struct.pack(">9I4B", 0xFADE0C02, 40 + 32 * len(pages), 0, 0, 40, 0, 0, len(pages), end, 32, 2, 0, 6)
    other = struct.pack(">2I", 0xFADE0C01, 8)
    index = struct.pack(">3I", 0xFADE0CC0, 28 + 8 + 40 + 32 * len(pages), 2) + struct.pack(">4I", 2, 28, 0, 36)
    return code + (index + other + directory + b"".join(pages) if signed else b"")


@pytest.mark.parametrize("signed", [False, True])
def test_libraries_of_macos_are_identified_by_their_content(signed: bool) -> None:
    identified, content = wheels.macho.identified, bytes(range(150))
    first, second = (library(identity * 16, content, signed) for identity in (b"a", b"b"))
    assert first != second and identified(first) == identified(second)
    found = identified(first)
    assert found == library(found[32 + 16 + 8 : 32 + 40], content, signed)  # the signature is that of the new pages
    assert identified(library(b"a" * 16, content[1:] + b"x", signed))[56:72] != found[56:72]
    with pytest.raises(ValueError, match="no UUID"):
        identified(first.replace(struct.pack("<2I", 0x1B, 24), struct.pack("<2I", 0x1A, 24), 1))


@pytest.mark.skipif(sys.platform == "win32", reason="the wheels are built on Linux")
def test_the_linker_for_windows_is_zig_with_the_export_that_python_looks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "some python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    folder = tmp_path / "some folder"
    variables = wheels.windows_linker("aarch64-pc-windows-gnullvm", folder, "/bin")
    assert variables["PATH"] == f"{folder}{os.pathsep}/bin"
    linker = variables["CARGO_TARGET_AARCH64_PC_WINDOWS_GNULLVM_LINKER"]
    said = subprocess.run([linker, "a b.o"], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    assert said[:4] == ["-m", "maturin", "zig", "cc"] and said[-2] == "a b.o"
    assert said[said.index("-target") + 1] == "aarch64-windows-gnu"
    module = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["maturin"]["module-name"]
    assert Path(said[-1]).read_text().split() == ["EXPORTS", f"PyInit_{module.split('.')[-1]}"]


def test_the_workflow_makes_its_wheels_for_the_same_versions_of_macos() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    (line,) = (line for line in workflow.splitlines() if "MACOSX_DEPLOYMENT_TARGET" in line)
    intel, arm = wheels.OLDEST_MACOS["x86_64-apple-darwin"], wheels.OLDEST_MACOS["aarch64-apple-darwin"]
    assert line.endswith(f"== 'x86_64-apple-darwin' && '{intel}' || '{arm}' }}}}")


def test_a_command_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"exit code 3: .*sys\.exit\(3\)"):
        wheels.run([sys.executable, "-c", "import sys; sys.exit(3)"], tmp_path, None)

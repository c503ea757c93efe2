"""Build the wheels for Linux, Windows and macOS on Linux: the same bytes from the same sources, wherever they lie.

    python .ci/wheels.py [--out dist] [--target TRIPLE ...] [--check]

zig is the linker: it asks for no glibc newer than 2.17 and links for other processors and systems. What depends on the
builder is taken out of the wheels: folders, which the compiler is given other names for; and time, folders and the
random serial number of the list of crates (CycloneDX) and the UUID of libraries of macOS, which become hashes of the
rest. Compiler, zig and maturin must be the same. --check builds each wheel once more, from a copy of the sources in
another folder, and compares.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from pathlib import Path

import macho

ROOT = Path(__file__).resolve().parent.parent
TARGETS = (
    "x86_64-unknown-linux-gnu",
    "aarch64-unknown-linux-gnu",
    "x86_64-pc-windows-gnu",
    "aarch64-pc-windows-gnullvm",
    "aarch64-apple-darwin",
    "x86_64-apple-darwin",
)
OLDEST_MACOS = {"aarch64-apple-darwin": "11.0", "x86_64-apple-darwin": "10.12"}
SOURCES = ("Cargo.toml", "Cargo.lock", "LICENSE", "README.md", "pyproject.toml", "cuda", "python", "rust")


def build(root: Path, target: str, out: Path) -> Path:
    """Build the wheel of the sources in `root` for a target into `out`, and return its path."""
    if shutil.which("rustup"):
        run(["rustup", "--quiet", "target", "add", target], root, None)
    cargo_home = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
    names = {cargo_home: "cargo", root: "moepack"}
    flags = [f"--remap-path-prefix={folder}={name}" for folder, name in names.items()]
    environment = {
        **os.environ,
        "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(flags),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [sys.executable, "-m", "maturin", "build", "--release", "--locked", "--target", target]
    if "-windows-" in target:
        environment |= windows_linker(target, root / "target" / "zig" / target, environment["PATH"])
    else:
        command.append("--zig")
    if target in OLDEST_MACOS:
        environment["MACOSX_DEPLOYMENT_TARGET"] = OLDEST_MACOS[target]
    with tempfile.TemporaryDirectory() as folder:
        run([*command, "--out", folder], root, environment)
        (wheel,) = Path(folder).glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        normalize(wheel, out / wheel.name, root)
        return out / wheel.name


def run(command: list[str], folder: Path, environment: dict[str, str] | None) -> None:
    """Run a command in a folder; end with its name if it fails, after what it has printed."""
    if code := subprocess.run(command, cwd=folder, env=environment).returncode:
        raise SystemExit(f"exit code {code}: {shlex.join(command)}")


def windows_linker(target: str, folder: Path, path: str) -> dict[str, str]:
    """Write scripts into `folder` that run zig as a linker for Windows; return the variables that make cargo use them.

    `maturin build --zig` cannot link a module of a package: it exports PyInit_moepack._core in place of the function's
    name. The scripts run the same wrapper of zig, which writes a hash into the file in place of the time. The folder
    must be the same each time, because cargo compiles everything again if the linker's path changes.
    """
    processor = target.split("-")[0]
    exports = folder / "_core.def"
    wrapper = shlex.join(["exec", sys.executable, "-m", "maturin", "zig"])
    options = f"-target {processor}-windows-gnu -fno-sanitize=all -Wl,-Brepro"
    commands = {
        "linker": f'cc -- {options} "$@" {shlex.quote(str(exports))}',
        f"{processor}-w64-mingw32-dlltool": 'dlltool -- "$@"',
    }
    folder.mkdir(parents=True, exist_ok=True)
    exports.write_text("EXPORTS\n    PyInit__core\n")
    for name, arguments in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{wrapper} {arguments}\n")
        (folder / name).chmod(0o755)
    variable = f"CARGO_TARGET_{target.upper().replace('-', '_')}_LINKER"
    return {variable: str(folder / "linker"), "PATH": f"{folder}{os.pathsep}{path}"}


def normalize(wheel: Path, to: Path, root: Path) -> None:
    """Write a wheel that was built in `root` to `to`, with nothing in it that depends on the builder."""
    with zipfile.ZipFile(wheel) as source:
        entries = {info.filename: (info, source.read(info)) for info in source.infolist()}
    (record,) = (name for name in entries if name.endswith(".dist-info/RECORD"))
    lines = entries[record][1].decode()
    for name, (info, data) in entries.items():
        changed = normalized_list(data, root) if name.endswith(".cyclonedx.json") else data
        if data.startswith(macho.MAGIC):
            changed = macho.identified(data)
        lines = lines.replace(record_line(name, data), record_line(name, changed))
        entries[name] = (info, changed)
    entries[record] = (entries[record][0], lines.encode())
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as target:
        for name in sorted(entries, key=lambda name: (name == record, name)):
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = entries[name][0].external_attr, zipfile.ZIP_DEFLATED
            target.writestr(info, entries[name][1])


def normalized_list(data: bytes, root: Path) -> bytes:
    """Return a list of crates (CycloneDX) without time, with folders relative to `root`, its serial number a hash."""
    crates = json.loads(data.replace(root.as_uri().encode(), b"file://."))
    crates["metadata"].pop("timestamp", None)
    crates.pop("serialNumber")
    content = json.dumps(crates, sort_keys=True)
    crates["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_OID, content).urn
    return json.dumps(crates, indent=1, sort_keys=True).encode()


def record_line(name: str, data: bytes) -> str:
    """Return what RECORD says of a file."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def check(wheel: Path, target: str) -> None:
    """Build a wheel's sources again in another folder; an error if the bytes differ."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "elsewhere")
        ignored = shutil.ignore_patterns("*.so", "__pycache__", "target")
        for name in SOURCES:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
            else:
                copy.mkdir(exist_ok=True)
                shutil.copy(ROOT / name, copy / name)
        again = build(copy, target, Path(folder, "dist"))
        if again.name != wheel.name or again.read_bytes() != wheel.read_bytes():
            raise SystemExit(f"{wheel.name} is not the same when it is built in another folder")
    print(f"{wheel.name} is the same when it is built in another folder")


def main() -> None:
    """Build the wheels that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--target", nargs="+", default=TARGETS)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    for target in arguments.target:
        wheel = build(ROOT, target, arguments.out)
        print(f"{wheel} {hashlib.sha256(wheel.read_bytes()).hexdigest()}")
        if arguments.check:
            check(wheel, target)


if __name__ == "__main__":
    main()

"""Versions of the dependencies: pinned, newest, and lowest allowed.

`constraints.txt` pins what `make setup` installs, so a new release of a dependency changes no test. `pyproject.toml`
allows ranges. This script tests both ends, each in a separate environment.

    .ci/versions.py newest    test the newest releases, ignoring the package's upper bounds
    .ci/versions.py lowest    test the lower bounds
    .ci/versions.py pin       write the newest releases to constraints.txt

The exit code is that of the tests.
"""

import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "constraints.txt"
PROJECT = ROOT / "pyproject.toml"
EXTRAS = ("dev", "docs", "plots", "chat", "serve")
SECONDS = 1500
"""The most that the tests may take."""

HEADER = f"""# What `make setup` installs and the tests have passed with. `.ci/versions.py pin` writes this file,
# `make newest` tries what has come out since. Extras: {", ".join(EXTRAS)}.
"""


def resolved(resolution: str) -> dict[str, str]:
    """Versions that go together, by name, for the Python that runs this.

    Args:
        resolution: "highest", which ignores the package's upper bounds, or "lowest-direct".
    """
    project = tomllib.loads(PROJECT.read_text())["project"]
    wanted = [requirement.partition(",<")[0] for requirement in project["dependencies"]]
    wanted += [requirement for extra in EXTRAS for requirement in project["optional-dependencies"][extra]]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "-"]
    command += ["--python-version", f"{sys.version_info.major}.{sys.version_info.minor}", "--resolution", resolution]
    found = subprocess.run(command, check=True, capture_output=True, text=True, input="\n".join(wanted))
    return pins(found.stdout)


def pins(text: str) -> dict[str, str]:
    """The versions of a file of pins, by name."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return dict(line.split("==", 1) for line in lines if "==" in line)


def tested(versions: dict[str, str], environment: Path) -> int:
    """Install versions in an environment of their own and run the tests there; pytest's exit code."""
    venv.create(environment, clear=True)
    requirements, python = environment / "requirements.txt", environment / "bin" / "python"
    requirements.write_text(listed(versions))
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
    subprocess.run([*install, "--requirement", str(requirements)], check=True)
    maturin = [sys.executable, "-m", "maturin", "build", "--release", "--quiet", "--out", str(environment)]
    subprocess.run(maturin, check=True, cwd=ROOT)
    subprocess.run([*install, "--no-deps", *map(str, environment.glob("moepack-*.whl"))], check=True)
    workers = os.environ.get("TEST_WORKERS", "2")
    tests = [str(python), "-m", "pytest", "-q", "--numprocesses", workers, "--dist", "worksteal"]
    settings = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PATH": f"{python.parent}:{os.environ['PATH']}"}
    return subprocess.run(tests, cwd=ROOT, env=os.environ | settings, timeout=SECONDS).returncode


def listed(versions: dict[str, str]) -> str:
    """Versions as lines of a requirements file."""
    return "".join(f"{name}=={version}\n" for name, version in versions.items())


def main(what: str) -> int:
    """Do what was asked for."""
    versions = resolved("lowest-direct" if what == "lowest" else "highest")
    if what == "pin":
        PINS.write_text(HEADER + listed(versions))
        return 0
    pinned = pins(PINS.read_text())
    changed = {name: version for name, version in versions.items() if pinned.get(name) != version}
    if not changed:
        print("these are the versions of constraints.txt, which the tests run with")
        return 0
    for name, version in changed.items():
        print(f"{name} {pinned.get(name, '(not pinned)')} -> {version}", flush=True)
    code = tested(versions, ROOT / "build" / what)
    print(f"the tests pass with the {what} versions" if code == 0 else f"the {what} versions break the tests above")
    return code


if __name__ == "__main__":
    if sys.argv[1:] not in (["newest"], ["lowest"], ["pin"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))

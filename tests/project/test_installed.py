"""What `import moepack` loads and does: little, and nothing on the network. Also the files that an installation has."""

import importlib.metadata
import subprocess
import sys
import tomllib

import pytest

import moepack
from places import ROOT

HEAVY = [
    "cupy",
    "fastapi",
    "gguf",
    "huggingface_hub",
    "lm_eval",
    "matplotlib",
    "numpy",
    "peft",
    "ray",
    "rich",
    "safetensors",
    "torch",
    "transformers",
    "typer",
    "uvicorn",
]
PRELUDE = """
import socket, sys

def refuse(*arguments, **options):
    raise AssertionError("the network is used")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
"""


def printed(code: str) -> str:
    """Return what code prints in a new process in which every connection fails."""
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_other_package() -> None:
    """Counted in modules, because time depends on the machine. It takes about 20 ms."""
    loaded = printed("import moepack\nprint(*sys.modules)").split()
    assert [name for name in HEAVY if name in loaded] == []
    assert len([name for name in loaded if name.startswith("moepack")]) < 6


def test_the_modules_that_register_may_be_imported_first() -> None:
    code = """
import moepack.integrations.transformers, moepack.integrations.peft
import transformers.models.mixtral.modeling_mixtral
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
print("moepack" in AUTO_QUANTIZER_MAPPING)
"""
    assert printed(code) == "True\n"


def test_the_command_line_starts_without_torch() -> None:
    loaded = printed("import moepack.cli\nprint(*sys.modules)").split()
    assert [name for name in HEAVY if name in loaded] == ["rich", "typer"]


def test_the_names_of_the_package_load_no_optional_package() -> None:
    code = "import moepack\nfor name in moepack.__all__: getattr(moepack, name)\nprint(*sys.modules)"
    loaded = printed(code).split()
    optional = ("cupy", "fastapi", "gguf", "lm_eval", "matplotlib", "peft", "ray", "typer", "uvicorn")
    assert "torch" in loaded and [name for name in optional if name in loaded] == []


def test_modules_import_without_extras() -> None:
    """Only the modules that belong to an extra need its packages. `make vllm` runs without peft, as many users do."""
    extras = {
        "moepack.integrations.lora": "peft",
        "moepack.serving.http": "fastapi uvicorn",
        "moepack.vllm": "vllm",
    }
    code = """
import importlib, pkgutil

REFUSED = {"fastapi", "gguf", "llguidance", "lm_eval", "matplotlib", "peft", "prometheus_client", "prompt_toolkit"}
REFUSED |= {"cupy", "ray", "uvicorn", "vllm"}

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refusal())
import transformers.quantizers.auto
import moepack

names = [each.name for each in pkgutil.walk_packages(moepack.__path__, "moepack.", onerror=lambda name: None)]
for name in names:
    if name not in ("moepack.__main__", "moepack.system.kernel32"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            print(name, error.name)
print(len(names), "modules")
"""
    *failures, total = printed(code).splitlines()
    assert int(total.split()[0]) > 300
    for name, missing in map(str.split, failures):
        extra = next((extra for extra in extras if name.startswith(extra)), None)
        assert extra is not None and missing in extras[extra].split(), f"{name} needs {missing}"


def test_the_prelude_refuses_connections() -> None:
    with pytest.raises(AssertionError, match="the network is used"):
        printed("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')")


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "moepack", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"moepack {moepack.__version__}\n"


def test_extras_name_only_packages_of_their_systems() -> None:
    """CUDA's packages have no wheels for macOS: a requirement without a marker would break the installation there."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    cuda = [each for extra in extras.values() for each in extra if each.startswith(("cupy", "nvidia"))]
    assert cuda and all("platform_system" in each and "platform_machine" in each for each in cuda)


def test_the_version_is_that_of_the_distribution() -> None:
    assert importlib.metadata.version("moepack") == moepack.__version__

"""Shared fixtures: tiny random checkpoints, built once per session. Treat them as read-only."""

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import moepack
import tiny_models
from moepack.backends.gpu import compiler
from moepack.backends.speeds import Speeds
from moepack.census.tiny import tiny_model
from moepack.methods.qmoe.ternary import Ternary
from moepack.textfile import BUILT_IN
from packed_support import FAST, calibration_text
from places import TINY_MOE

UNCALIBRATED = (moepack.methods.FineQuant, moepack.methods.Rate)
"""Methods whose default text is left out of the tests."""

EVEN = Speeds("test", dict.fromkeys(("int2", "int3", "int4", "int8", "coded2", "coded4"), 1e9), 1e12)


def pytest_configure(config: pytest.Config) -> None:
    """Let `finequant` and `rate` read no text unless a test names one: the built-in text takes seconds for each model.

    Tests of the default have the mark `built_in_text`; processes that tests start have the default as well.
    """
    config.addinivalue_line("markers", "built_in_text: `finequant` and `rate` read the built-in text by default")
    for method in UNCALIBRATED:
        _set_default_text(method, BUILT_IN, None)


def _set_default_text(method: type, old: str | None, new: str | None) -> None:
    """Replace the default of the setting `calibration`; `settings_of` keeps showing the declared one."""
    names = list(inspect.signature(method).parameters)
    defaults: list[Any] = list(method.__init__.__defaults__)
    position = names.index("calibration") - len(names)
    assert defaults[position] == old
    defaults[position] = new
    method.__init__.__defaults__ = tuple(defaults)


@pytest.fixture(autouse=True)
def _built_in_text(request: pytest.FixtureRequest) -> Iterator[None]:
    """Restore the default text for tests with the mark `built_in_text`."""
    if request.node.get_closest_marker("built_in_text") is None:
        yield
        return
    for method in UNCALIBRATED:
        _set_default_text(method, None, BUILT_IN)
    yield
    for method in UNCALIBRATED:
        _set_default_text(method, BUILT_IN, None)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Separate cache directories for the session: no measurement of another run is used.

    All formats are as fast on the machine that runs the tests, so that plans do not depend on it.
    Processes of one run share compiled kernels, whose names tell everything that they depend on.
    """
    run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = run.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("moepack.backends.targets.speeds_here", lambda device="cpu": EVEN)
        patch.setenv(compiler.VARIABLE, str(run / "compiled"))
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from an architecture (`tiny_models.ARCHITECTURES`) to the directory of its tiny checkpoint."""
    root = tmp_path_factory.mktemp("checkpoints")

    def directory(architecture: str) -> Path:
        path = root / architecture
        return path if path.exists() else tiny_models.build(architecture, path)

    return directory


@pytest.fixture(scope="session")
def mixtral(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("mixtral")


@pytest.fixture(scope="session")
def qwen3_moe(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("qwen3_moe")


@pytest.fixture(scope="session")
def switch(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("switch_transformers")


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two layers of the example model, for properties that need no good model."""
    return tiny_models.first_layers(TINY_MOE, tmp_path_factory.mktemp("shallow") / "model", 2)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration text."""
    return calibration_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="session")
def packed(mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packed directory of the tiny Mixtral. Read-only: copy it to damage it."""
    out = tmp_path_factory.mktemp("packed") / "mixtral"
    moepack.compress(mixtral, out, method=Ternary())
    return out


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a model type to the directory of its tiny checkpoint."""
    root = tmp_path_factory.mktemp("census")

    def directory(family: str) -> Path:
        if family not in transformers.CONFIG_MAPPING:
            pytest.skip(f"transformers {transformers.__version__} has no {family}")
        if not (root / family).exists():
            tiny_model(family).to(torch.bfloat16).save_pretrained(root / family)
        return root / family

    return directory


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of a hub that is offline."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


@pytest.fixture
def fast_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that prefers speed reads `packed_support.FAST` instead of measuring this machine."""
    monkeypatch.setattr("moepack.backends.targets.speeds_here", lambda device="cpu": FAST)

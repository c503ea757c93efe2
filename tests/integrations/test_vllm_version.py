"""The versions of vLLM that the plugin supports."""

import tomllib

import pytest

from moepack.vllm.version import SUPPORTED, unsupported
from places import ROOT


def test_the_extra_allows_the_supported_versions() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [requirement] = extras["vllm"]
    assert set(requirement.removeprefix("vllm").split(",")) == set(str(SUPPORTED).split(","))


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.dev4+g123", "0.33.0", "0.33.9", "dev"])
def test_versions_in_the_range_are_supported(version: str) -> None:
    assert unsupported(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.34.0rc1", "1.0"])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    assert unsupported(version) == f"moepack supports vLLM from 0.32 to below 0.34, but vLLM {version} is installed"

"""Dependencies of the package: registry crates only, with redistributable licenses, listed in the installed package.

The list is a CycloneDX software bill of materials at the location defined by PEP 770. Known vulnerabilities:
`.ci/audit.py`.
"""

import importlib.metadata
import json
import re
import tomllib
from typing import Any

import pytest

from places import ROOT

LICENSES = {"Apache-2.0", "MIT", "BSD-2-Clause", "BSD-3-Clause", "Unicode-3.0", "Zlib", "Unlicense"}


@pytest.fixture(scope="module")
def locked() -> dict[tuple[str, str], dict[str, Any]]:
    packages = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    return {(package["name"], package["version"]): package for package in packages}


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    files = importlib.metadata.files("moepack") or []
    return json.loads(next(file for file in files if file.match("sboms/*.cyclonedx.json")).read_text())


def test_crates_come_from_the_registry(locked: dict[tuple[str, str], dict[str, Any]]) -> None:
    own = {name for (name, _), package in locked.items() if "source" not in package}
    assert own == {"moepack-core", "moepack-fuzz", "moepack-py", "moepack-tools"}
    others = [package for package in locked.values() if "source" in package]
    assert all(package["source"].startswith("registry+") and package["checksum"] for package in others)


def test_the_package_lists_the_crates_that_it_is_built_of(
    locked: dict[tuple[str, str], dict[str, Any]], bill: dict[str, Any]
) -> None:
    assert bill["bomFormat"] == "CycloneDX"
    listed = {(each["name"], each["version"]) for each in bill["components"]}
    assert listed <= set(locked)
    crates = [tomllib.loads((ROOT / "rust" / crate / "Cargo.toml").read_text()) for crate in ("core", "py")]
    assert {name for crate in crates for name in crate["dependencies"]} <= {name for name, _ in listed}


def test_licenses_may_be_passed_on(bill: dict[str, Any]) -> None:
    for each in bill["components"]:
        choices = each["licenses"][0]["expression"].replace(" WITH LLVM-exception", "").split(" OR ")
        terms = [set(re.findall(r"[\w.-]+", choice)) - {"AND"} for choice in choices]
        assert any(choice <= LICENSES for choice in terms), (each["name"], choices)

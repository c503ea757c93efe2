"""`.ci/release.py` accepts this checkout, and finds what is wrong with a release."""

import importlib.util
import zipfile
from pathlib import Path

import pytest

from places import ROOT

SPEC = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
assert SPEC and SPEC.loader
release = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(release)

FILES = [pattern.replace("*", "x").replace("[od]", "so") for pattern in release.IN_WHEEL]
METADATA = """Metadata-Version: 2.4
Name: moepack
Version: {version}
Summary: summary
Author: someone
License-Expression: Apache-2.0
License-File: LICENSE
Keywords: one,two
Classifier: Typing :: Typed
Description-Content-Type: text/markdown

text
"""


EXTENSION = b"\0PyInit__core\0"


def wheel(
    folder: Path,
    tag: str = "cp311-abi3-win_amd64",
    leave_out: str = "",
    more: str = "",
    old: str = "",
    extension: bytes = EXTENSION,
) -> Path:
    """Write a wheel with files of the right names, all empty but the extension."""
    version = release.version()
    path = folder / f"moepack-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as files:
        for name in filter(None, [*FILES, more]):
            if name != leave_out:
                files.writestr(name, extension if "_core" in name else b"")
        content = METADATA.format(version=version).replace(old, "") if old else METADATA.format(version=version)
        files.writestr(f"moepack-{version}.dist-info/METADATA", content)
    return path


def test_the_versions_of_this_checkout_agree() -> None:
    assert list(release.wrong_versions()) == []


@pytest.mark.parametrize("name", ["CHANGELOG.md", "CITATION.cff", "Cargo.lock", "pyproject.toml"])
def test_another_version_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("Cargo.toml", "Cargo.lock", "pyproject.toml", "CHANGELOG.md", "CITATION.cff"):
        (tmp_path / file).write_text((ROOT / file).read_text("utf-8"), "utf-8")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    text = (tmp_path / name).read_text("utf-8")
    changed = text.replace('dynamic = ["version"]', 'version = "9.9.9"').replace(release.version(), "9.9.9")
    (tmp_path / name).write_text(changed, "utf-8")
    assert all(problem.startswith(name) for problem in release.wrong_versions()) and list(release.wrong_versions())


def test_a_tag_needs_a_date_and_a_repository() -> None:
    found = " ".join(release.unfinished("v0.0.1"))
    assert "the tag is v0.0.1" in found


def test_a_complete_wheel_is_accepted(tmp_path: Path) -> None:
    assert list(release.wrong_wheel(wheel(tmp_path))) == []


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(name: str, tmp_path: Path) -> None:
    (problem,) = release.wrong_wheel(wheel(tmp_path, leave_out=name))
    assert problem.endswith("is missing")


def test_an_extension_that_python_cannot_import_is_found(tmp_path: Path) -> None:
    (problem,) = release.wrong_wheel(wheel(tmp_path, extension=b"\0PyInit_moepack._core\0"))
    assert problem == "moepack/_core.xso does not export PyInit__core, so Python cannot import it"


@pytest.mark.parametrize("name", ["tests/test_x.py", "moepack/cli/__pycache__/x.pyc"])
def test_a_foreign_file_is_found(name: str, tmp_path: Path) -> None:
    assert f"{name} does not belong in it" in list(release.wrong_wheel(wheel(tmp_path, more=name)))


def test_a_tag_of_one_python_is_found(tmp_path: Path) -> None:
    (problem,) = release.wrong_wheel(wheel(tmp_path, tag="cp313-cp313-win_amd64"))
    assert "cp311-abi3" in problem


@pytest.mark.parametrize(
    "line", ["Summary: summary\n", "Author: someone\n", "License-Expression: Apache-2.0\n", "Keywords: one,two\n"]
)
def test_an_empty_field_is_found(line: str, tmp_path: Path) -> None:
    (problem,) = release.wrong_wheel(wheel(tmp_path, old=line))
    assert problem.startswith("metadata: ")


def test_a_large_wheel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "LARGEST", 100)
    (problem,) = release.wrong_wheel(wheel(tmp_path))
    assert "more than 100" in problem

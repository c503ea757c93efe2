"""Looks up every dependency in public vulnerability databases.

The crates of Cargo.lock are looked up in RustSec's advisory-db, the installed Python packages in PyPA's
advisory-database. Both are git repositories that must already be on disk.

    python .ci/audit.py RUSTSEC PYPA

Prints affected dependencies and the number checked; the exit code is 1 if any is affected.
"""

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def crates(advisories: Path) -> Iterator[tuple[str, str, bool]]:
    """Every advisory for a crate of Cargo.lock: advisory, crate, and whether the locked version is affected."""
    for package in tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]:
        for file in sorted((advisories / "crates" / package["name"]).glob("*.md")):
            content = tomllib.loads(re.search(r"```toml\n(.*?)```", file.read_text(), re.DOTALL)[1])
            versions = content.get("versions", {})
            sound = [*versions.get("patched", []), *versions.get("unaffected", [])]
            affected = not any(allows(version, package["version"]) for version in sound)
            yield (
                file.stem,
                f"{package['name']} {package['version']}",
                affected and "withdrawn" not in content["advisory"],
            )


def allows(requirement: str, version: str) -> bool:
    """Whether a version meets Cargo's requirement: `>=1.2, <2`, `^1.2`, `1.2`."""
    parts = []
    for part in requirement.split(","):
        operator, number = re.match(r"\s*([<>=~^]*)\s*(\S+)", part).groups()
        if operator in ("", "^", "~"):
            release = [*Version(number).release, 0, 0][:3]
            place = 1 if operator == "~" else next((i for i, digit in enumerate(release) if digit), 2)
            parts.append(f">={number}, <" + ".".join(map(str, [*release[:place], release[place] + 1])))
        else:
            parts.append(operator.replace("=", "==") + number if operator == "=" else operator + number)
    try:
        return SpecifierSet(", ".join(parts)).contains(version, prereleases=True)
    except InvalidSpecifier:
        return False


def distributions(advisories: Path) -> Iterator[tuple[str, str, bool]]:
    """Like `crates`, for the installed Python packages."""
    for each in importlib.metadata.distributions():
        name, version = canonicalize_name(each.name), Version(each.version)
        for file in sorted((advisories / "vulns" / name).glob("*.yaml")):
            content = yaml.safe_load(file.read_text())
            affected = any(concerns(found, version) for found in content["affected"])
            yield content["id"], f"{name} {version}", affected and "withdrawn" not in content


def concerns(found: dict, version: Version) -> bool:
    """Whether a version is listed, or lies in a range of versions."""
    if str(version) in found.get("versions", []):
        return True
    inside = False
    for each in found.get("ranges", []):
        if each["type"] == "ECOSYSTEM":
            inside |= since(each["events"], version)
    return inside


def since(events: list[dict[str, str]], version: Version) -> bool:
    """Whether the last event at or before a version introduced the vulnerability."""
    inside = False
    for event in events:
        (kind, number), *_ = event.items()
        if number == "0" or Version(number) <= version:
            inside = kind == "introduced"
    return inside


def main(rustsec: Path, pypa: Path) -> int:
    """Print the affected dependencies; return the exit code."""
    bad = 0
    for what, found in (("crates", list(crates(rustsec))), ("Python packages", list(distributions(pypa)))):
        affected = [(advisory, package) for advisory, package, is_affected in found if is_affected]
        bad += len(affected)
        print(f"{len(found)} advisories for {what}, {len(affected)} of them for these versions")
        for advisory, package in affected:
            print(f"  {package}: {advisory}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

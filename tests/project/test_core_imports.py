"""No module of the Rust core imports in a circle, and formats know neither products nor streaming.

A module imports the module that defines a name, however the name is re-exported: `use super::Layout` in `view.rs` is an
import of `layout.rs`. Qualified paths in the code count like `use`. Declarations (`mod`), re-exports (`pub use`),
comments and tests import nothing.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from places import ROOT

CORE = ROOT / "rust" / "core" / "src"

Place = tuple[str, ...]
"""The path of a module or an item from the root of the crate."""

VISIBILITY = r"(pub(?:\([^)]*\))?\s+)?"
USE = re.compile(rf"^[ \t]*{VISIBILITY}use\s+([^;]+);", re.MULTILINE)
INLINE = re.compile(rf"^([ \t]*){VISIBILITY}mod \w+ \{{\n.*?^\1\}}$", re.MULTILINE | re.DOTALL)
TESTS = re.compile(rf"^#\[cfg\(test\)\]\s*{VISIBILITY}mod (\w+)(?:;| \{{\n.*?^\}}$)", re.MULTILINE | re.DOTALL)
QUALIFIED = re.compile(r"(?<![\w:])\w+(?:::\w+)+")


class Core:
    """The modules of a crate by their places, and where each re-exported name comes from."""

    def __init__(self, root: Path) -> None:
        files = {place_of(path.relative_to(root)): path.read_text() for path in root.rglob("*.rs")}
        tests = {(*place, name) for place, text in files.items() for _, name in TESTS.findall(text)}
        self.texts = {
            place: TESTS.sub("", re.sub(r"//.*", "", text))
            for place, text in files.items()
            if not any(place[: len(test)] == test for test in tests)
        }
        self.exports: dict[Place, dict[str, Place]] = {place: {} for place in self.texts}
        for place, text in self.texts.items():
            for visibility, tree in USE.findall(text):
                if visibility:
                    self.exports[place] |= {name: self.absolute(place, path) for path, name in leaves(tree)}

    def absolute(self, place: Place, path: Place) -> Place:
        """The path from the root; empty for paths into other crates."""
        first, *rest = path
        while first == "super":
            place, (first, *rest) = place[:-1], rest if rest and rest[0] == "super" else ["self", *rest]
        if first == "crate":
            return tuple(rest)
        if first == "self":
            return (*place, *rest)
        return (*place, *path) if (*place, first) in self.texts else ()

    def module(self, path: Place) -> Place:
        """The module that defines what is at a path."""
        place: Place = ()
        for number, name in enumerate(path):
            if (*place, name) in self.texts:
                place = (*place, name)
            elif source := self.exports[place].get(name):
                return self.module((*source, *path[number + 1 :]))
            else:
                break
        return place

    def imports(self, place: Place) -> set[Place]:
        """The modules that a module imports."""
        # A module within a file names the file's items by `super`, which are not imported.
        text = INLINE.sub(lambda found: found[0].replace("super::", "self::", 1), self.texts[place])
        trees = USE.findall(text)
        paths = [path for visibility, tree in trees if not visibility for path, _ in leaves(tree)]
        paths += [tuple(found.split("::")) for found in QUALIFIED.findall(USE.sub("", text))]
        found = {self.module(absolute) for path in paths if (absolute := self.absolute(place, path))}
        return found - {place}


def place_of(path: Path) -> Place:
    """The module of a source file."""
    parts = path.with_suffix("").parts
    return parts[:-1] if parts[-1] in ("mod", "lib") else parts


def leaves(tree: str, prefix: Place = ()) -> Iterator[tuple[Place, str]]:
    """The paths of a `use` tree, and the name that each gets."""
    for part in split(tree):
        path, _, inner = part.partition("{")
        path, _, alias = path.partition(" as ")
        place = (*prefix, *(name for name in path.strip().split("::") if name))
        if inner:
            yield from leaves(inner.removesuffix("}"), place)
        elif place[-1] in ("self", "*"):
            yield place[:-1], alias or place[-2]
        else:
            yield place, alias or place[-1]


def split(tree: str) -> list[str]:
    """Split at the commas outside of braces."""
    depth, parts = 0, [""]
    for letter in tree:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def circles(imports: dict[Place, set[Place]]) -> list[list[Place]]:
    """The largest sets of modules each of which reaches all others."""
    reached = {place: set(found) for place, found in imports.items()}
    for middle in reached:
        for found in reached.values():
            if middle in found:
                found |= reached[middle]
    groups = {tuple(sorted(other for other in reached[place] if place in reached[other])) for place in reached}
    return [list(group) for group in sorted(groups) if group]


@pytest.fixture(scope="module")
def imports() -> dict[Place, set[Place]]:
    core = Core(CORE)
    return {place: core.imports(place) for place in core.texts}


def test_no_module_imports_in_a_circle(imports: dict[Place, set[Place]]) -> None:
    assert circles(imports) == []


def test_formats_import_neither_products_nor_streaming(imports: dict[Place, set[Place]]) -> None:
    found = {
        ("::".join(place), "::".join(other))
        for place, others in imports.items()
        for other in others
        if place[:1] == ("formats",) and other[:1] in {("gemm",), ("streaming",), ("decoder",), ("tensor",)}
    }
    assert not found


def test_the_reader_finds_imports_and_circles(tmp_path: Path) -> None:
    for name, text in {
        "lib.rs": "mod a;\nmod room;\npub use room::Inner;\nmacro_rules! item { () => {} }\n",
        "a.rs": "use crate::{Inner as Other, room::{self, plain}};\n// use crate::room::deep;\n",
        "room/mod.rs": "mod deep;\npub mod plain;\npub use deep::*;\npub use deep::Inner;\nfn f() { plain::g() }\n",
        "room/deep.rs": "use std::fmt;\nmod own {\n    use super::Inner;\n}\npub struct Inner;\n",
        "room/plain.rs": "use super::f;\n#[cfg(test)]\nmod tests {\n    use crate::a;\n}\n#[cfg(test)]\nmod more;\n",
        "room/plain/more.rs": "use crate::a;\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    core = Core(tmp_path)
    found = {"::".join(place): {"::".join(other) for other in core.imports(place)} for place in core.texts}
    assert found == {
        "": set(),
        "a": {"room::deep", "room", "room::plain"},
        "room": {"room::plain"},
        "room::deep": set(),
        "room::plain": {"room"},
    }
    assert circles({place: core.imports(place) for place in core.texts}) == [[("room",), ("room", "plain")]]

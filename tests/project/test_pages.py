"""Every file and module that the pages and the sources name exists."""

import re

from places import ROOT

PATH = re.compile(r"\b(?:rust|python|tests|cuda|docs)/[\w/.-]*\w\.(?:rs|py|pyi|md|cu|cuh|bin|toml)\b")
MODULE = re.compile(r"\bmoepack(?:\.[a-z_]\w*){2,}")


def texts() -> dict[str, str]:
    """Return the pages and the sources of the product, by path relative to the checkout."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for place, ending in (("python", "*.py"), ("rust", "*.rs"), ("cuda", "*.cu*")):
        files += (file for file in (ROOT / place).rglob(ending) if "target" not in file.parts)
    return {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in files}


def names_nothing(name: str) -> bool:
    """Return whether a dotted name leads to no module, and to no name that a package mentions."""
    place = ROOT / "python" / "moepack"
    for part in name.split(".")[1:]:
        if not (place / part).is_dir():
            init = place / "__init__.py"
            is_module = (place / f"{part}.py").is_file() or any(place.glob(f"{part}.*"))
            return not is_module and not (init.is_file() and re.search(rf"\b{part}\b", init.read_text("utf-8")))
        place /= part
    return False


def missing(text: str) -> list[str]:
    """Return the paths and modules that `text` names and that do not exist."""
    paths = [found for found in PATH.findall(text) if not (ROOT / found).exists()]
    return paths + [found for found in MODULE.findall(text) if names_nothing(found)]


def test_every_file_and_module_that_is_named_exists() -> None:
    assert {name: found for name, text in texts().items() if (found := missing(text))} == {}


def test_a_file_and_a_module_that_do_not_exist_are_found() -> None:
    assert missing("`rust/core/src/attic.rs`, `docs/none.md`") == ["rust/core/src/attic.rs", "docs/none.md"]
    assert missing("`moepack.runtime.attic`, `moepack.decoding.plan.Plan`, `moepack.decoding.translation.Guard`") == [
        "moepack.runtime.attic",
        "moepack.decoding.plan.Plan",
    ]

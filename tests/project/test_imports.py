"""No module of the package imports itself through others."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from places import ROOT

PACKAGE = ROOT / "python" / "moepack"


def name_of(file: Path, root: Path) -> str:
    """The dotted name of a module; that of a package for its `__init__.py`."""
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def executed(nodes: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when a module is imported: outside of functions and `if TYPE_CHECKING`."""
    for node in nodes:
        match node:
            case ast.Import() | ast.ImportFrom():
                yield node
            case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from executed(node.orelse)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                continue
            case _:
                for field in ("body", "orelse", "finalbody"):
                    yield from executed(getattr(node, field, []))
                for handler in getattr(node, "handlers", []):
                    yield from executed(handler.body)


def imports(root: Path) -> dict[str, set[str]]:
    """The modules that each module below `root` imports when it is imported."""
    files = {name_of(file, root): file for file in sorted(root.rglob("*.py"))}
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        found[name] = set()
        for node in executed(ast.parse(file.read_text(encoding="utf-8")).body):
            if isinstance(node, ast.Import):
                targets = {alias.name for alias in node.names}
            else:
                above = package.rsplit(".", node.level - 1)[0] if node.level else ""
                base = ".".join(filter(None, (above, node.module)))
                submodules = {f"{base}.{alias.name}" for alias in node.names}
                targets = {target if target in files else base for target in submodules}
            found[name] |= {target for target in targets if target in files}
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_through_others() -> None:
    graph = imports(PACKAGE.parent)
    assert len(graph) > 300 and sum(map(len, graph.values())) > 1000
    assert circle(graph) == []


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("from pkg.a import x", True),
        ("from pkg import a", True),
        ("from . import a", True),
        ("from .a import x", True),
        ("import pkg.a", True),
        ("try:\n    import pkg.a\nexcept ImportError:\n    pass", True),
        ("class B:\n    from pkg.a import x", True),
        ("def f():\n    import pkg.a", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pkg.a", False),
        ("import json", False),
    ],
)
def test_a_circle_is_found(tmp_path: Path, other: str, expected: bool) -> None:
    (tmp_path / "pkg").mkdir()
    for name, text in {"__init__": "", "a": "from pkg.b import y", "b": other}.items():
        (tmp_path / "pkg" / f"{name}.py").write_text(text)
    assert bool(circle(imports(tmp_path))) is expected

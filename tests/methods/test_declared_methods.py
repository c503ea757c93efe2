"""One declaration of a method serves every door: Python, the command line, the plan, the manifest and comparisons."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import moepack
from command_support import run
from moepack import _core
from moepack.cli import make_app
from moepack.methods import (
    METHODS,
    Method,
    PackedBytes,
    SimpleMethod,
    Solution,
    Stage,
    Weights,
    create,
    method_class,
    register,
)  # fmt: skip
from moepack.methods.base import Shape
from moepack.methods.fitting import Fitted, Wanted
from moepack.methods.settings import REQUIRED, Setting, setting, settings_of
from moepack.pipeline.costs import STARTED
from moepack.pipeline.estimate import estimate
from moepack.solvers.groupwise import quantize_groupwise
from places import NOVEL, ROOT, TINY_MOE


@dataclass
class Toy(Fitted, SimpleMethod):
    """Integers in groups of 64 columns, of weights that are multiplied by a factor first."""

    width: int = setting(8, help="Bits per toy code", users="expert", choices=(4, 8))
    factor: float = setting(1.0, help="Factor on all weights", users="basic", above=0, maximum=1)
    patience: int = setting(3, help="Changes nothing", minimum=0, recorded=False)
    name: ClassVar[str] = "toy"
    summary: ClassVar[str] = "integers for tests"
    seconds: ClassVar[float | None] = 50

    def bound(self, shape: Shape, role: str = "experts") -> int:
        return _core.packed_bytes("groupwise", shape, bits=self.width, group_size=64, symmetric=True)

    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        ((name, weights),) = stage.tensors.items()
        found = [quantize_groupwise(self.factor * weights.expert(e), self.width, 64) for e in range(weights.shape[0])]
        parts = {part: torch.stack([getattr(each, part) for each in found]) for part in ("codes", "scales")}
        return {name: Solution(parts)}

    def pack(self, weights: Weights, solution: Solution) -> PackedBytes:
        codes, scales = solution.parts["codes"].numpy(), solution.parts["scales"].float().numpy()
        blob = _core.encode_groupwise(codes, scales, None, bits=self.width, group_size=64, ndim=weights.ndim)
        return PackedBytes("groupwise", blob, {"bits": self.width})

    @classmethod
    def fitted(cls, wanted: Wanted) -> Method:
        return cls(8 if wanted.bits(()) > 8.5 else 4)


@dataclass(frozen=True)
class Fixed(SimpleMethod):
    """A method whose attributes cannot be assigned."""

    name: ClassVar[str] = "fixed"
    bound, solve, pack = Toy.bound, Toy.solve, Toy.pack


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the toy method, and rebuild the command line as a program that registers it first would find it."""
    register(Toy)
    monkeypatch.setattr("moepack.cli.app", make_app())
    yield
    del METHODS["toy"]


def test_a_registered_method_is_used_from_python(toy: None, mixtral: Path, tmp_path: Path) -> None:
    report = moepack.compress(mixtral, tmp_path / "out", method="toy", width=4)
    assert 4 < report.bits_per_weight < 5
    manifest = moepack.PackedDirectory.open(tmp_path / "out").manifest
    assert manifest.method == "toy" and manifest.settings == {"width": 4, "factor": 1.0}
    assert create("toy", width="4", factor="0.5") == Toy(4, 0.5), "text is converted"
    for wrong, message in (
        ({"width": 5}, "width must be 4 or 8, not 5"),
        ({"factor": 0}, "factor must be above 0, not 0|factor must be at most 1 and above 0, not 0"),
        ({"factor": float("nan")}, "factor must be"),
        ({"patience": -1}, "patience must be at least 0, not -1"),
        ({"width": "wide"}, "width must be a number, not 'wide'"),
        ({"width": 4.5}, "width must be a whole number, not 4.5"),
        ({"depth": 1}, "the method toy has no setting depth; available: width, factor, patience"),
    ):
        with pytest.raises(ValueError, match=message):
            create("toy", **wrong)
    with pytest.raises(ValueError, match="already a method 'toy'"):
        register(Toy)


def test_a_tensor_without_a_solution_is_named(
    toy: None, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Toy, "solve", lambda self, stage: {})
    with pytest.raises(ValueError, match=r"the method toy returned no solution for model\.layers\.0.*gate_proj"):
        moepack.compress(mixtral, tmp_path / "out", method="toy")


def test_a_frozen_method_takes_bits_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "fixed", Fixed)
    assert create("fixed", bits={"*": 4}).overrides == create("auto", bits={"*": 4}).overrides


def test_a_registered_method_has_options_and_a_plan(
    toy: None, mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    _, text, _ = run(capsys, "compress", "--help")
    text = " ".join(text.split())
    assert "Bits per toy code (4 or 8; default 8)." in text and "Factor on all weights; default 1.0." in text
    assert "toy: integers for tests. --width --factor" in text and "patience" not in text
    assert text.index("--factor") < text.index("─ Research") < text.index("Research: --method toy")
    code, out, _ = run(capsys, "compress", mixtral, tmp_path / "out", "--method", "toy", "--width", 4, "--dry-run")
    assert code == 0 and "toy: integers for tests" in out and "width 4, factor 1.0" in out
    code, _, error = run(capsys, "compress", mixtral, tmp_path / "out", "--method", "toy", "--bits", 4)
    assert code == 2 and "--method toy does not take --bits; it takes --width, --factor" in error
    code, _, error = run(capsys, "compress", mixtral, tmp_path / "out", "--method", "toy", "--width", 5)
    assert code == 2 and "width must be 4 or 8, not 5" in error
    assert run(capsys, "compress", mixtral, tmp_path / "out", "--method", "toy", "--factor", 0.5)[0] == 0
    plan = estimate(mixtral, tmp_path / "other", Toy(4), threads=1)
    assert plan.seconds == pytest.approx(STARTED + 50e-9 * sum(part.weights for part in plan.parts))


def test_a_registered_method_is_compared(toy: None, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(
        capsys, "compare", TINY_MOE, "--text", NOVEL, "--sizes", "80%", "--methods", "toy", "--chars", 2000, "--json"
    )
    assert code == 0, error
    assert json.loads(out)["method"] == "toy"


def test_a_registered_method_is_in_the_table(toy: None, capsys: pytest.CaptureFixture[str]) -> None:
    _, page, _ = run(capsys, "methods", "--markdown")
    assert "## toy\nIntegers for tests." in page
    assert "| `width` | `--width` | 4 or 8 | 8 | Bits per toy code. |" in page
    assert "| `patience` |  | int | 3 | Changes nothing. |" in page
    _, text, _ = run(capsys, "methods")
    assert "toy: integers for tests\n    --width --factor\n" in text


def test_the_page_of_settings_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    _, page, _ = run(capsys, "methods", "--markdown")
    assert (ROOT / "docs" / "methods" / "settings.md").read_text(encoding="utf-8") == page


@pytest.mark.parametrize("room", ["codequant", "floe", "milo"])
def test_a_method_without_others_on_top_is_named_by_the_list_of_methods_only(room: str) -> None:
    """So a new method changes its room and `methods/__init__.py`."""
    package = ROOT / "python" / "moepack"
    imported = re.compile(rf"^ *(?:from|import) moepack\.methods\.{room}\b", re.MULTILINE)
    files = {str(f.relative_to(package)) for f in package.rglob("*.py") if imported.search(f.read_text("utf-8"))}
    assert {file for file in files if not file.startswith(f"methods/{room}/")} == {"methods/__init__.py"}


def wrong_values(setting: Setting) -> Iterator[Any]:
    """Values that a declaration rules out."""
    if setting.choices:
        yield from ("no such value", 77) if str in setting.types else (77,)
    for bound, step in ((setting.minimum, -1), (setting.maximum, 1), (setting.above, 0), (setting.below, 0)):
        if bound is not None:
            yield bound + step


EVERY = [(name, each) for name, declaration in METHODS.items() for each in settings_of(declaration)]


@pytest.mark.parametrize(("method", "declared"), EVERY, ids=lambda value: getattr(value, "name", value))
def test_every_value_that_a_declaration_rules_out_is_refused_by_name(method: str, declared: Setting) -> None:
    needed = {"calibration": "text.txt", "bits_per_weight": 1.0}
    given = {key: needed[key] for key in (s.name for s in settings_of(METHODS[method]) if s.default is REQUIRED)}
    for value in wrong_values(declared):
        with pytest.raises(ValueError, match=rf"^{declared.name} must be "):
            create(method, **{**given, declared.name: value})
    made = create(method, **given)
    assert isinstance(made, method_class(method)) and made.name == method


def test_numbers_may_be_given_as_text() -> None:
    assert create("finequant", bits="8", group_size="32") == create("finequant", bits=8, group_size=32)
    assert create("rate", bits_per_weight="2.5") == create("rate", bits_per_weight=2.5)
    assert create("qmoe", calibration="x", bits=2) == create("qmoe", calibration="x", bits="2")

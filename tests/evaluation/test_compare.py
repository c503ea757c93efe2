"""`moepack compare`: methods meet a size, figures, and a chart that any browser can open."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from command_support import run
from moepack.checkpoint import Checkpoint, describe
from moepack.comparison import chart, draw, fitted, fittings
from moepack.comparison.fitting import Wanted
from places import NOVEL, TINY_MOE


def test_every_method_can_be_fitted_to_a_large_size() -> None:
    checkpoint = Checkpoint.open(TINY_MOE)
    wanted = Wanted(checkpoint, describe(checkpoint), 5_000_000, {"calibration": str(NOVEL), "samples": 4})
    for name in fittings():
        assert fitted(name, wanted).name in ("auto", "rate", "finequant", "milo", "qmoe")
    small = Wanted(checkpoint, describe(checkpoint), 2_300_000, {})
    for name in ("finequant", "milo", "qmoe"):
        with pytest.raises(ValueError):
            fitted(name, small)
    with pytest.raises(ValueError, match="cannot compare"):
        fitted("zip", wanted)


def test_a_comparison_is_a_table_and_a_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(
        capsys, "compare", TINY_MOE, "--text", NOVEL, "--sizes", "70%,4MB",
        "--methods", "auto without a text,finequant", "--chars", 3000, "--chart", tmp_path / "chart.svg", "--json",
    )  # fmt: skip
    assert code == 0, error
    points = [json.loads(line) for line in out.splitlines()]
    assert {point["method"] for point in points} == {"auto without a text", "finequant"}
    assert all(point["size"] <= point["wanted"] for point in points if point["method"] != "finequant")
    assert all(-0.1 < point["rise"]["white-fang"] < 1 for point in points)
    picture = ElementTree.parse(tmp_path / "chart.svg").getroot()
    assert picture.tag.endswith("svg") and "finequant" in "".join(picture.itertext())


@pytest.mark.parametrize(("low", "high"), [(2.5, 4.74), (0.0, 1.0), (30.0, 31.0), (1e6, 9e9), (2.0, 2.0)])
def test_ticks_across_are_round_numbers_between_the_ends(low: float, high: float) -> None:
    ticks = chart._round_numbers(low, high)
    assert 1 <= len(ticks) <= 9 and low * (1 - 1e-9) <= ticks[0] and ticks[-1] <= high * (1 + 1e-9)
    assert all(len(f"{tick:.10g}".replace(".", "").strip("0")) <= 3 for tick in ticks), ticks


@pytest.mark.parametrize(("least", "most"), [(0.074, 2.187), (1e-4, 1e-4), (0.02, 0.05), (0.5, 13.2)])
def test_lines_of_a_chart_are_1_2_and_5_and_hold_all_points(least: float, most: float) -> None:
    ticks = chart._ticks(least, most)
    assert len(ticks) >= 2 and ticks[0] <= least * (1 + 1e-9) and ticks[-1] >= most * (1 - 1e-9)
    assert all(f"{tick:.3e}"[:5] in ("1.000", "2.000", "5.000") for tick in ticks), ticks


def test_names_in_a_chart_are_text() -> None:
    assert "&lt;b&gt;" in draw("<b>", "MB", {"<i>": [(1.0, 0.1), (2.0, 0.0)], "none": []})


def test_sizes_that_cannot_be_met_and_unusable_texts_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "compare", TINY_MOE, "--text", NOVEL, "--chars", 4000
    code, out, error = run(capsys, *asked, "--methods", "rate", "--sizes", "40%", "--calibration", "absent.txt")
    assert (code, out) == (1, "") and "absent.txt" in error
    code, out, error = run(capsys, *asked, "--methods", "finequant", "--sizes", "2%", "--calibration", "none")
    assert (code, out) == (2, "") and "finequant cannot meet" in error and "no method meets any" in error


def test_unknown_methods_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--methods", "zip"], ["--sizes", "much"]):
        code, _, error = run(capsys, "compare", TINY_MOE, "--text", NOVEL, "--chars", 600, *options)
        assert code == 2 and error.count("\n") == 1

"""The check at the end of `compress`: the measured loss, and a note if it is far from the plan."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import moepack
from moepack.cli import app
from moepack.errors import NonFiniteError
from moepack.methods import Auto, FineQuant
from moepack.pipeline import check
from places import NOVEL, TINY_MOE


def auto(**settings) -> Auto:
    return Auto(bits_per_weight=3.0, calibration=str(NOVEL), samples=4, sequence_length=64, **settings)


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    """Read a third of the usual part of the text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "CHARACTERS", 3500)
        yield


@pytest.fixture(scope="module")
def report(_short: None, shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> moepack.CompressReport:
    return moepack.compress(shallow, tmp_path_factory.mktemp("checked") / "out", method=auto(), check=True)


def test_the_increase_is_that_of_evaluate(report: moepack.CompressReport, shallow: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(NOVEL.read_text(encoding="utf-8")[: check.CHARACTERS], encoding="utf-8")
    found = moepack.evaluate(report.path, text, reference=shallow)
    assert report.increase == pytest.approx(found.loss - found.reference_loss, abs=1e-5)
    assert 0.02 < report.increase < 1


def test_small_models_are_checked_where_that_is_asked_for(mixtral: Path, tmp_path: Path) -> None:
    calibrated = FineQuant(calibration=str(NOVEL), samples=4, sequence_length=64)
    assert moepack.compress(mixtral, tmp_path / "out", method=calibrated).increase is None
    assert check.is_checked(None, auto().request, check.LARGE)
    assert not check.is_checked(None, auto().request, check.LARGE - 1)
    assert not check.is_checked(None, None, check.LARGE), "nothing was calibrated"
    assert check.is_checked(True, None, 1) and not check.is_checked(False, auto().request, check.LARGE)


def test_a_method_without_a_text_is_checked_on_the_built_in_one(tmp_path: Path) -> None:
    report = moepack.compress(TINY_MOE, tmp_path / "out", method="finequant", bits=2, check=True)
    assert report.increase is not None and report.increase > 0.05


def test_a_loss_far_from_the_plan_is_reported_with_remedies(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Auto.plan
    monkeypatch.setattr(Auto, "plan", lambda *given: replace(plan(*given), loss=(0.0001, 0.0002)))
    arguments = ["compress", str(shallow), str(tmp_path / "out"), "--bits-per-weight", "3", "--check", "--quiet"]
    arguments += ["--calibration", str(NOVEL), "--samples", "4", "--sequence-length", "64"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "far more than the plan expected (+0.0001 nats per token to +0.0002 nats per token)" in done.output
    assert "--bits-per-weight" in done.output and "nats per token on a part of the calibration text" in done.output


@pytest.mark.parametrize(("increase", "notes"), [(0.1, 0), (0.29, 0), (0.31, 1), (-0.1, 0)])
def test_the_limit_of_a_large_difference(increase: float, notes: int) -> None:
    assert len(check.far_notes(increase, (0.05, 0.2))) == notes
    assert check.far_notes(increase, None) == ()


def test_a_check_that_fails_leaves_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments, **settings):
        raise NonFiniteError("the logits are not finite")

    monkeypatch.setattr(check, "evaluate", fail)
    report = moepack.compress(TINY_MOE, tmp_path / "out", method="finequant", check=True)
    assert report.increase is None and any("the logits are not finite" in note for note in report.notes)
    assert moepack.verify(report.path).ok


def test_a_text_shorter_than_a_window_is_rejected(mixtral: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(NOVEL.read_text(encoding="utf-8")[:400], encoding="utf-8")
    method = FineQuant(calibration=str(text), samples=1, sequence_length=64)
    report = moepack.compress(mixtral, tmp_path / "out", method=method, check=True)
    assert report.increase is None and any("512 tokens" in note for note in report.notes)

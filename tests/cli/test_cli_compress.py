"""`moepack compress`: the plan, the options of each method, models on the hub."""

import io
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import moepack
from command_support import run
from hub_support import cached
from moepack.cli.preview import print_plan
from moepack.cli.settings import SHARED, declared, flag, options_of
from moepack.methods import METHODS, create, method_class
from moepack.methods.settings import settings_of as settings_of_method
from moepack.pipeline.costs import STARTED
from moepack.pipeline.estimate import Estimate, estimate
from moepack.units import duration

QUICK = ("--ratio", "0.8", "--calibration", "none")
"""Options with which the default method takes half a second for a tiny model."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the sea and the wolf and the fire said " * 80, encoding="utf-8")
    return file


def settings_of(method: str, text: Path, **more: Any) -> dict[str, Any]:
    calibration = {"calibration": str(text), "samples": 4, "sequence_length": 64}
    return {**(calibration if method in ("qmoe", "codequant") else {}), **more}


# The plan


def test_the_plan_stands_before_the_work(
    mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def work(*_: Any, **__: Any) -> None:
        seen.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr("moepack.pipeline.compress", work)
    run(capsys, "compress", mixtral, tmp_path / "out", "--method", "finequant")
    (plan,) = seen
    for expected in (
        *(
            f"{mixtral} (mixtral: 2 layers of 4 experts)",
            "finequant: group-wise integers of 8, 4, 3 or 2 bits",
            "bits 4, group_size 64",
        ),
        *("experts: 147,456 weights", "295 kB -> ", "free", "time      about"),
    ):
        assert expected in plan
    assert all(line.startswith("plan: ") for line in plan.splitlines()), "plain lines in a log"


def test_the_end_suggests_next_commands(mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "compress", mixtral, tmp_path / "out put", "--method", "finequant")
    assert code == 0 and f"moepack inspect '{tmp_path / 'out put'}'" in out
    assert f"--reference {mixtral} --text FILE" in out


def test_quiet_prints_no_plan(mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(capsys, "compress", mixtral, tmp_path / "out", "-q", *QUICK)
    assert code == 0 and "plan: " not in out and not error


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "compress", mixtral, tmp_path / "out", "--dry-run", "-q", *QUICK)
    assert code == 0 and "plan: size" in out and "wrote" not in out
    assert list(tmp_path.iterdir()) == []


def test_an_impossible_job_gets_no_plan(
    mixtral: Path, packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = run(capsys, "compress", mixtral, packed, "--dry-run")
    assert code == 1 and not out and "exists" in error
    code, out, error = run(capsys, "compress", tmp_path / "absent", tmp_path / "out", "--dry-run")
    assert code == 1 and not out and error.count("\n") == 1


EXACT = [
    ("finequant", {}),
    ("finequant", {"bits": 3, "group_size": 16, "symmetric": False}),
    ("finequant", {"bits": 8, "group_size": "row", "dense_bits": "attention=8,head=4"}),
    ("codequant", {}),
    ("codequant", {"weight_bits": 2, "activation_bits": 8, "rotation": "none"}),
]


@pytest.mark.parametrize(("method", "settings"), EXACT)
def test_sizes_that_shapes_fix_are_exact(
    method: str, settings: dict[str, Any], qwen3_moe: Path, tmp_path: Path, text: Path
) -> None:
    chosen = create(method, **settings_of(method, text, **settings))
    plan = estimate(qwen3_moe, tmp_path / "out", chosen)
    report = moepack.compress(qwen3_moe, tmp_path / "out", method=chosen)
    assert all(part.exact for part in plan.parts)
    experts, *dense = plan.parts
    assert (experts.role, experts.weights) == ("experts", report.expert_weights)
    assert (experts.before, experts.after) == (report.expert_source_bytes, report.expert_bytes)
    assert sum(part.weights for part in dense) == report.dense_weights
    assert sum(part.after for part in dense) == report.dense_bytes
    assert report.packed_bytes <= plan.disk


ABOUT = [
    ("finequant", {"group_size": "adaptive", "dense_bits": 4}),
    ("finequant", {"group_size": "budget"}),
    ("finequant", {"group_size": "budget", "bits_per_weight": 4.8}),
    ("milo", {}),
    ("milo", {"rank": "dense:16+sparse:8"}),
    ("qmoe", {}),
    ("qmoe", {"bits": "2", "dense_bits": 8}),
    ("qmoe", {"bits_per_weight": 1.3}),
]


@pytest.mark.parametrize(("method", "settings"), ABOUT)
def test_other_sizes_are_about_right(
    method: str, settings: dict[str, Any], qwen3_moe: Path, tmp_path: Path, text: Path
) -> None:
    chosen = create(method, **settings_of(method, text, **settings))
    plan = estimate(qwen3_moe, tmp_path / "out", chosen)
    report = moepack.compress(qwen3_moe, tmp_path / "out", method=chosen)
    experts, *dense = plan.parts
    # Headers are large relative to these small tensors, and a budget moves bytes between experts and linear layers.
    packed = experts.after + sum(part.after for part in dense)
    assert not experts.exact
    assert packed == pytest.approx(report.expert_bytes + report.dense_bytes, rel=0.2)
    assert plan.kept < plan.before < report.source_bytes * 1.01


def test_a_budget_of_bytes_is_the_size(mixtral: Path, tmp_path: Path) -> None:
    plan = estimate(mixtral, tmp_path / "out", create("milo", memory_budget=200_000))
    assert plan.after == 200_000 and plan.goal is not None and plan.goal.nbytes == 200_000


def test_calibration_takes_memory_and_time(mixtral: Path, tmp_path: Path, text: Path) -> None:
    few, many = (
        estimate(mixtral, tmp_path / "out", create("qmoe", calibration=str(text), samples=samples))
        for samples in (1, 10_000)
    )
    assert many.memory > few.memory + 10_000 * 512 * 64
    assert few.seconds is not None and many.seconds is not None and many.seconds > 2 * few.seconds
    assert few.text_seconds is not None and many.text_seconds is not None
    assert many.seconds - many.text_seconds == pytest.approx(few.seconds - few.text_seconds)
    assert "of it for the calibration text" in shown(many, False)
    plain = estimate(mixtral, tmp_path / "out", create("finequant"))
    assert plain.text_seconds == 0 and "calibration text" not in shown(plain, False)


def test_time_follows_the_threads_and_only_a_processor_is_timed(mixtral: Path, tmp_path: Path, text: Path) -> None:
    one, four = (estimate(mixtral, tmp_path / "out", create("milo"), threads) for threads in (1, 4))
    assert one.seconds is not None and four.seconds is not None
    assert one.seconds - STARTED == pytest.approx(4 * (four.seconds - STARTED))
    device = estimate(mixtral, tmp_path / "out", create("milo", device="cuda"))
    assert device.seconds is None


def shown(plan: Estimate, terminal: bool) -> str:
    file = io.StringIO()
    print_plan(plan, Console(file=file, force_terminal=terminal, width=100))
    return file.getvalue()


def test_the_plan_is_a_table_on_a_terminal(mixtral: Path, tmp_path: Path) -> None:
    odd = tmp_path / "[bold]"
    odd.symlink_to(mixtral)
    plan = estimate(odd, tmp_path / "out", create("finequant", group_size="adaptive"))
    table, lines = shown(plan, True), shown(plan, False)
    assert "Plan" in table and "plan:" not in table and "[bold]" in table
    assert "[bold]" in lines and "about" in next(line for line in lines.splitlines() if "experts:" in line)


def test_insufficient_memory_is_reported(mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moepack.pipeline.estimate.available_bytes", lambda: 1000)
    assert "1 kB free: this may be TOO LITTLE" in shown(estimate(mixtral, tmp_path / "out", create("finequant")), False)
    monkeypatch.setattr("moepack.pipeline.estimate.available_bytes", lambda: None)
    assert "free amount unknown" in shown(estimate(mixtral, tmp_path / "out", create("finequant")), False)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.01, "1 s"), (59, "59 s"), (90, "1.5 min"), (5400, "1.5 h"), (86400 * 3, "3 days")],
)
def test_durations_are_readable(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


# The options


def test_a_declaration_has_all_settings_of_its_method() -> None:
    for name, declaration in METHODS.items():
        made, settings = method_class(name), settings_of_method(declaration)
        assert list(signature(made).parameters) == [setting.name for setting in settings], name
        assert made.name == name and declaration.summary and declaration.seconds, name
        assert all(setting.help for setting in settings), name


FOREIGN = [
    ("finequant", ["--sparsity", "0.5"]),
    ("finequant", ["--rank", "uniform:16", "--codes", "plain"]),
    ("qmoe", ["--calibration", "x", "--codes", "plain"]),
    ("finequant", ["--size", "9GB"]),
    ("milo", ["--alpha", "0.3"]),
    ("qmoe", ["--calibration", "x", "--activation-bits", "8"]),
    ("codequant", ["--calibration", "x", "--symmetric"]),
]


@pytest.mark.parametrize(("method", "options"), FOREIGN)
def test_options_of_other_methods_are_refused_in_one_line(
    method: str, options: list[str], mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = run(capsys, "compress", mixtral, tmp_path / "out", "--method", method, *options)
    assert code == 2 and not out and error.count("\n") == 1
    refused, _, taken = error.partition("; it takes ")
    assert error.startswith(f"error: --method {method} does not take --")
    assert set(taken.split(", ")) == {*options_of(method)[:-1], options_of(method)[-1] + "\n"}
    assert not any(option in refused for option in options_of(method) if option != "--calibration")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [(["--method", "zip"], "finequant"), (["--method", "finequant", "--bits", "7"], "2, 3, 4 or 8")],
)
def test_wrong_values_name_the_right_ones(
    options: list[str], expected: str, mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run(capsys, "compress", mixtral, tmp_path / "out", *options)
    assert code == 2 and expected in error and error.count("\n") == 1


def test_help_groups_the_options_by_method(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, text, _ = run(capsys, "compress", "--help")
    assert code == 0
    basic = {name for name, each in declared().items() if any(one.users == "basic" for one in each.values())}
    alone = {next(iter(each)) for name, each in declared().items() if len(each) == 1 and name not in basic}
    panels = ["Options ", *(f"Research: --method {name} " for name in alone), SHARED]
    assert all(f"─ {panel}" in text for panel in panels)
    first, _, _ = text.partition("─ Research")
    assert basic == {"size", "bits_per_weight", "ratio", "prefer", "target", "calibration", "device"}
    assert all(flag(setting) in first for setting in basic), "what most people need stands first"
    assert "--rank" not in first and "--group-size" not in first
    assert all(flag(setting) in text for setting in declared())
    for name in METHODS:
        assert " ".join(options_of(name)) in " ".join(text.split()), name


def test_auto_is_the_default(mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert moepack.compress(mixtral, tmp_path / "one", ratio=0.8, calibration="none").method == "auto"
    assert run(capsys, "compress", mixtral, tmp_path / "two", *QUICK)[0] == 0
    assert moepack.PackedDirectory.open(tmp_path / "two").manifest.method == "auto"


def test_settings_are_keywords(mixtral: Path, tmp_path: Path) -> None:
    report = moepack.compress(mixtral, tmp_path / "one", method="finequant", bits=8, dense_bits=4)
    assert report.bits_per_weight > 8 and report.dense_weights
    with pytest.raises(ValueError, match="bits: pass settings only with method="):
        moepack.compress(mixtral, tmp_path / "two", method=create("finequant"), bits=8)


# The hub


def test_a_model_of_the_hub_is_compressed(
    hub_cache: Path,
    mixtral: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    snapshot = cached(hub_cache, "someone/tiny-moe", mixtral)
    code, out, error = run(capsys, "compress", "someone/tiny-moe@main", tmp_path / "out", *QUICK)
    assert code == 0, error
    assert str(snapshot) in out
    code, out, _ = run(capsys, "verify", tmp_path / "out")
    assert code == 0 and "is sound" in out


def test_a_missing_model_of_the_hub_is_one_line(
    hub_cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, error = run(capsys, "compress", "someone/absent", tmp_path / "out", "--dry-run")
    assert code == 1 and not out and error.count("\n") == 1
    assert "someone/absent" in error and "cache does not hold it" in error

"""Plans are values: planning changes no method, a job changes no plan, and a plan that is given is not made again."""

from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import moepack
import packed_support as support
from command_support import run
from fault_support import every_method
from moepack.checkpoint import Checkpoint, describe
from moepack.methods import (
    METHODS,
    Auto,
    Calibrates,
    MeetsSize,
    Method,
    PacksLinears,
    Rearranges,
    Rewrites,
    SimpleMethod,
)
from moepack.pipeline.estimate import estimate


def test_a_simple_method_has_three_members() -> None:
    assert SimpleMethod.__abstractmethods__ == {"bound", "solve", "pack"}


def test_a_method_with_its_own_plan_has_two_members() -> None:
    assert Method.__abstractmethods__ == {"bound", "plan"}


def test_an_ability_needs_its_mixin() -> None:
    for mixin in (Calibrates, MeetsSize, PacksLinears, Rearranges, Rewrites):
        for name in {name for name in vars(mixin) if not name.startswith("_")}:
            with pytest.raises(TypeError, match=f"Alone defines {name}, so it must inherit {mixin.__name__}"):
                type("Alone", (SimpleMethod,), {name: None})
            type("Able", (mixin, SimpleMethod), {name: None})


@pytest.mark.parametrize("name", sorted(METHODS))
def test_planning_and_packing_change_neither_method_nor_plan(name: str, mixtral: Path, tmp_path: Path) -> None:
    method = every_method(tmp_path)[name]
    untouched, checkpoint = deepcopy(method), Checkpoint.open(mixtral)
    plan = method.plan(checkpoint, describe(checkpoint))
    decided = deepcopy(plan.decisions), dict(plan.settings), plan.loss, plan.notes
    moepack.compress(mixtral, tmp_path / "one", method=plan)
    cached = {key for key, value in vars(type(method)).items() if isinstance(value, cached_property)}
    assert {key: value for key, value in vars(method).items() if key not in cached} == vars(untouched)
    assert (plan.decisions, dict(plan.settings), plan.loss, plan.notes) == decided
    moepack.compress(mixtral, tmp_path / "two", method=method)
    assert support.contents(tmp_path / "one") == support.contents(tmp_path / "two")


def test_the_command_plans_once(
    mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, plan = [], Auto.plan

    def counted(*given: Any) -> Any:
        plans.append(plan(*given))
        return plans[-1]

    monkeypatch.setattr(Auto, "plan", counted)
    code, out, _ = run(capsys, "compress", mixtral, tmp_path / "out", "--ratio", 0.8, "--calibration", "none")
    assert code == 0 and len(plans) == 1 and "of weights: 0.8 of the checkpoint" in out


def test_a_plan_fits_its_checkpoint_only(mixtral: Path, tiny_checkpoint: Any, tmp_path: Path) -> None:
    plan = estimate(mixtral, tmp_path / "out", Auto(ratio=0.8, calibration=None)).plan
    assert plan is not None and plan.goal is not None
    other = tiny_checkpoint("qwen3_moe")
    with pytest.raises(ValueError, match=f"the plan was made for another checkpoint than {other}"):
        moepack.compress(other, tmp_path / "out", method=plan)
    assert not (tmp_path / "out").exists()

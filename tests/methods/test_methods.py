"""Methods in isolation: the registry, the ternary method, and parallel experts."""

import threading

import numpy as np
import pytest
import torch

from moepack import InvalidTensorError, _core
from moepack.calibration import Stage, Weights
from moepack.checkpoint import MoeLayer
from moepack.methods import create
from moepack.methods.parallel import for_experts
from moepack.methods.qmoe.ternary import Ternary
from moepack.solvers.rtn import quantize_ternary


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_expert_once_and_the_setting_is_kept(threads: int) -> None:
    seen, done, here = [], [], threading.get_ident()

    def count() -> None:
        assert threading.get_ident() == here
        done.append(len(seen))

    for_experts(seen.append, 17, count)
    assert sorted(seen) == list(range(17)) and len(done) == 17
    assert torch.get_num_threads() == threads


def test_the_first_failing_expert_is_raised(threads: int) -> None:
    def work(expert: int) -> None:
        if expert in (3, 9):
            raise InvalidTensorError("bad", tensor=f"expert {expert}")

    with pytest.raises(InvalidTensorError) as caught:
        for_experts(work, 12, lambda: None)
    assert caught.value.tensor == "expert 3"
    assert torch.get_num_threads() == threads


def stage_of(weights: Weights, advance=lambda count: None) -> Stage:
    """A stage without calibration: one whole tensor."""
    return Stage(MoeLayer("layer", (), (), ()), {"wi": weights}, range(weights.shape[0]), advance=advance)


@pytest.mark.parametrize("code", ["fsv8", "dict16"])
def test_ternary_packs_the_result_of_rtn(code: str, threads: int) -> None:
    torch.manual_seed(0)
    stack = torch.randn(6, 33, 50).to(torch.bfloat16)
    weights = Weights("packed", (6, 33, 50), lambda i: stack[i], tuple(f"source.{i}" for i in range(6)))
    advanced: list[int] = []
    method = Ternary(code)
    ((name, solution),) = method.solve(stage_of(weights, advanced.append)).items()
    packed = method.pack(weights, solution)
    codes, levels = quantize_ternary(stack)
    blob = _core.PackedTensor(packed.data)
    assert name == "wi" and packed.kind == "ternary" and advanced == [33 * 50] * 6
    assert np.array_equal(blob.decode(), codes.numpy()) and np.array_equal(blob.parameters("levels"), levels.numpy())
    assert packed.details == {"code": code, "nonzeros": int((codes != 0).sum())}


def test_ternary_names_the_source_of_a_bad_weight() -> None:
    stack = torch.zeros(3, 4, 4)
    stack[2, 1, 1] = float("nan")
    weights = Weights("packed", (3, 4, 4), lambda i: stack[i], ("a", "b", "c"))
    with pytest.raises(InvalidTensorError) as caught:
        Ternary().solve(stage_of(weights))
    assert caught.value.tensor == "c"


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'magic'; available: .*qmoe"):
        create("magic")
    with pytest.raises(ValueError, match="code must be fsv8 or dict16, not morse"):
        Ternary("morse")
    with pytest.raises(ValueError, match="the method rate has no setting group_size; available: bits_per_weight, "):
        create("rate", group_size=64)
    with pytest.raises(ValueError, match="unknown method 'ternary'"):
        create("ternary")
    with pytest.raises(ValueError, match="the method rate requires bits_per_weight"):
        create("rate")

"""Clamped gates and biases of experts: the kernels compiled for the host, and which modules use them."""

import pytest
import torch
from emulation import Emulator
from test_step import _run
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from moepack.modules.own import OwnCode, _is_clamped

TYPES = torch.bfloat16, torch.float16, torch.float32
EXPERTS, INNER, HIDDEN = 3, 40, 48


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return Emulator("clamped.cpp", tmp_path_factory.mktemp("clamped"))("clamped.cu", "none")


def module(dtype=torch.float32):
    settings = GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS)
    experts = GptOssExperts(settings).to(dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    own = OwnCode()
    own.adopt(experts)
    return experts, own


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("has_bias", [False, True])
@torch.no_grad()
def test_gates_are_those_of_transformers(program, tmp_path, kind, has_bias):
    _, own = module(TYPES[kind])
    code, generator = own.code, torch.Generator().manual_seed(kind)
    assert code.clamped is not None and code.clamped.takes_turns
    if not has_bias:
        own.gate_up_proj_bias.zero_()
    gate, up = 9 * torch.randn(2, 5, INNER, generator=generator)
    gate[0, 3], up[1, 4] = torch.nan, torch.inf
    expert = torch.tensor([2, 0, 1, EXPERTS, -1])
    bias = code.clamped.gate_bias if has_bias else None
    numbers = kind, 5, INNER, EXPERTS, 2, 1, code.clamped.alpha, code.clamped.limit
    found = _run(program, tmp_path, (gate, up, expert, bias), *numbers, mode=["gate"]).view(torch.float32).view(5, -1)
    expected = code.between([gate[:3], up[:3]], expert[:3])
    torch.testing.assert_close(found[:3], expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert found[3:].isnan().all()


@pytest.mark.parametrize("columns", [8, 35, 300])
@torch.no_grad()
def test_biases_of_gate_and_up_may_follow_each_other(program, tmp_path, columns):
    gate, up = torch.randn(2, 2, columns, generator=torch.Generator().manual_seed(1))
    bias, expert = torch.arange(4.0 * columns).view(2, -1) / columns - 2, torch.tensor([1, 0])
    numbers = 2, 2, columns, 2, 1, columns, 1.5, 3.0
    found = _run(program, tmp_path, (gate, up, expert, bias), *numbers, mode=["gate"])
    gate, up = (gate + bias[expert, :columns]).clamp(max=3), (up + bias[expert, columns:]).clamp(-3, 3)
    expected = (up + 1) * gate * torch.sigmoid(1.5 * gate)
    torch.testing.assert_close(found.view(torch.float32).view(2, -1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_places", [False, True])
@pytest.mark.parametrize("kind", range(3))
@torch.no_grad()
def test_biased_outputs_are_summed(program, tmp_path, kind, in_places):
    _, own = module(TYPES[kind])
    generator = torch.Generator().manual_seed(kind)
    outputs, weights = torch.randn(3, 2, HIDDEN, generator=generator), torch.rand(3, 2, generator=generator)
    index, bias, place = torch.tensor([[0, 2], [EXPERTS, 1], [-1, 7]]), own.code.clamped.bias, None
    rows = outputs.flatten(0, 1)
    if in_places:
        place = torch.tensor([[5, 0], [-1, 8], [1, 2]], dtype=torch.int32)
        rows = torch.full((9, HIDDEN), torch.nan)
        rows[place[place >= 0].long()] = outputs[place >= 0]
    given = rows, place, index, weights, bias
    found = _run(program, tmp_path, given, kind, 3, 2, HIDDEN, EXPERTS, len(rows), mode=["sum"]).view(torch.float32)
    exists = (index >= 0) & (index < EXPERTS)
    biased = outputs + bias.float()[index.clamp(0, EXPERTS - 1)]
    expected = (biased * (weights * exists)[..., None]).sum(1)
    torch.testing.assert_close(found.view(3, HIDDEN), expected, rtol=1e-6, atol=1e-6)


def test_other_gates_have_no_kernel():
    experts, _ = module()
    assert _is_clamped(experts)
    experts._apply_gate = lambda joined: joined[..., ::2].clamp(max=experts.limit) * joined[..., 1::2]
    assert not _is_clamped(experts)
    del experts._apply_gate
    experts.alpha = None
    assert not _is_clamped(experts)

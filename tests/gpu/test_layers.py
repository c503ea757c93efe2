"""Layers of recorded steps in few launches. Reference operations stand in for kernels, functions for CUDA graphs."""

import pytest
import torch
from test_attention import attention
from test_graphs import Tape, class_forward, decode, ids, prefill
from torch.nn import functional

import moepack
import runtime_support
from moepack.backends.gpu import step
from moepack.census.tiny import tiny_model
from moepack.decoding import layers
from moepack.decoding.graphs import StepGraphs
from moepack.methods import create


class Reference(layers.Operations):
    """The operations by torch; counts calls."""

    def __init__(self):
        self.calls = []

    def attends(self, dtype, width):
        return True

    def rotates(self, width, rotated):
        return True

    def multiplies(self, weights, tokens):
        return True

    def multiply(self, x, weights, biases):
        self.calls.append("multiply")
        return torch.cat([functional.linear(x, *pair) for pair in zip(weights, biases, strict=True)], 1)

    def norm_of(self, module):
        epsilon = getattr(module, "variance_epsilon", None)
        return None if epsilon is None else step.Norm(module.weight, epsilon)

    def rms_norm(self, x, weight, epsilon, late=False):
        self.calls.append("norm")
        return weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)

    def add_norm(self, x, addend, weight, epsilon, late=False):
        total = x + addend.to(x.dtype)
        return total, self.rms_norm(total, weight, epsilon, late)

    def prepare_heads(self, heads, place, keys, values):
        self.calls.append("heads")
        q, k = heads.queries, heads.keys
        if heads.query_norm is not None:
            q, k = self.rms_norm(q, heads.query_norm, heads.epsilon), self.rms_norm(k, heads.key_norm, heads.epsilon)
        q, k = (_rotated(each, heads) for each in (q, k))
        keys.index_copy_(2, place, k[:, :, None])
        values.index_copy_(2, place, heads.values[:, :, None])
        return q

    def attend(self, q, k, v, mask, scale, sinks=None):
        self.calls.append("attend")
        return attention(q, k, v, torch.zeros(len(q), k.shape[2]) if mask is None else mask, scale, sinks).to(q.dtype)

    def choose(self, logits, top_k, *, sigmoid, normalized, correction, scale):
        self.calls.append("choose")
        scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
        index = (scores if correction is None else scores + correction).topk(top_k).indices
        weights = scores.gather(1, index)
        return index, (weights / weights.sum(-1, keepdim=True) if normalized else weights) * scale


def _rotated(x, heads):
    cos, sin, width = heads.cos[:, None], heads.sin[:, None], heads.rotated
    if heads.folded:
        cos, sin = (torch.cat((each, each), -1) for each in (cos, sin))
    first, second = x[..., :width].chunk(2, -1)
    turned = x[..., :width] * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned, x[..., width:]), -1)


WHOLE = {
    "mixtral": True, "qwen2_moe": True, "qwen3_moe": True, "olmoe": True, "glm4_moe": True, "deepseek_v2": False,
    "deepseek_v3": False,
}  # fmt: skip
"""Families, and whether attention is replaced with the rest of a layer."""


SETTINGS = {
    "glm4_moe": {"use_qk_norm": True, "attention_bias": True}, "deepseek_v3": {"n_group": 2, "topk_group": 1},
    "gpt_oss": {"sliding_window": 9},
}  # fmt: skip
"""Models of the census, and their settings."""


@pytest.fixture(params=WHOLE)
def model(request, tmp_path):
    own = SETTINGS.get(request.param)
    made = runtime_support.tiny_model(request.param) if own is None else tiny_model(request.param, own=own)
    directory = runtime_support.write_packed(made, tmp_path / "packed")
    return moepack.load(directory, dtype="float32").model


@pytest.fixture
def reference(monkeypatch):
    operations, own = Reference(), layers.Replacements
    monkeypatch.setattr("moepack.decoding.graphs.Replacements", lambda model: own(model, operations))
    return operations


def test_steps_compute_the_same_as_the_model(model, reference):
    before = [dict(vars(module)) for module in model.modules()]
    tokens = ids(1, 8, seed=1)
    expected = decode(model, None, prefill(model, ids(1, 7)), tokens)
    tape = Recorded()
    found = decode(model, StepGraphs(tape), prefill(model, ids(1, 7)), tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert tape.recorded == 1
    assert {"attend", "multiply", "norm"} <= set(reference.calls)
    assert ("heads" in reference.calls) == WHOLE[model.config.model_type]
    assert [dict(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_packed_attention_computes_the_same_as_the_model(architecture, reference, tmp_path):
    method = create("finequant", bits=8, dense_bits=8)
    directory = runtime_support.write_packed(runtime_support.tiny_model(architecture), tmp_path / "packed", method)
    model = moepack.load(directory, dtype="float32").model
    assert not list(model.layers[0].self_attn.q_proj.parameters())
    tokens = ids(1, 6, seed=1)
    expected = decode(model, None, prefill(model, ids(1, 7)), tokens)
    found = decode(model, StepGraphs(Recorded()), prefill(model, ids(1, 7)), tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert "heads" in reference.calls


def test_padded_batches_compute_the_same_as_the_model(model, reference):
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[0, :4] = mask[2, :1] = 0
    results = []
    for graphs in (None, StepGraphs(Recorded())):
        cache = prefill(model, ids(3, 7), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))

        def grown(cache=cache):
            return torch.cat([mask, mask.new_ones(3, cache.get_seq_length() + 1 - 7)], 1)

        positions = lambda grown=grown: grown().sum(1, keepdim=True) - 1  # noqa: E731
        results.append(decode(model, graphs, cache, ids(3, 6, seed=1), attention_mask=grown, position_ids=positions))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_prompts_compute_the_same_as_the_model(model, reference):
    graphs = StepGraphs(Tape())
    with torch.inference_mode():
        expected = class_forward(model)(input_ids=ids(2, 9))
        with graphs.replaced(model):
            found = class_forward(model)(input_ids=ids(2, 9))
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, rtol=1e-4, atol=1e-4)
    assert {"multiply", "norm"} <= set(reference.calls)
    assert not any("forward" in vars(module) for module in list(model.modules())[1:])


def test_gradients_flow_through_replaced_modules(reference):
    """Another thread may train the model meanwhile."""
    model = runtime_support.tiny_model("qwen3_moe").model
    replacements = layers.Replacements(model, reference)
    reference.calls.clear()
    with replacements.active():
        model(input_ids=ids(1, 5)).last_hidden_state.sum().backward()
    assert not reference.calls
    assert all(layer.mlp.gate.weight.grad is not None for layer in model.layers)


def test_other_families_keep_their_layers(reference):
    model = runtime_support.tiny_model("phimoe").model
    assert not layers.Replacements(model, reference).layers


def test_models_with_hooks_keep_their_modules(model, reference):
    model.layers[0].mlp.register_forward_hook(lambda *given: None)
    with StepGraphs(Tape()).replaced(model):
        assert not any("forward" in vars(module) for module in list(model.modules())[1:])


class Recorded(Tape):
    """Records while modules are replaced, and replays with the same replacements."""

    def __call__(self, function, device):
        forwards = [
            (module, vars(module)["forward"]) for module in _owner(function).modules() if "forward" in vars(module)
        ]

        def replaced():
            before = [(module, vars(module).get("forward")) for module, _ in forwards]
            for module, forward in forwards:
                module.forward = forward
            try:
                return function()
            finally:
                for module, forward in before:
                    vars(module).pop("forward") if forward is None else setattr(module, "forward", forward)

        return super().__call__(replaced, device)


def _owner(function):
    """The model whose step a recorded function runs."""
    step = next(cell.cell_contents for cell in function.__closure__)
    return step.func.__self__

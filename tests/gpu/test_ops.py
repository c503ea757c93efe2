"""Operators of packed products: torch's operator checks, and compiled models."""

import pytest
import torch

import moepack
import runtime_support
from moepack import GroupwiseTensor
from moepack.backends import backend_for
from moepack.modules import ops
from moepack.modules.experts import PackedExperts
from moepack.modules.linear import PackedLinear
from moepack.stores import mapped
from moepack.stores.mapped import MappedStore
from runtime_support import SWITCH, dense_blob, inputs

EXPERTS, INNER, HIDDEN = 3, 12, 16


def blobs(experts=EXPERTS):
    """Packed bytes of gate, up and down projections."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(experts, INNER, HIDDEN)] * 2 + [(experts, HIDDEN, INNER)]
    return [torch.from_numpy(dense_blob(torch.randn(shape, generator=generator).numpy())) for shape in shapes]


def routed(tokens):
    index = torch.randint(0, EXPERTS + 1, (tokens, 2), generator=torch.Generator().manual_seed(1))
    return torch.randn(tokens, HIDDEN), index, torch.rand(tokens, 2)


def test_operators_obey_torch():
    gate, _, _ = blobs(1)
    integers = torch.from_numpy(GroupwiseTensor.quantize(torch.randn(INNER, HIDDEN), 4).data.copy())
    for data in (gate, integers):
        torch.library.opcheck(torch.ops.moepack.linear.default, (torch.randn(5, HIDDEN), data, INNER, None))
    arguments = (*routed(7), blobs(), HIDDEN, "silu", None)
    torch.library.opcheck(torch.ops.moepack.experts.default, arguments)


def test_operators_compute_the_same_as_modules():
    x, index, weights = routed(9)
    shapes = {"gate_proj": (EXPERTS, INNER, HIDDEN), "up_proj": (EXPERTS, INNER, HIDDEN)}
    for activation in (torch.nn.SiLU(), torch.nn.GELU()):
        module = PackedExperts({**shapes, "down_proj": (EXPERTS, HIDDEN, INNER)}, activation)
        for projection, data in zip(module.projections, blobs(), strict=True):
            module.attach(projection, data)
        name = ops.activation_name(activation)
        found = ops.experts(x, index, weights, module.packed_bytes(), HIDDEN, name, None)
        assert torch.equal(found, module(x, index, weights))


def test_unopened_bytes_are_opened():
    gate, _, _ = blobs(1)
    x = torch.randn(2, HIDDEN)
    expected = x @ gate[64:].view(torch.float32).view(INNER, HIDDEN).T
    torch.testing.assert_close(ops.linear(x, gate, INNER, None), expected)
    with pytest.raises(moepack.CorruptionError):
        ops.linear(x, torch.zeros(4, dtype=torch.uint8), INNER, None)


def test_bytes_of_a_layer_are_not_opened_again(monkeypatch):
    """Uploaded bytes cannot be opened while a graph is recorded, because opening reads them on the host."""
    gate, _, _ = blobs(1)
    layer, matrix = PackedLinear(INNER, HIDDEN), backend_for(gate.device).open(gate)
    MappedStore()._take(layer, *PackedLinear.projections, gate, matrix)
    monkeypatch.setattr(mapped, "_opened", None)
    assert mapped.matrix_over(*layer.packed_bytes()) is matrix


def test_a_gradient_is_refused_when_it_is_asked_for():
    layer = PackedLinear(INNER, HIDDEN)
    layer.attach("packed", blobs(1)[0])
    x = torch.randn(5, HIDDEN, requires_grad=True)
    y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(y, layer(x))
    with pytest.raises(moepack.LoadError, match="does not support gradients"):
        y.sum().backward()


@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe", "deepseek_v2"])
def test_compiled_models_compute_the_same_without_a_break(architecture, tmp_path):
    model = runtime_support.tiny_model(architecture)
    method = runtime_support.DenseMethod(["attention"])
    loaded = moepack.load(runtime_support.write_packed(model, tmp_path / "packed", method), dtype="float32")
    torch._dynamo.reset()
    compiled = torch.compile(loaded, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        for tokens in (20, 1):
            given = inputs(loaded, tokens=tokens)
            torch.testing.assert_close(compiled(**given).logits, loaded(**given).logits, rtol=1e-4, atol=1e-4)


def test_compiled_switch_transformers(tmp_path):
    loaded = moepack.load(runtime_support.write_packed(runtime_support.tiny_model(SWITCH), tmp_path / "packed"))
    torch._dynamo.reset()
    with torch.inference_mode():
        found = torch.compile(loaded, backend="aot_eager")(**inputs(loaded)).logits
        torch.testing.assert_close(found, loaded(**inputs(loaded)).logits, rtol=1e-4, atol=1e-4)


def test_stores_that_keep_bytes_elsewhere_are_not_traced():
    class Elsewhere(moepack.stores.base.ExpertStore):
        def put(self, layer, projection, data, **place):
            pytest.fail("the layer has its bytes elsewhere")

        def fetch(self, layer, experts, device):
            return (moepack.stores.mapped.matrix_over(gate),)

        def prefetch(self, layer, experts, device):
            pass

    gate, _, _ = blobs(1)
    layer = PackedLinear(INNER, HIDDEN)
    layer.store = Elsewhere()
    x = torch.randn(5, HIDDEN)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer, backend="eager")(x), layer(x))

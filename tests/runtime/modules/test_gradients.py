"""Gradients through packed weights equal those of the dequantized weights: products, experts, layers, models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moepack
from moepack import GroupwiseTensor, _core
from moepack.census.tiny import tiny_model
from moepack.export import export
from moepack.format.balance import balance_of
from moepack.methods.finequant import FineQuant
from moepack.modules import ops
from moepack.modules.experts import PackedExperts, PackedPlainExperts
from moepack.modules.linear import PackedLinear
from places import GOLDEN

BLOBS = sorted(GOLDEN.glob("*/*.bin"))


@pytest.mark.parametrize("path", BLOBS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_transposed_products_and_single_rows_of_every_format(path: Path) -> None:
    blob = _core.PackedTensor(np.frombuffer(path.read_bytes(), np.uint8))
    experts, rows, columns = blob.shape
    values = blob.dequantize()
    named = np.arange(experts * rows, dtype=np.int64)[::-1].copy()
    assert np.array_equal(blob.look_up(named), values.reshape(experts * rows, columns)[named])
    assert blob.look_up(named, "bfloat16").shape == (len(named), columns)
    with pytest.raises(ValueError, match="no row"):
        blob.look_up(np.array([experts * rows]))
    counts = np.arange(experts) * 3 % 5
    offsets = np.concatenate(([0], counts.cumsum())).astype(np.int64)
    y = np.random.default_rng(0).standard_normal((offsets[-1], rows)).astype(np.float32)
    runs = [y[offsets[e] : offsets[e + 1]].astype(np.float64) @ values[e] for e in range(experts)]
    sizes = [np.abs(y[offsets[e] : offsets[e + 1]]).astype(np.float64) @ np.abs(values[e]) for e in range(experts)]
    found = [blob.matmul_transposed(y, offsets, isa) for isa in _core.available_isas()]
    for product in found:
        assert np.array_equal(product, found[0])
    for expected, size, start, end in zip(runs, sizes, offsets, offsets[1:], strict=False):
        assert (np.abs(found[0][start:end] - expected) <= rows * 2.0**-24 * size).all()


def weights_of(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed bytes and the values that they represent."""
    packed = GroupwiseTensor.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), 4, 16)
    return torch.from_numpy(packed.data.copy()), packed.dequantize()


def test_a_matmul_has_the_gradient_of_its_values() -> None:
    packed = GroupwiseTensor.quantize(torch.randn(3, 20, 32), 4, 16)
    x = torch.randn(3, 5, 32, dtype=torch.bfloat16, requires_grad=True)
    y = packed.matmul(x)
    (found,) = torch.autograd.grad(y.float().square().sum(), x)
    expected = (2 * y.detach().float()) @ packed.dequantize()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_linear_layer(compiled: bool) -> None:
    data, values = weights_of(40, 32)
    layer = PackedLinear(40, 32, torch.nn.Parameter(torch.randn(40)))
    layer.attach("packed", data)
    layer.mode = "exact"
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x = torch.randn(2, 7, 32, requires_grad=True)
    found = torch.autograd.grad(call(x).square().sum(), (x, layer.bias))
    expected = torch.autograd.grad((x @ values.T + layer.bias).square().sum(), (x, layer.bias))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "compiled"), [(PackedExperts, False), (PackedExperts, True), (PackedPlainExperts, False)]
)
def test_experts_and_their_router(kind: type[PackedExperts], compiled: bool) -> None:
    experts, inner, hidden = 4, 48, 32
    shapes = {name: (experts, inner, hidden) for name in kind.projections[:-1]} | {
        "down_proj": (experts, hidden, inner)
    }
    module = kind(shapes, torch.nn.SiLU())
    module.mode = "exact"
    values = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        data, values[name] = weights_of(*shape, seed=seed)
        module.attach(name, data)
    x, weights = torch.randn(9, hidden, requires_grad=True), torch.rand(9, 3, requires_grad=True)
    index = torch.stack([torch.randperm(experts + 1)[:3] for _ in range(9)])  # the last is no expert's
    index[0] = experts

    def plain() -> torch.Tensor:
        first, *middle, last = values.values()
        rows = []
        for token in range(9):
            row = torch.zeros(hidden)
            for slot, expert in enumerate(index[token].tolist()):
                if expert < experts:
                    inside = torch.nn.functional.silu(first[expert] @ x[token])
                    for matrix in middle:
                        inside = inside * (matrix[expert] @ x[token])
                    row = row + weights[token, slot] * (last[expert] @ inside)
            rows.append(row)
        return torch.stack(rows)

    call = torch.compile(module, backend="aot_eager") if compiled else module
    target = torch.randn(9, hidden)
    found = torch.autograd.grad((call(x, index, weights) * target).sum(), (x, weights))
    expected = torch.autograd.grad((plain() * target).sum(), (x, weights))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()


def test_operators_say_where_they_have_no_gradient() -> None:
    data, _ = weights_of(2, 16, 16)
    x = torch.randn(2, 16, requires_grad=True)
    index, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
    output = ops.experts(x, index, weights, [data] * 3, 16, "silu", None)
    with pytest.raises(RuntimeError, match="fused experts operator"):
        output.sum().backward()


@pytest.mark.parametrize("architecture", ["mixtral", "deepseek_v2", "gpt_oss", "jetmoe"])
def test_a_models_gradients_match_its_dequantized_weights(architecture: str, tmp_path: Path) -> None:
    """Gradients of embeddings and of router weights, which depend only on the experts' weights."""
    tiny_model(architecture).save_pretrained(tmp_path / "source")
    moepack.compress(tmp_path / "source", tmp_path / "packed", method=FineQuant(bits=8, group_size=16, dense_bits=8))
    export(tmp_path / "packed", tmp_path / "plain")
    packed = moepack.load(tmp_path / "packed", torch.float32, mode="exact")
    scales = balance_of(tmp_path / "packed")
    plain = type(packed).from_pretrained(tmp_path / "plain", dtype=torch.float32)

    def gradients(model: Any) -> list[torch.Tensor]:
        embedded = torch.randn(1, 6, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
        embedded.requires_grad_()
        names = [name for name, _ in packed.named_parameters() if "gate.weight" in name or "router" in name]
        loss = model(inputs_embeds=embedded, labels=torch.arange(6)[None], use_cache=False).loss
        asked = [embedded, *(dict(model.named_parameters())[name] for name in names)]
        assert len(asked) > 1
        return list(torch.autograd.grad(loss, asked))

    names = ["", *(name for name, _ in packed.named_parameters() if "gate.weight" in name or "router" in name)]
    for name, one, other in zip(names, gradients(packed), gradients(plain), strict=True):
        stored = name.replace(".mlp.", ".block_sparse_moe.") if architecture == "mixtral" else name
        columns = scales.columns(stored)
        one = one if columns is None else one / columns  # the exported model has the source's scales
        assert (one - other).norm() < 0.02 * other.norm()  # the plain weights are rounded to bf16

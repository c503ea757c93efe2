"""Routers and dense products of decoding steps: the kernels compiled for the host."""

import pytest
import torch
from emulation import Emulator
from test_step import _run

TYPES = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def emulators(tmp_path_factory):
    return {name: Emulator(f"{name}.cpp", tmp_path_factory.mktemp(name)) for name in ("router", "dense")}


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize(
    ("experts", "top_k", "sigmoid", "normalized", "scale"),
    [(128, 8, 0, 1, 1.0), (60, 4, 0, 0, 1.0), (8, 2, 0, 1, 1.0), (160, 6, 1, 1, 2.5)],
)
def test_experts_are_chosen_as_by_separate_operations(
    emulators, tmp_path, kind, experts, top_k, sigmoid, normalized, scale
):
    program = emulators["router"]("router.cu", "none", SCORES=-(-experts // 32))
    dtype, generator = TYPES[kind], torch.Generator().manual_seed(experts)
    logits = torch.stack([torch.randperm(experts, generator=generator) * 0.0625 - 3 for _ in range(3)]).to(dtype)
    correction = torch.randn(experts, generator=generator) if sigmoid else None
    found = _run(program, tmp_path, (logits, correction), kind, *logits.shape, top_k, sigmoid, normalized, scale)
    index, weights = found.split([3 * top_k * 8, 3 * top_k * 4])
    index, weights = index.view(torch.int64).view(3, -1), weights.view(torch.float32).view(3, -1)
    scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
    chosen = (scores + correction if sigmoid else scores).topk(top_k).indices
    expected = scores.gather(1, chosen)
    expected = (expected / expected.sum(-1, keepdim=True) if normalized else expected) * scale
    assert torch.equal(index, chosen)
    torch.testing.assert_close(weights, expected.to(dtype).float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


def test_the_first_of_equal_experts_is_chosen(emulators, tmp_path):
    program = emulators["router"]("router.cu", "none", SCORES=2)
    found = _run(program, tmp_path, (torch.zeros(1, 40), None), 2, 1, 40, 5, 0, 1, 1.0)
    assert found[:40].view(torch.int64).tolist() == [0, 1, 2, 3, 4]
    assert found[40:].view(torch.float32).tolist() == pytest.approx([0.2] * 5)


@pytest.mark.parametrize("kind", range(2))
@pytest.mark.parametrize(
    ("tokens", "columns", "rows", "team"),
    [(1, 32, (16, 0, 0), 4), (3, 352, (32, 16, 48), 4), (13, 1056, (16, 32, 0), 8)],
)
def test_tokens_are_multiplied_by_matrices(emulators, tmp_path, kind, tokens, columns, rows, team):
    program = emulators["dense"]("dense.cu", "none", HALF=kind, COLUMNS=8 if tokens <= 8 else 16, TEAM=team)
    dtype, generator = TYPES[kind], torch.Generator().manual_seed(columns)
    x = torch.randn(tokens, columns, generator=generator).to(dtype)
    weights = [torch.randn(count, columns, generator=generator).to(dtype) if count else None for count in rows]
    biases = [torch.randn(count, generator=generator).to(dtype) if count > 16 else None for count in rows]
    (tmp_path / "x").write_bytes(x.view(torch.uint8).numpy().tobytes())
    parts = []
    for place, (count, weight, bias) in enumerate(zip(rows, weights, biases, strict=True)):
        parts.append(str(count))
        for name, tensor in (("weight", weight), ("bias", bias)):
            path = tmp_path / f"{name}{place}"
            if tensor is not None:
                path.write_bytes(tensor.view(torch.uint8).numpy().tobytes())
            parts.append("-" if tensor is None else str(path))
    found = (
        _run(program, tmp_path, (), *parts, mode=[tmp_path / "x", str(tokens), str(columns)])
        .view(dtype)
        .view(tokens, -1)
    )
    expected = torch.cat(
        [
            x.double() @ weight.double().T + (0 if bias is None else bias.double())
            for weight, bias in zip(weights, biases, strict=True)
            if weight is not None
        ],
        1,
    )
    assert (found.double() - expected).norm() / expected.norm() < (5e-3, 6e-4)[kind]

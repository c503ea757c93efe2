"""Norms and rotary embeddings in one launch: the kernels compiled for the host, and what they replace."""

import subprocess

import numpy as np
import pytest
import torch
from emulation import Emulator
from torch import nn

from moepack.backends.gpu import step
from moepack.decoding.narrow import encode

_TYPES = torch.bfloat16, torch.float16, torch.float32


class Norm(nn.Module):
    """RMS norm as in transformers; `late` multiplies by the weight before rounding, `more` adds to the weight."""

    def __init__(self, columns, dtype, *, late=False, more=0.0):
        super().__init__()
        generator = torch.Generator().manual_seed(columns)
        self.weight = nn.Parameter((1 + 0.3 * torch.randn(columns, generator=generator)).to(dtype))
        self.variance_epsilon, self.late, self.more = 1e-6, late, more

    def forward(self, x):
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        weight = self.weight + self.more
        return (weight.float() * wide).to(x.dtype) if self.late else weight * wide.to(x.dtype)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return Emulator("step.cpp", tmp_path_factory.mktemp("step"))("step.cu", "none")


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("rows", "columns", "threads"), [(3, 8, 32), (2, 128, 32), (2, 2056, 64)])
@torch.no_grad()
def test_rows_are_normalized_as_by_transformers(program, tmp_path, kind, late, rows, columns, threads):
    dtype = _TYPES[kind]
    module = Norm(columns, dtype, late=late)
    x = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(kind)) * 3).to(dtype)
    x[0] *= 3e-4
    for name, tensor in (("x", x), ("weight", module.weight)):
        (tmp_path / name).write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    numbers = map(str, (kind, rows, columns, module.variance_epsilon, threads, int(late)))
    command = [program, tmp_path / "x", tmp_path / "weight", *numbers]
    printed = np.frombuffer(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout, np.uint8)
    found, expected = torch.from_numpy(printed.copy()).view(dtype).view(rows, columns), module(x)
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert kind == 2 or (found == expected).float().mean() > 0.99


def apply_rotary_pos_emb(q, k, cos, sin):
    """As in transformers; `fused_rotations` finds it by its name."""

    def one(x):
        first, second = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)

    return one(q), one(k)


@pytest.mark.parametrize("kind", range(3))
@torch.no_grad()
def test_heads_are_rotated_as_by_transformers(program, tmp_path, kind):
    dtype, (batch, tokens, heads, width) = _TYPES[kind], (2, 3, (5, 2), 48)
    generator = torch.Generator().manual_seed(kind)
    shapes = *((batch, tokens, count, width) for count in heads), *[(batch, tokens, width)] * 2
    q, k, cos, sin = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    for name, tensor in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        (tmp_path / name).write_bytes(tensor.view(torch.uint8).numpy().tobytes())
    numbers = list(map(str, (kind, batch * tokens, width, 0, 64)))
    files = [tmp_path / name for name in ("q", "k", "cos", "sin")]
    command = [program, *files[:2], *numbers, *files[2:], *map(str, heads)]
    printed = np.frombuffer(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout, np.uint8)
    found = torch.from_numpy(printed.copy()).view(dtype)
    expected = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    both = torch.cat([each.transpose(1, 2).reshape(-1) for each in expected])
    torch.testing.assert_close(found, both, rtol=0, atol=1e-6 if kind == 2 else 0)


def test_rotations_on_the_cpu_are_left_alone():
    assert not step.rotations(nn.Sequential(Norm(64, torch.bfloat16)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@torch.no_grad()
def test_rotations_are_replaced_if_their_results_are_the_same():
    own = apply_rotary_pos_emb
    model = nn.Sequential(Norm(64, torch.bfloat16)).cuda()
    q, k = (torch.randn(2, 1, heads, 128, device="cuda").bfloat16().transpose(1, 2) for heads in (8, 2))
    cos, sin = (torch.randn(2, 1, 128, device="cuda").bfloat16() for _ in range(2))
    with step.replaced(step.rotations(model)) as count:
        assert count == 1
        replaced = globals()["apply_rotary_pos_emb"]
        assert replaced is not own
        for found, expected in zip(replaced(q, k, cos, sin), own(q, k, cos, sin), strict=True):
            assert torch.equal(found, expected)
        narrow = [each[..., :24] for each in (q, k, cos, sin)]  # not a multiple of 16
        assert torch.equal(replaced(*narrow)[0], own(*narrow)[0])
    assert globals()["apply_rotary_pos_emb"] is own


def test_norms_on_the_cpu_are_left_alone():
    model = nn.Sequential(Norm(64, torch.bfloat16))
    assert not step.norms(model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@torch.no_grad()
def test_norms_are_replaced_if_their_results_are_the_same():
    for dtype in _TYPES:
        model = nn.Sequential(
            Norm(128, dtype), Norm(2048, dtype), Norm(128, dtype, more=1.0), Norm(12, dtype), nn.LayerNorm(64, 1e-6)
        ).cuda()
        x = torch.randn(5, 3, 128, device="cuda").to(dtype)
        expected = model[0](x)
        with step.replaced(step.norms(model)) as count:
            assert count == 2 and "forward" not in vars(model[2])
            found = model[0](x)
        assert "forward" not in vars(model[0])
        torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
    late = Norm(2048, torch.bfloat16, late=True).cuda()
    found = step.norm_of(late)
    assert found is not None and found.late
    x = torch.randn(5, 2048, device="cuda").bfloat16()
    assert (step.rms_norm(x, *found) == late(x)).float().mean() > 0.99


def _run(program, tmp_path, tensors, *numbers, mode=()):
    """The output bytes of a host program; tensors are passed as files, None as "-"."""
    files = []
    for number, tensor in enumerate(tensors):
        files.append("-" if tensor is None else str(tmp_path / str(number)))
        if tensor is not None:
            (tmp_path / str(number)).write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    command = [program, *mode, *files, *map(str, numbers)]
    printed = np.frombuffer(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout, np.uint8)
    return torch.from_numpy(printed.copy())


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("rows", "columns", "threads"), [(2, 40, 32), (3, 1032, 96)])
@torch.no_grad()
def test_sums_are_normalized_as_by_separate_operations(program, tmp_path, kind, late, rows, columns, threads):
    dtype, generator = _TYPES[kind], torch.Generator().manual_seed(columns)
    module = Norm(columns, dtype, late=late)
    x, addend = (torch.randn(rows, columns, generator=generator) for _ in range(2))
    x = x.to(dtype)
    numbers = kind, rows, columns, module.variance_epsilon, threads, int(late)
    found = _run(program, tmp_path, (x, addend, module.weight), *numbers, mode=["add"]).view(dtype).view(2, rows, -1)
    total = x + addend.to(dtype)
    assert torch.equal(found[0], total)
    torch.testing.assert_close(found[1], module(total), rtol=4 * torch.finfo(dtype).eps, atol=0)
    assert kind == 2 or (found[1] == module(total)).float().mean() > 0.99


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize(
    ("queries", "keys", "width", "rotated", "norms", "folded"),
    [(3, 1, 64, 64, True, False), (4, 2, 80, 32, False, False), (8, 1, 64, 64, False, True)],
)
@torch.no_grad()
def test_heads_are_prepared_as_by_separate_operations(
    program, tmp_path, kind, queries, keys, width, rotated, norms, folded
):
    dtype, batch, capacity, place = _TYPES[kind], 2, 5, 3
    generator = torch.Generator().manual_seed(width)
    heads = torch.randn(batch, queries + 2 * keys, width, generator=generator).to(dtype)
    own = [Norm(width, dtype) for _ in range(2)]
    own[1].weight.mul_(1.5)
    cos, sin = (torch.randn(batch, rotated, generator=generator).to(dtype) for _ in range(2))
    turns = rotated // 2 if folded else rotated
    if folded:
        cos, sin = (each[:, :turns].repeat(1, 2) for each in (cos, sin))
    given = heads, *((norm.weight if norms else None) for norm in own), cos[:, :turns], sin[:, :turns]
    numbers = kind, batch, queries, keys, width, rotated, turns, own[0].variance_epsilon, capacity, place
    found = _run(program, tmp_path, given, *numbers, mode=["heads"]).view(dtype)
    q, k, v = heads.split([queries, keys, keys], 1)
    if norms:
        q, k = own[0](q), own[1](k)
    turned = apply_rotary_pos_emb(q[..., None, :rotated], k[..., None, :rotated], cos[:, None], sin[:, None])
    q, k = (torch.cat((one[..., 0, :], rest[..., rotated:]), -1) for one, rest in zip(turned, (q, k), strict=True))
    sizes = [batch * queries * width] + [batch * keys * capacity * width] * 2
    first, *buffers = found.split(sizes)
    torch.testing.assert_close(first.view(q.shape), q, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    for buffer, expected in zip(buffers, (k, v), strict=True):
        buffer = buffer.view(batch, keys, capacity, width)
        close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
        torch.testing.assert_close(buffer[:, :, place], expected, **close)
        buffer[:, :, place] = 0
        assert not buffer.any()


@pytest.mark.parametrize(("narrow", "kind", "width"), [(False, 2, 64), (True, 2, 64), (True, 0, 128), (True, 1, 40)])
@torch.no_grad()
def test_tokens_of_several_sequences_are_written_to_their_rooms(program, tmp_path, narrow, kind, width):
    rows, (queries, keys), capacity, dtype = 4, (3, 2), 5, _TYPES[kind]
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(rows, queries + 2 * keys, width, generator=generator).to(dtype)
    if narrow:  # rows of zeros, of values that are not finite, and of subnormal numbers
        heads[0, queries] = 0
        heads[1, queries, width - 3], heads[1, queries + 1, 2] = torch.nan, -torch.inf
        heads[2, queries + 1] = heads[2, queries + 1].sign() * torch.finfo(dtype).smallest_normal / 2
    rooms = torch.tensor([[2, 0, 2, 1], [4, 0, 1, -1]])
    turned = width // 16 * 16
    turns = torch.ones(rows, turned, dtype=dtype), torch.zeros(rows, turned, dtype=dtype)
    numbers = kind, rows, queries, keys, width, turned, turned, 1e-6, capacity, 0
    (tmp_path / "rooms").write_bytes(rooms.numpy().tobytes())
    given = heads, None, None, *turns
    rest = (tmp_path / "rooms", *(["narrow"] if narrow else []))
    found = _run(program, tmp_path, given, *numbers, *rest, mode=["heads"])
    held = encode(heads) if narrow else heads
    row, held_row = (each.shape[-1] * each.element_size() for each in (heads, held))
    first, *buffers = found.split([rows * queries * row] + [rows * keys * capacity * held_row] * 2)
    assert torch.equal(first.view(dtype).view(rows, queries, width), heads[:, :queries])
    for buffer, written in zip(buffers, held[:, queries:].split(keys, 1), strict=True):
        buffer = buffer.view(held.dtype)
        expected = torch.zeros(rows, keys, capacity, held.shape[-1], dtype=held.dtype)
        for row, (room, place) in enumerate(rooms.T.tolist()):
            if place >= 0:
                expected[room, :, place] = written[row]
        assert torch.equal(buffer.view_as(expected), expected)

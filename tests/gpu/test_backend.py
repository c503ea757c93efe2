"""The GPU backend around its kernels, which are replaced by CPU stand-ins."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.nn import functional

import moepack
from moepack import GroupwiseTensor, _core
from moepack.backends.base import Between
from moepack.backends.cpu import CpuBackend
from moepack.backends.gpu import backend, coded_layer, own, prompt
from moepack.backends.gpu.backend import GpuBackend
from moepack.backends.gpu.families import FAMILIES, kernels_of
from moepack.backends.gpu.matrix import DeviceMatrix
from moepack.backends.gpu.upload import PIECE, pieces
from runtime_support import dense_blob


class Kernels:
    """Products with a matrix's table of weights, in float64."""

    def __init__(self):
        self.calls = []

    def linear(self, matrix, x, out):
        self.calls.append("linear")
        out.copy_(x.double() @ weights_of(matrix)[0].T)

    def gated(self, gate, up, x, index, hidden):
        self.calls.append("gated")
        for slot, expert in enumerate(index.flatten().tolist()):
            if 0 <= expert < gate.shape[0]:
                token = x[slot // index.shape[1]].double()
                hidden[slot] = functional.silu(weights_of(gate)[expert] @ token) * (weights_of(up)[expert] @ token)

    def project(self, matrix, x, index, out):
        self.calls.append("project")
        for slot, expert in enumerate(index.flatten().tolist()):
            if 0 <= expert < matrix.shape[0]:
                out[slot] = weights_of(matrix)[expert] @ x[slot // index.shape[1]].double()

    def combine(self, down, hidden, index, weights, out):
        self.calls.append("combine")
        out.zero_()
        for slot, expert in enumerate(index.flatten().tolist()):
            if 0 <= expert < down.shape[0]:
                product = weights_of(down)[expert] @ hidden[slot].double()
                out[slot // index.shape[1]] += weights.flatten()[slot] * product

    def dequantize(self, matrix, first, out):
        self.calls.append("dequantize")
        out.copy_(weights_of(matrix)[first : first + len(out)])


def weights_of(matrix):
    return matrix.tables["weights"].double()


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins for the kernels of every format, on the CPU."""
    found = Kernels()
    for module in (backend, own, prompt):
        monkeypatch.setattr(module, "kernels_of", lambda kind: found)
    monkeypatch.setattr(backend, "_current", lambda needed, x: nullcontext())
    return found


def matrices(shapes, seed=0, kinds=None):
    """Random weights, exact in bfloat16, as CPU matrices and as stand-ins."""
    generator = torch.Generator().manual_seed(seed)
    both = []
    for place, shape in enumerate(shapes):
        weights = (torch.randn(shape, generator=generator) / max(shape[2], 1) ** 0.5).bfloat16().float()
        blob = torch.from_numpy(dense_blob(weights.numpy()))
        kind = kinds[place] if kinds else "groupwise"
        matrix = DeviceMatrix(blob, shape, kind, kind, {}, {}, {"weights": weights})
        both.append((CpuBackend().open(blob), matrix))
    return [cpu for cpu, _ in both], [gpu for _, gpu in both]


def layer(experts, inner, hidden):
    return [(experts, inner, hidden), (experts, inner, hidden), (experts, hidden, inner)]


def routed(tokens, choices, experts, hidden, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    index = torch.randint(-1, experts + 2, (tokens, choices), generator=generator)
    return x, index, torch.rand(tokens, choices, generator=generator)


def for_the_cpu(index, experts):
    """Without negative numbers, which only GPUs skip."""
    return torch.where(index < 0, experts, index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "choices", "path"), [(1, 2, "gated"), (64, 8, "gated"), (65, 2, "dequantize")])
def test_layers_equal_those_of_the_cpu(kernels, tokens, choices, path, dtype):
    experts, hidden = 7, 48
    cpu, gpu = matrices(layer(experts, 40, hidden))
    x, index, weights = routed(tokens, choices, experts, hidden, dtype)
    for activation in (functional.silu, functional.gelu):
        kernels.calls.clear()
        found = GpuBackend().experts(gpu, x, index, weights, activation, None)
        expected = CpuBackend().experts(cpu, x, for_the_cpu(index, experts), weights, activation, None)
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)
        other = "project" if tokens <= 64 else "dequantize"
        assert kernels.calls[0] == (path if activation is functional.silu else other)


@pytest.mark.parametrize(("kind", "tokens"), [("coded", 64), ("codebook", 256), ("ternary", 64)])
def test_more_tokens_use_several_calls_while_that_is_faster(kernels, kind, tokens):
    cpu, gpu = matrices(layer(5, 16, 24), kinds=[kind] * 3)
    x, index, weights = routed(tokens, 2, 5, 24, torch.bfloat16)
    found = GpuBackend().experts(gpu, x, index, weights, functional.silu, None)
    expected = CpuBackend().experts(cpu, x, for_the_cpu(index, 5), weights, functional.silu, None)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)
    assert kernels.calls == ["gated", "combine"] * -(-tokens // 64)
    kernels.calls.clear()
    for more in (x.float().repeat(2, 1), x.repeat(2, 1)):  # float32 activations are not rounded
        GpuBackend().experts(gpu, more, index.repeat(2, 1), weights.repeat(2, 1), functional.silu, None)
    assert set(kernels.calls) == {"dequantize"}


@pytest.mark.parametrize(
    ("kinds", "tokens", "dtype", "sorted_once"),
    [
        (["coded"] * 3, 17, torch.bfloat16, True), (["coded"] * 3, 60, torch.float16, True),
        (["coded"] * 3, 16, torch.bfloat16, False), (["coded"] * 3, 61, torch.bfloat16, False),
        (["coded"] * 3, 60, torch.float32, False), (["coded", "coded", "ternary"], 60, torch.bfloat16, False),
    ],
)  # fmt: skip
def test_coded_layers_of_many_tokens_are_sorted_once(kernels, monkeypatch, kinds, tokens, dtype, sorted_once):
    """For up to 24 tokens per expert: 60 tokens with two of five experts."""
    _, gpu = matrices(layer(5, 16, 24), kinds=kinds)
    x, index, weights = routed(tokens, 2, 5, 24, dtype)
    found = []
    monkeypatch.setattr(coded_layer, "experts", lambda of, x, *_: found.append(len(of)) or torch.zeros(len(x), 24))
    GpuBackend().experts(gpu, x, index, weights, functional.silu, None)
    assert (found == [3]) == sorted_once and bool(kernels.calls) != sorted_once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "products"), [(1, 2), (3, 1), (64, 2)])
def test_experts_with_code_of_their_own(kernels, tokens, products, dtype):
    experts, inner, hidden = 7, 40, 48
    generator = torch.Generator().manual_seed(tokens)
    _, gpu = matrices([(experts, inner, hidden)] * products + [(experts, hidden, inner)])
    first, last = (torch.randn(experts, size, generator=generator) for size in (inner, hidden))
    code = Between(
        lambda parts, expert: sum(parts) + first[expert], lambda outputs, expert: outputs.clamp(-1, 1) + last[expert]
    )
    x, index, weights = routed(tokens, 3, experts, hidden, dtype)
    found = GpuBackend().own_experts(gpu, x, index, weights, code, None)
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token, slot in np.ndindex(*index.shape):
        if 0 <= (expert := int(index[token, slot])) < experts:
            row = sum(weights_of(matrix)[expert] @ x[token].double() for matrix in gpu[:-1]) + first[expert]
            row = (weights_of(gpu[-1])[expert] @ row).clamp(-1, 1) + last[expert]
            expected[token] += weights[token, slot] * row
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert kernels.calls == ["project"] * (products + 1)
    many = x.repeat(70, 1), index.repeat(70, 1), weights.repeat(70, 1)
    assert GpuBackend().own_experts(gpu, *many, code, None) is None


@pytest.mark.parametrize("decoded", [1, 3 * 40 * 48 * 2, 1 << 30])
@pytest.mark.parametrize("tokens", [1, 70, 300])
def test_prompts_are_decoded_a_few_experts_at_a_time(kernels, monkeypatch, decoded, tokens):
    monkeypatch.setattr(prompt, "DECODED_BYTES", decoded)
    cpu, gpu = matrices(layer(7, 40, 48))
    x, index, weights = routed(tokens, 2, 7, 48)
    index[index == 3] = 4  # an expert without tokens in the middle
    found = prompt.experts(gpu, x, index, weights, functional.silu)
    expected = CpuBackend().experts(cpu, x, for_the_cpu(index, 7), weights, functional.silu, None)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("decoded", [1, 1 << 30])
def test_rows_sorted_by_expert(kernels, monkeypatch, decoded):
    """The requests of biased, clamped and sorted experts: an expert without rows, rows after the last expert's."""
    monkeypatch.setattr(prompt, "DECODED_BYTES", decoded)
    (cpu,), (gpu,) = matrices([(4, 40, 48)])
    x, offsets = torch.randn(11, 48), torch.tensor([0, 3, 3, 8, 9])
    found = GpuBackend().grouped(gpu, x, offsets, None)
    torch.testing.assert_close(found, CpuBackend().grouped(cpu, x, offsets, None), rtol=0.03, atol=0.03)
    assert not found[9:].any() and not GpuBackend().grouped(gpu, x[:0], offsets * 0, None).numel()


def test_layers_of_channels_are_cut_into_calls_that_kernels_take(monkeypatch):
    shape, random = (3, 40, 64), np.random.default_rng(0)
    up = GroupwiseTensor.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)), 2, 64)
    values = torch.from_numpy(random.standard_normal((3, 40, 128), np.float32) / 8).bfloat16().view(torch.uint16)
    records = _core.encode_channels(values.numpy(), np.full(3, 6, np.float32), bits=16)
    packed = [CpuBackend().open(torch.from_numpy(np.array(data))) for data in (up.data, records)]
    made = [DeviceMatrix(torch.empty(0), tensor.shape, tensor.kind, tensor.format, {}, {}) for tensor in packed]
    calls = []

    class Sparse:
        def sparse(self, up, channels, x, index, weights, out):
            calls.append(len(x))
            out.copy_(CpuBackend().sparse_experts(packed, x, for_the_cpu(index, 3), weights, "exact")[0])

    monkeypatch.setattr(backend.channels, "KERNELS", Sparse())
    monkeypatch.setattr(backend, "_current", lambda needed, x: nullcontext())
    for tokens, choices, sizes in ((1, 2, [1]), (130, 2, [64, 64, 2]), (9, 100, [5, 4])):
        x, index, weights = routed(tokens, choices, 3, 64)
        expected, _ = CpuBackend().sparse_experts(packed, x, for_the_cpu(index, 3), weights, "exact")
        found = GpuBackend().experts(made, x, index, weights, functional.silu, None)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert calls == sizes
        calls.clear()


def test_two_projections_and_families_that_differ_have_a_launch_each(kernels):
    cpu, gpu = matrices([(3, 40, 48), (3, 48, 40)])
    x, index, weights = routed(5, 1, 3, 48)
    found = GpuBackend().experts(gpu, x, index, weights, functional.relu, None)
    expected = CpuBackend().experts(cpu, x, for_the_cpu(index, 3), weights, functional.relu, None)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)
    _, gpu = matrices(layer(3, 40, 48), kinds=["groupwise", "codebook", "ternary"])
    GpuBackend().experts(gpu, x, index, weights, functional.silu, None)
    _, gpu = matrices(layer(3, 40, 48), kinds=["groupwise", "compensated", "ternary"])
    GpuBackend().experts(gpu, x, index, weights, functional.silu, None)
    assert kernels.calls[:-2] == ["project"] * 5 and kernels.calls[-2:] == ["gated", "combine"]


@pytest.mark.parametrize("tokens", [1, 64, 65])
def test_linear_layers(kernels, tokens):
    cpu, gpu = matrices([(1, 33, 47)])
    x = torch.randn(tokens, 47)
    found = GpuBackend().linear(gpu[0], x, None)
    torch.testing.assert_close(found, CpuBackend().linear(cpu[0], x, None), rtol=0.03, atol=0.03)
    assert kernels.calls == ["linear" if tokens <= 64 else "dequantize"]


@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8), (3, 4, 0)])
def test_nothing_gives_zeros(kernels, shape):
    _, gpu = matrices(layer(*shape))
    x, index, weights = routed(5, 2, shape[0], shape[2])
    assert torch.equal(GpuBackend().experts(gpu, x, index, weights, functional.silu, None), torch.zeros(5, shape[2]))
    assert GpuBackend().experts(gpu, x[:0], index[:0], weights[:0], functional.silu, None).shape == (0, shape[2])
    assert not kernels.calls


def test_wrong_activations_are_refused(kernels):
    _, (matrix,) = matrices([(1, 33, 47)])
    for x in (torch.ones(3, 47, dtype=torch.long), torch.ones(47), torch.ones(2, 3, 47, dtype=torch.float64)):
        with pytest.raises(ValueError, match="activations must be"):
            GpuBackend().linear(matrix, x, None)


def test_strided_and_shifted_activations(kernels):
    _, (matrix,) = matrices([(1, 33, 47)])
    wide = torch.randn(9, 2 * 47 + 1)
    for x in (wide[:, 1:48], wide[:, ::2][:, :47], wide.T[:47].T):
        expected = GpuBackend().linear(matrix, x.clone(), None)
        assert torch.equal(GpuBackend().linear(matrix, x, None), expected)


def test_tensors_on_different_devices_are_refused():
    _, gpu = matrices([(1, 33, 47)])
    with pytest.raises(moepack.LoadError, match="packed weights on 'cpu' cannot be used on 'meta'"):
        backend._current(gpu, torch.ones(1, 47, device="meta"))


def test_formats_without_kernels_are_named():
    assert {"groupwise", "compensated", "ternary", "codebook"} <= set(FAMILIES)
    with pytest.raises(moepack.LoadError, match="'test-dense' run only on the CPU"):
        kernels_of("test-dense")


@pytest.mark.parametrize("size", [1, PIECE - 1, PIECE, 2 * PIECE + 5])
def test_uploads_come_in_pieces_that_fit_a_buffer(size):
    places = pieces(size)
    assert [place.start for place in places] == [0, *(place.stop for place in places[:-1])]
    assert places[-1].stop == size and max(place.stop - place.start for place in places) <= PIECE

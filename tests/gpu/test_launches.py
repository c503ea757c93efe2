"""Launch configurations on simulated GPUs: recorded requests to the driver."""

import ctypes
import itertools

import numpy as np
import pytest
import torch

from moepack import GroupwiseTensor, _core
from moepack.backends.base import Between, Clamped
from moepack.backends.gpu import (
    codebook,
    coded,
    coded_launch,
    coded_layer,
    grouped,
    groupwise,
    groupwise_linear,
    layer,
    linear,
)
from moepack.backends.gpu.matrix import DeviceMatrix
from moepack.backends.gpu.program import Program

H100 = layer.Device(132, 228 << 10, (227 << 10) - layer._STATIC_BYTES, has_warpgroups=True)
A100 = layer.Device(108, 164 << 10, (163 << 10) - layer._STATIC_BYTES, has_warpgroups=False)
CLUSTERS = {2: 66, 4: 30, 8: 15}
"""The number of concurrent clusters of an H100 by blocks per cluster, one block per multiprocessor."""


@pytest.fixture(params=[H100, A100], ids=["h100", "a100"])
def launches(request, monkeypatch):
    """The launches on a simulated GPU: name, grid, arguments, blocks per cluster."""
    found, device = [], request.param

    def record(self, name, grid, block, arguments, shared=0, *, early=False, cluster=1):
        assert shared <= device.most_shared and block <= 1024
        found.append((name, grid, arguments, cluster))

    monkeypatch.setattr(Program, "launch", record)
    monkeypatch.setattr(Program, "clusters", lambda self, name, cluster, *_: CLUSTERS[cluster])
    for module in (layer, groupwise, codebook, grouped):
        monkeypatch.setattr(module, "device_of", lambda tensor: device)
    monkeypatch.setattr(layer, "is_hopper", lambda index: device is H100)
    layer._clusters.cache_clear()
    return found


def matrix(experts, rows, columns):
    """A matrix that claims a number of rows, with the bytes of sixteen."""
    data = np.array(GroupwiseTensor.quantize(torch.randn(experts, 16, columns), 4, 64).data)
    opened = _core.PackedTensor(data)
    shape = experts, rows, columns
    return DeviceMatrix(torch.from_numpy(data), shape, opened.kind, opened.format, opened.details(), opened.sections())


@pytest.mark.parametrize("tokens", [1, 4, 5, 8, 9, 33, 64])
@pytest.mark.parametrize("rows", [7, 2048, 4096, 14336])
def test_blocks_of_a_linear_layer_run_at_a_time(launches, rows, tokens):
    kernels = groupwise.KERNELS
    layer.LayerKernels.linear(kernels, matrix(1, rows, 256), torch.randn(tokens, 256), torch.empty(tokens, rows))
    combines = [launch for launch in launches if launch[0] == "combine"]
    in_parts = 0
    for _, grid, arguments, cluster in combines:
        problem = arguments[0][0]
        team = 1 << problem["split_bits"]
        assert grid == team * problem["teams"]["by"] and cluster == (1 if problem["in_parts"] else team)
        assert cluster == 1 or -(-rows // (16 * problem["row_blocks"])) <= problem["teams"]["by"] <= CLUSTERS[cluster]
        in_parts += problem["in_parts"]
    assert sum(name == "add_splits" for name, *_ in launches) == in_parts


@pytest.mark.parametrize("launches", [H100], indirect=True)
@pytest.mark.parametrize(
    ("rows", "columns", "tokens"), [(7, 40, 1), (257, 1000, 9), (4096, 14336, 16), (14336, 4096, 64)]
)
def test_a_linear_layer_on_hopper_has_room_for_its_parts(launches, monkeypatch, rows, columns, tokens):
    sizes = []
    monkeypatch.setattr(groupwise_linear, "pays_from", lambda _: 1)
    monkeypatch.setattr(linear.torch, "empty", lambda size, **_: sizes.append(size) or torch.zeros(size))
    small = matrix(1, 16, columns)
    small.shape = 1, rows, columns
    groupwise.KERNELS.linear(small, torch.randn(tokens, columns), torch.zeros(tokens, rows))
    problem = launches[0][2][0]
    before = [] if problem["own"] else ["prepare"]
    assert [name for name, *_ in launches] == [*before, f"linear_{problem['columns'][0]}", "add"]
    chunks, blocks, items = (int(problem[name][0]) for name in ("chunks", "blocks", "items"))
    starts = [items * block // blocks for block in range(blocks + 1)]
    assert launches[-2][1] == blocks <= H100.processors and min(np.diff(starts)) > 0
    assert problem["own"] in (0, min(max(np.diff(starts)), chunks))
    # The number of blocks with items of a tile, as computed by the kernels (`block_of`) and by the parts.
    owners = [[block for block in range(blocks) if starts[block] < last and starts[block + 1] > last - chunks]
              for last in range(chunks, items + 1, chunks)]  # fmt: skip
    found = [((last - chunks + 1) * blocks - 1) // items for last in range(chunks, items + 1, chunks)]
    assert found == [each[0] for each in owners]
    parts = 4 * tokens * rows * max(map(len, owners))
    assert int(problem["parts"][0]) - int(problem["cells"][0]) + parts <= sizes[0]


@pytest.mark.parametrize("tokens", [1, 5, 16, 64])
def test_layers_are_two_launches_and_small_ones(launches, tokens):
    gate, down = matrix(8, 768, 2048), matrix(8, 2048, 768)
    index, weights = torch.zeros(tokens, 2, dtype=torch.int64), torch.ones(tokens, 2)
    hidden, out = torch.empty(2 * tokens, 768), torch.empty(tokens, 2048)
    groupwise.KERNELS.gated(gate, gate, torch.randn(tokens, 2048), index, hidden)
    groupwise.KERNELS.combine(down, hidden, index, weights, out)
    names = [name for name, *_ in launches]
    # Sums of many tokens may exceed shared memory: then half of them are computed at a time.
    assert names.count("gated") == 1 and names.count("combine") in (1, 2)
    assert set(names) <= {"lay_out_tokens", "gated", "lay_out_hidden", "combine", "add_splits"}


@pytest.mark.parametrize("launches", [H100, A100], indirect=True)
@pytest.mark.parametrize("tokens", [16, 64, 65])
@pytest.mark.parametrize(("bits", "block", "activation_bits"), [(4, 512, 0), (4, 512, 8), (4, 128, 0), (3, 512, 0)])
def test_codebooks_of_whole_rows_have_linear_kernels_of_their_own(launches, bits, block, activation_bits, tokens):
    codes = np.zeros((1, 16, 500), np.uint8)
    blocks = -(-500 // block)
    data = _core.encode_codebook(
        codes, np.zeros((1, 16, blocks, 1 << bits), np.int16), np.ones((1, 16, blocks), np.float32), bits=bits,
        block=block, ndim=2, activation_bits=activation_bits,
    )  # fmt: skip
    opened = _core.PackedTensor(data)
    small = DeviceMatrix(
        torch.from_numpy(data), opened.shape, opened.kind, opened.format, opened.details(), opened.sections()
    )
    codebook.KERNELS.linear(small, torch.randn(tokens, 500), torch.zeros(tokens, 16))
    names = [name for name, *_ in launches]
    own = "add" in names
    assert own == (bits == 4 and block == 512 and tokens <= 64 and layer.device_of(small.data).has_warpgroups)
    if own:
        before = ["prepare_tokens"] if activation_bits else []
        assert names == [*before, *(["prepare"] if tokens > 16 else []), f"linear_{tokens}", "add"]
        assert bool(launches[-1][2][0]["units"]) == bool(activation_bits)


@pytest.mark.parametrize("launches", [H100], indirect=True)
@pytest.mark.parametrize(("tokens", "columns"), [(40, 16), (90, 32), (300, 64), (5, 16)])
def test_layers_of_many_tokens_are_six_launches(launches, tokens, columns):
    gate, down = matrix(8, 776, 2048), matrix(8, 2048, 776)
    index, weights = torch.zeros(tokens, 2, dtype=torch.int64), torch.ones(tokens, 2)
    out = grouped.experts([gate, gate, down], torch.randn(tokens, 2048).bfloat16(), index, weights)
    assert out.shape == (tokens, 2048) and out.dtype is torch.float32
    names = [name for name, *_ in launches]
    assert names == ["route", "lay_out", f"gated_{columns}", "lay_out", f"project_{columns}", "add"]
    tiles = min(2 * tokens, 2 * tokens // columns + 8)  # the most that any routing of eight experts needs
    for number, top_k, row_tiles in ((1, 2, 7), (3, 0, 8)):
        _, grid, (layout,), _ = launches[number]
        assert grid * grouped._LAYOUT_PLACES == tiles * columns == tiles * layout["columns"][0]
        assert layout["top_k"] == top_k
        _, grid, (problem, *_), _ = launches[number + 1]
        assert problem["row_tiles"] == row_tiles and grid == min(132, tiles * row_tiles)
        assert problem["cells"] == layout["cells"] and problem["scales"] == layout["scales"]


@pytest.mark.parametrize("launches", [H100], indirect=True)
@pytest.mark.parametrize("products", [1, 2])
def test_many_tokens_of_experts_with_code_of_their_own(launches, products):
    """A launch lays out the activations of each product; a clamped gate and biased sums have a launch each."""
    matrices = [matrix(8, 32, 64) for _ in range(products)] + [matrix(8, 64, 32)]
    x, index, weights = torch.randn(70, 64).bfloat16(), torch.zeros(70, 2, dtype=torch.int64), torch.rand(70, 2)
    seen = []

    def between(parts, expert):
        seen.append((len(parts), len(parts[0]), len(expert)))
        return parts[0]

    code = Between(between, lambda outputs, expert: outputs)
    grouped.experts(matrices, x, index, weights, code)
    names = [name.partition("_")[0] for name, *_ in launches]
    assert names == ["route", *["lay", "project"] * (products + 1), "add"]
    ((parts, rows, experts),) = seen
    assert parts == products and rows == experts and rows % 16 == 0 and rows >= 140
    launches.clear()
    if products == 2:
        grouped.experts(matrices, x, index, weights, code._replace(clamped=Clamped(1.7, 7.0, None, None, True)))
        names = [name.partition("_")[0] for name, *_ in launches]
        assert names == ["route", "lay", "project", "lay", "project", "gate", "lay", "project", "sum"]


@pytest.mark.parametrize("launches", [H100], indirect=True)
def test_outputs_of_many_tokens_are_bounded(launches, monkeypatch):
    monkeypatch.setattr(grouped, "OUTPUT_BYTES", 4 * 2048 * 2 * 64)
    gate, down = matrix(8, 768, 2048), matrix(8, 2048, 768)
    index, weights = torch.zeros(150, 2, dtype=torch.int64), torch.ones(150, 2)
    grouped.experts([gate, gate, down], torch.randn(150, 2048).bfloat16(), index, weights)
    assert [launch[2][2] for launch in launches if launch[0] == "route"] == [128, 128, 44]


@pytest.mark.parametrize(("rows", "calls"), [(14336, 4), (2048, 1)])
def test_large_linear_layers_use_several_calls_on_hopper(launches, rows, calls):
    hopper = layer.device_of(torch.empty(0)).has_warpgroups
    assert groupwise.KERNELS.linear_calls(matrix(1, rows, 4096)) == (calls if hopper else 1)


def at(address, dtype, shape):
    """The array at an address of this process's memory."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_ubyte * size).from_address(int(address)), dtype).reshape(shape)


def scale_columns(problem, scales, rows, each, out):
    """Simulates the kernel of this name on the memory of this process."""
    width, top = int(problem["x"]["columns"][0]), -(-rows // each)
    x = at(problem["x"]["data"][0], np.float32, (top, width))
    for row in range(rows):
        stride, expert = int(scales["stride"][0]), 0
        if stride:
            expert = int(at(problem["index"][0], np.int64, (rows,))[row])
            if not 0 <= expert < problem["experts"][0]:
                continue
        out[row] = torch.from_numpy(x[row // each] * at(scales["first"][0] + 4 * expert * stride, np.float32, (width,)))


@pytest.fixture
def coded_launches(monkeypatch):
    """Products with coded integers on a simulated H100: name, problem, and activations."""
    found = []

    def record(self, name, grid, block, arguments, shared=0, *, early=False, cluster=1):
        assert 1 <= grid <= 4 * 132 and block <= 1024
        if name == "scale_columns":
            scale_columns(*arguments)
        elif name == "route":
            found.append((name, arguments[0][0].copy(), None))
        elif not name.startswith("lay_out"):
            problem = arguments[0][0]
            rows = int(problem["tokens"]) * (int(problem["top_k"]["by"]) if name == "combine" else 1)
            reads = name in ("project", "gated", "combine")
            x = at(problem["x"]["data"], np.float32, (rows, int(problem["x"]["columns"]))).copy() if reads else None
            found.append((name, problem.copy(), x))

    monkeypatch.setattr(Program, "launch", record)
    monkeypatch.setattr(Program, "load_all", lambda programs: None)
    for module in (coded, coded_launch, coded_layer):
        monkeypatch.setattr(
            module, "processors_and_memory", lambda index: (132, (227 << 10) - coded_launch._STATIC_BYTES)
        )
    return found


def coded_matrix(shape, columns):
    """A matrix with a number of rows of column scales, and the scales, one row per expert."""
    codes, one = np.zeros(shape, np.int8), np.ones((1, 1), np.float32)
    scales = np.random.default_rng(columns).uniform(1, 2, (columns, shape[2])).astype(np.float32) if columns else None
    data = torch.from_numpy(coded.uploaded(_core.encode_coded(codes, one, ndim=3, columns=scales)))
    own = DeviceMatrix(data, shape, "coded", "coded", {"symbols": "plain"}, {})
    coded.KERNELS.prepare(own)
    return own, np.ones(shape[::2], np.float32) if scales is None else np.broadcast_to(scales, shape[::2])


def assert_slots_see(launch, x, index, scales):
    """Each slot multiplies its activations [slots, C] times the scales of its expert's columns."""
    name, problem, found = launch
    assert int(problem["tokens"]) * int(problem["top_k"]["by"]) == index.numel()
    for slot, expert in enumerate(index.flatten().tolist()):
        if expert < len(scales):
            row = found[slot if name == "combine" else slot // int(problem["top_k"]["by"])]
            np.testing.assert_array_equal(row[: x.shape[1]], x[slot].numpy() * scales[expert])
            assert not row[x.shape[1] :].any()


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("width", [64, 301])
@pytest.mark.parametrize("columns", list(itertools.product((0, 1, 5), repeat=2)))
def test_coded_integers_multiply_activations_times_scales_of_columns(coded_launches, columns, width, tokens):
    (gate, first), (up, second) = (coded_matrix((5, 40, width), rows) for rows in columns)
    x, index = torch.randn(tokens, width), torch.rand(tokens, 6).argsort(1)[:, :3].contiguous()
    of_slots = x.repeat_interleave(3, 0)
    coded.KERNELS.gated(gate, up, x, index, torch.empty(3 * tokens, 40))
    names = [name for name, *_ in coded_launches]
    assert names == (["gated"] if columns[0] == columns[1] else ["project", "project", "gate_slots"])
    for launch, scales in zip(coded_launches, (first, second), strict=False):
        assert_slots_see(launch, of_slots, index, scales)
    coded_launches.clear()
    coded.KERNELS.project(up, x, index, torch.empty(3 * tokens, 40))
    assert_slots_see(coded_launches[0], of_slots, index, second)
    coded_launches.clear()
    coded.KERNELS.combine(up, of_slots, index, torch.rand(tokens, 3), torch.empty(tokens, 40))
    assert [name for name, *_ in coded_launches] == ["combine"]
    assert_slots_see(coded_launches[0], of_slots, index, second)


@pytest.mark.parametrize("tokens", [10, 40])
@pytest.mark.parametrize("columns", list(itertools.product((0, 1, 9), repeat=2)))
def test_coded_layers_of_many_tokens_are_sorted_once(coded_launches, columns, tokens):
    (gate, first), (up, second) = (coded_matrix((9, 40, 301), rows) for rows in columns)
    down, _ = coded_matrix((9, 301, 40), 0)
    x, index = torch.randn(tokens, 301), torch.rand(tokens, 10).argsort(1)[:, :3].contiguous()
    out = coded_layer.experts([gate, up, down], x, index, torch.rand(tokens, 3))
    assert out.shape == (tokens, 301) and out.dtype is torch.float32
    (route, routes, _), *products, (last, _, _) = coded_launches
    gated = ["gated"] if columns[0] == columns[1] else ["project", "project"]
    names = [name for name, *_ in products]
    assert (route, last) == ("route", "add_slots") and names == [*gated, "gate_slots", "project"]
    for launch, scales in zip(products, (first, second)[: len(gated)], strict=False):
        assert_slots_see(launch, x.repeat_interleave(3, 0), index, scales)
    for name, problem, _ in products:
        assert name == "gate_slots" or (problem["routes"] == routes and problem["cells"])


def test_coded_layers_of_many_tokens_decode_weights_about_once(coded_launches):
    matrices = [coded_matrix(shape, 0)[0] for shape in ((8, 40, 256), (8, 40, 256), (8, 256, 40))]
    assert coded_layer.supports(matrices, 8 * 24) and not coded_layer.supports(matrices, 8 * 24 + 1)
    assert not coded_layer.supports(matrices[1:], 8)


@pytest.mark.parametrize(("largest", "small"), [(0, True), (300, True), (-300, True), (5000, False), (-5000, False)])
def test_codes_with_several_corrections_are_known(coded_launches, largest, small):
    codes = np.zeros((2, 20, 300), np.int32)
    codes[1, 7, 200] = largest
    data = torch.from_numpy(coded.uploaded(_core.encode_coded(codes, np.ones((1, 1), np.float32), ndim=3)))
    own = DeviceMatrix(data, codes.shape, "coded", "coded", {"symbols": "plain"}, {})
    coded.KERNELS.prepare(own)
    assert bool(coded_launch.numbers(own)[-1]) == small


@pytest.mark.parametrize("columns", [0, 1, 4])
def test_coded_sums_that_do_not_fit_are_of_scaled_activations(coded_launches, columns):
    down, scales = coded_matrix((4, 40, 4100), columns)
    hidden, index = torch.randn(120, 4100), torch.rand(40, 5).argsort(1)[:, :3].contiguous()
    coded.KERNELS.combine(down, hidden, index, torch.rand(40, 3), torch.empty(40, 40))
    assert [name for name, *_ in coded_launches] == ["project", "add_slots"]
    assert_slots_see(coded_launches[0], hidden, index, scales)


@pytest.mark.parametrize("columns", [0, 1])
def test_coded_linear_layers_multiply_activations_times_scales_of_columns(coded_launches, columns):
    weight, scales = coded_matrix((1, 40, 301), columns)
    x = torch.randn(7, 301)
    coded.KERNELS.linear(weight, x, torch.empty(7, 40))
    assert_slots_see(coded_launches[0], x, torch.zeros(7, dtype=torch.int64), scales)

"""How launches are cut, on GPUs that are not there: what the driver would be asked for, recorded."""

import numpy as np
import pytest
import torch

from moepack import GroupwiseTensor, _core
from moepack.runtime.backends.gpu import codebook, groupwise, groupwise_linear, layer, linear
from moepack.runtime.backends.gpu.matrix import DeviceMatrix
from moepack.runtime.backends.gpu.program import Program

H100 = layer.Device(132, 228 << 10, (227 << 10) - layer._STATIC_BYTES, has_warpgroups=True)
A100 = layer.Device(108, 164 << 10, (163 << 10) - layer._STATIC_BYTES, has_warpgroups=False)
CLUSTERS = {2: 66, 4: 30, 8: 15}
"""How many clusters of so many blocks an H100 runs at a time, a block a multiprocessor."""


@pytest.fixture(params=[H100, A100], ids=["h100", "a100"])
def launches(request, monkeypatch):
    """The launches on such a GPU: a name, a grid, the kernel's arguments, blocks of a cluster."""
    found, device = [], request.param

    def record(self, name, grid, block, arguments, shared=0, *, early=False, cluster=1):
        assert shared <= device.most_shared and block <= 1024
        found.append((name, grid, arguments, cluster))

    monkeypatch.setattr(Program, "launch", record)
    monkeypatch.setattr(Program, "clusters", lambda self, name, cluster, *_: CLUSTERS[cluster])
    for module in (layer, groupwise, codebook):
        monkeypatch.setattr(module, "device_of", lambda tensor: device)
    monkeypatch.setattr(layer, "is_hopper", lambda index: device is H100)
    layer._clusters.cache_clear()
    return found


def matrix(experts, rows, columns):
    """A matrix said to have so many rows, of the bytes of sixteen."""
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
    # How many blocks have items of a tile: what the kernels compute, `block_of`, and what parts take.
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
    # Sums of many tokens may need more shared memory than there is: then half of them are made at a time.
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

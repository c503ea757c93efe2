"""The loops over columns of integers in groups: the kernels compiled for the host, and on a GPU, against torch."""

import subprocess

import numpy as np
import pytest
import torch
from emulation import Emulator

from moepack.backends.gpu import columns
from moepack.solvers.gptq import gptq, round_columns
from moepack.solvers.grids import TernaryGrid
from moepack.solvers.integers import IN_TORCH, Groups, IntegerSettings, descend, solve_integers

SHAPES = [(1, 3, 5), (2, 130, 16), (3, 257, 7)]
SETTINGS = [IntegerSettings(2, 16), IntegerSettings(3, 32, symmetric=False), IntegerSettings(8, None)]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return Emulator("columns.cpp", tmp_path_factory.mktemp("columns"))("columns.cu", "none")


def grid_of(shape, settings, seed=0):
    """Return the grid of random weights with 50 columns; the first row is zero. Without settings, it is ternary."""
    experts, rows, _ = shape
    weights = torch.randn(experts, rows, 50, generator=torch.Generator().manual_seed(seed))
    weights[:, 0] = 0
    if settings is None:
        grid = TernaryGrid()
        grid.fit(0.3 * weights)
        return grid
    return Groups.of(weights, settings)


def emulated(program, folder, kind, grid, groups, tensors):
    """Run a kernel on the host; return what it writes."""
    experts, rows, count = tensors[0].shape[0], tensors[0].shape[2], tensors[0].shape[1]
    files = []
    ternary = isinstance(grid, TernaryGrid)
    given = (None, None, None, grid.levels) if ternary else (grid.scales, grid.offsets, groups.int(), None)
    for number, tensor in enumerate([*tensors, *given]):
        files.append("-" if tensor is None else folder / str(number))
        if tensor is not None:
            files[-1].write_bytes(tensor.contiguous().numpy().tobytes())
    own = (0, 0, 0) if ternary else (grid.scales.shape[2], grid.middle, 2**grid.bits - 1)
    sizes = experts, rows, count, *own
    command = [program, kind, *files, *map(str, sizes)]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


def floats(printed, shape, number):
    return torch.from_numpy(np.frombuffer(printed, np.float32, number * shape.numel()).copy()).view(number, *shape)


@pytest.mark.parametrize("settings", [*SETTINGS, None], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_columns_are_rounded_as_in_torch(program, tmp_path, shape, settings):
    experts, rows, count = shape
    grid, generator = grid_of(shape, settings), torch.Generator().manual_seed(1)
    free = torch.randn(experts, count, rows, generator=generator)
    errors = free + 0.1 * torch.randn(free.shape, generator=generator)
    upper = torch.eye(count) + (0.2 * torch.randn(experts, count, count, generator=generator)).triu(1)
    places = torch.stack([torch.randperm(50, generator=generator)[:count] for _ in range(experts)])
    groups = None if settings is None else places // grid.width
    printed = emulated(program, tmp_path, "round", grid, groups, [free, errors, upper])
    left = torch.empty_like(free)
    codes, values = round_columns(grid, free, errors, left, upper, places, torch.ones(experts, count))
    found = floats(printed, free.shape, 3)
    written = torch.from_numpy(np.frombuffer(printed, np.uint8)[-free.numel() :].copy()).view(free.shape)
    assert torch.equal(written.view(codes.dtype), codes) and (settings or len(codes.unique()) == 3)
    for mine, expected in zip(found, (errors, values, left), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_descend_as_in_torch(program, tmp_path, shape, settings):
    experts, rows, count = shape
    grid, generator = grid_of(shape, settings), torch.Generator().manual_seed(2)
    codes = torch.randint(2**settings.bits, (experts, count, rows), generator=generator).float()
    gradient, start = torch.randn(codes.shape, generator=generator), 27
    metric = torch.randn(experts, count, 2 * count, generator=generator)
    metric = metric @ metric.mT / count
    groups = ((start + torch.arange(count)) // grid.width).expand(experts, count)
    printed = emulated(program, tmp_path, "descend", grid, groups, [gradient, codes, metric])
    changes = torch.empty_like(codes)
    descend(grid, start, codes, gradient, changes, metric)
    found_codes, found_changes = floats(printed, codes.shape, 2)
    assert torch.equal(found_codes, codes)
    torch.testing.assert_close(found_changes, changes, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_gpu_solves_as_well_as_torch(settings):
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(3, 130, 300, generator=generator)
    inputs = torch.randn(3, 500, 300, generator=generator) * torch.rand(300, generator=generator)
    given = weights.cuda(), (inputs.mT @ inputs).cuda(), settings
    found, expected = solve_integers(*given, columns.LOOPS), solve_integers(*given, IN_TORCH)
    assert (found.codes == expected.codes).float().mean() > 0.99
    torch.testing.assert_close(found.errors, expected.errors, rtol=2e-3, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_rounds_ternary_rows_as_torch():
    generator = torch.Generator().manual_seed(4)
    weights = torch.randn(3, 130, 300, generator=generator).cuda()
    inputs = torch.randn(3, 500, 300, generator=generator).cuda()
    grids = TernaryGrid(), TernaryGrid()
    found = gptq(weights, inputs.mT @ inputs, grids[0], rounder=columns.round_columns)
    expected = gptq(weights, inputs.mT @ inputs, grids[1])
    assert found.codes.dtype == expected.codes.dtype and (found.codes == expected.codes).float().mean() > 0.99
    losses = [torch.tensor([report.loss for report in result.reports]) for result in (found, expected)]
    torch.testing.assert_close(*losses, rtol=2e-3, atol=0)

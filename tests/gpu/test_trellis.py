"""The search for dependent codes: the kernels compiled for the host, and on a GPU, against the core."""

import subprocess

import numpy as np
import pytest
import torch
from emulation import Emulator

from moepack import _core
from moepack.backends.gpu import trellis
from moepack.solvers.problem import visits
from moepack.solvers.uniform import LANES

STEP = 0.03


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return Emulator("trellis.cpp", tmp_path_factory.mktemp("trellis"))("trellis.cu", "none")


def problem(shape, seed=0, lists=2, largest=31, scale=0.1):
    """Random weights, factors and lengths, the arguments of `_core.solve_dependent`."""
    experts, rows, columns = shape
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(shape, generator=generator) * scale
    upper = torch.eye(columns) + torch.randn(experts, columns, columns, generator=generator).triu(1) * 0.05
    pivots = torch.rand(experts, columns, generator=generator) + 0.5
    lengths = torch.rand(lists, 2 * largest + 3, generator=generator) * 6 + 1
    runs = torch.randint(lists, (experts, rows), generator=generator)
    return weights, upper, pivots, torch.full((experts,), 0.01), lengths, runs


def solved(given):
    """Codes and losses of the core."""
    codes, losses = _core.solve_dependent(*(each.contiguous().numpy() for each in given), step=STEP)
    return torch.from_numpy(codes), torch.from_numpy(losses)


def emulated(program, folder, given):
    """Codes and losses of the kernels on the host."""
    weights, upper, pivots, prices, lengths, runs = given
    order = visits(weights.shape[2], LANES)
    fine = torch.tensor(4 / STEP, dtype=torch.float32)
    tensors = weights[..., order] * fine, upper, pivots, 16 * prices, trellis.pairs(lengths), runs.int()
    files = []
    for number, tensor in enumerate(tensors):
        files.append(folder / str(number))
        files[-1].write_bytes(tensor.contiguous().numpy().tobytes())
    command = [program, *files, *map(str, weights.shape), *map(str, lengths.shape)]
    printed = np.frombuffer(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout, np.int32).copy()
    found, work = torch.from_numpy(printed).view(2, *weights.shape).unbind()
    codes = torch.empty_like(found)
    codes[..., order] = found
    errors = (work.contiguous().view(torch.float32) - found).double()
    return codes, errors.square().sum(1) * pivots.double().square()


@pytest.mark.parametrize("shape", [(1, 3, 5), (2, 9, 70), (1, 17, 263)])
def test_the_kernels_find_the_codes_of_the_core(program, tmp_path, shape):
    given = problem(shape)
    codes, losses = emulated(program, tmp_path, given)
    expected, expected_losses = solved(given)
    assert torch.equal(codes, expected)
    torch.testing.assert_close(losses, expected_losses)


@pytest.mark.parametrize("scale", [1e-4, 30.0, 1e9])
def test_weights_far_from_the_step_get_the_codes_of_the_core(program, tmp_path, scale):
    given = problem((1, 8, 40), seed=1, largest=5, scale=scale)
    assert torch.equal(emulated(program, tmp_path, given)[0], solved(given)[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(1, 3, 5), (3, 70, 263), (5, 96, 1024)])
def test_a_gpu_finds_the_codes_of_the_core(shape, monkeypatch):
    monkeypatch.setattr(trellis, "_BYTES", 1 << 20)
    given = problem(shape)
    codes, losses = trellis.solve_dependent(*(each.cuda() for each in given), step=STEP)
    expected, expected_losses = solved(given)
    assert torch.equal(codes.cpu(), expected)
    torch.testing.assert_close(losses.cpu(), expected_losses)

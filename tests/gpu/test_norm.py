"""RMS norms in one launch: the kernel compiled for the host, and the modules that it replaces."""

import subprocess

import numpy as np
import pytest
import torch
from emulation import Emulator
from torch import nn

from moepack.backends.gpu import norm

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
    return Emulator("norm.cpp", tmp_path_factory.mktemp("norm"))("norm.cu", "none")


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize(("rows", "columns", "threads"), [(3, 8, 32), (2, 128, 32), (2, 2056, 64)])
@torch.no_grad()
def test_rows_are_normalized_as_by_transformers(program, tmp_path, kind, rows, columns, threads):
    dtype = _TYPES[kind]
    module = Norm(columns, dtype)
    x = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(kind)) * 3).to(dtype)
    x[0] *= 3e-4
    for name, tensor in (("x", x), ("weight", module.weight)):
        (tmp_path / name).write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    numbers = map(str, (kind, rows, columns, module.variance_epsilon, threads))
    command = [program, tmp_path / "x", tmp_path / "weight", *numbers]
    printed = np.frombuffer(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout, np.uint8)
    found, expected = torch.from_numpy(printed.copy()).view(dtype).view(rows, columns), module(x)
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert kind == 2 or (found == expected).float().mean() > 0.99


def test_norms_on_the_cpu_are_left_alone():
    model = nn.Sequential(Norm(64, torch.bfloat16))
    with norm.fused_norms(model) as count:
        assert count == 0 and "forward" not in vars(model[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@torch.no_grad()
def test_norms_are_replaced_if_their_results_are_the_same():
    for dtype in _TYPES:
        model = nn.Sequential(
            Norm(128, dtype), Norm(2048, dtype), Norm(128, dtype, more=1.0), Norm(12, dtype), nn.LayerNorm(64, 1e-6)
        ).cuda()
        x = torch.randn(5, 3, 128, device="cuda").to(dtype)
        expected = model[0](x)
        with norm.fused_norms(model) as count:
            assert count == 2 and "forward" not in vars(model[2])
            found = model[0](x)
        assert "forward" not in vars(model[0])
        torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
    late = nn.Sequential(Norm(2048, torch.bfloat16, late=True)).cuda()
    with norm.fused_norms(late) as count:
        assert count == 0

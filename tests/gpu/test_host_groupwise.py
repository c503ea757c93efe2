"""The GPU decoder of group-wise integers, compiled for the host: a warp multiplies the core's weights."""

import subprocess

import numpy as np
import pytest
import torch
from emulation import build

from moepack import GroupwiseTensor


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Build the host program for a specification, once each."""
    folder = tmp_path_factory.mktemp("host")

    def built(**definitions):
        path = folder / "-".join(map(str, definitions.values()))
        options = [f"-D{name}={int(value)}" for name, value in definitions.items()]
        return path if path.exists() else build("groupwise.cpp", path, *options)

    return built


@pytest.mark.parametrize(
    ("bits", "group", "symmetric"),
    [
        *((3, group, symmetric) for group in (16, 32, 64, 128, 256, None) for symmetric in (True, False)),
        *((bits, group, group != 32) for bits in (2, 4, 8) for group in (16, 32, 64, 256)),
    ],
)
def test_a_warp_multiplies_the_weights_of_the_core(program, tmp_path, bits, group, symmetric):
    dtype = torch.float16 if bits % 2 else torch.bfloat16
    rows, columns = 33, 700 if group is None else 3 * group + 70
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(bits))
    tensor = GroupwiseTensor.quantize(weight, bits, group, symmetric=symmetric, search=False, dtype=dtype)
    path = tmp_path / "tensor"
    path.write_bytes(tensor.data.tobytes())
    executable = program(
        BITS=bits, GROUP=group or 0, SYMMETRIC=symmetric, HALVES=dtype is torch.float16, TOKENS=8, RESIDENT=2
    )
    blocks = -(-rows // 16)
    block_bytes = (tensor.nbytes - 128) // blocks
    printed = subprocess.run(
        [executable, path, "128", str(block_bytes), str(blocks), str(columns)], stdout=-1, check=True
    )
    values = np.frombuffer(printed.stdout, np.float32).reshape(blocks * 16, columns)
    expected = tensor.dequantize().numpy()
    np.testing.assert_allclose(values[:rows], expected, rtol=2e-7, atol=1e-7 * float(np.abs(expected).max()))
    assert not values[rows:].any()

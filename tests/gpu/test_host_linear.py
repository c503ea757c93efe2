"""Warpgroup products of linear layers, compiled for the host, use the core's weights."""

import subprocess

import numpy as np
import pytest
import torch
from emulation import Emulator

from moepack import GroupwiseTensor, _core

_HEADER = 128
_TYPES = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    """Builds the launches of a format for a specification."""
    return Emulator("linear.cpp", tmp_path_factory.mktemp("linear"))


def product(program, folder, data, x, rows, blocks, depth, own):
    """Multiply x by a packed matrix of a number of rows, in blocks with rings of a number of items."""
    tokens, columns = x.shape
    (folder / "weights").write_bytes(data.tobytes())
    padded = torch.nn.functional.pad(x, (0, -columns % 8)).contiguous()
    (folder / "x").write_bytes(padded.view(torch.uint8).numpy().tobytes())
    block_bytes = (data.nbytes - _HEADER) // -(-rows // 16)
    numbers = map(str, (_TYPES.index(x.dtype), tokens, rows, columns, blocks, depth, own))
    command = [program, folder / "weights", str(_HEADER), str(block_bytes), folder / "x", *numbers]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120)
    return torch.from_numpy(np.frombuffer(printed.stdout, np.float32).reshape(tokens, rows).copy())


def error(found, weights, x):
    """The norm of the difference to the product in float64 over that of the product."""
    expected = x.double() @ torch.as_tensor(weights).double().T
    return (found - expected).norm() / expected.norm()


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "cases"),
    [
        # Tokens, rows, columns, blocks, items of a ring, whether blocks make their cells, the type of activations.
        (
            3,
            64,
            False,
            [
                (3, 300, 300, 3, 2, 1, 0),
                (17, 33, 390, 3, 2, 0, 1),
                (64, 20, 100, 1, 2, 0, 0),
                (13, 20, 700, 1, 2, 1, 1),
            ],
        ),
        (8, 16, True, [(9, 33, 130, 1, 2, 0, 2), (6, 33, 700, 1, 2, 1, 2)]),
    ],
)
def test_groupwise_integers_multiply_by_the_weights_of_the_core(linear, tmp_path, bits, group, symmetric, cases):
    program = linear(
        "groupwise_linear.cu", "GroupwiseLinear", BITS=bits, GROUP=group, SYMMETRIC=symmetric, HALVES=True, TOKENS=64,
        RESIDENT=1, RANK_BITS=0,
    )  # fmt: skip
    for tokens, rows, columns, blocks, depth, own, kind in cases:
        generator = torch.Generator().manual_seed(tokens)
        weight = torch.randn(rows, columns, generator=generator)
        tensor = GroupwiseTensor.quantize(weight, bits, group, symmetric=symmetric, search=False, dtype=torch.float16)
        x = torch.randn(tokens, columns, generator=generator).to(_TYPES[kind])
        found = product(program, tmp_path, tensor.data, x, rows, blocks, depth, own)
        assert error(found, tensor.dequantize(), x) < (5e-4 if kind == 2 else 1e-5)


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "blocks", "depth", "own", "kind"),
    [
        (3, 300, 300, 3, 2, 1, 0),
        (17, 520, 390, 2, 3, 0, 1),
        (64, 20, 100, 1, 2, 0, 0),
        (9, 33, 130, 1, 2, 0, 2),
        (16, 33, 700, 1, 2, 1, 0),
    ],
)
def test_codebooks_multiply_by_the_weights_of_the_core(
    linear, tmp_path, planes, tokens, rows, columns, blocks, depth, own, kind
):
    random = np.random.default_rng(tokens)
    codes = random.integers(0, 16, (1, rows, columns), dtype=np.uint8)
    # Values exact in f16: the product equals that of the core's weights up to the rounding of sums.
    step = 256 if planes == 1 else 32
    centroids = (random.integers(-127 * 256 // step, 127 * 256 // step + 1, (1, rows, 1, 16)) * step).astype(np.int16)
    scales = random.uniform(0.5, 1.5, (1, rows, 1)).astype(np.float32)
    data = _core.encode_codebook(
        codes, centroids, scales, bits=4, block=1 << 16, ndim=2, activation_bits=8 if planes == 1 else 0
    )
    program = linear("codebook_linear.cu", "CodebookLinear", BITS=4, PLANES=planes, TOKENS=64, RESIDENT=1)
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(_TYPES[kind])
    found = product(program, tmp_path, data, x, rows, blocks, depth, own)
    assert error(found, _core.PackedTensor(data).dequantize()[0], x) < (5e-4 if kind == 2 else 1e-5)

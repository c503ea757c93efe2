"""Layers with many tokens, compiled for the host, use the core's weights and the experts that tokens chose."""

import subprocess

import numpy as np
import pytest
import torch
from emulation import Emulator
from torch.nn import functional

from moepack import GroupwiseTensor, _core

_HEADER = 128
_TYPES = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """Builds the launches of a format for a specification."""
    return Emulator("grouped.cpp", tmp_path_factory.mktemp("grouped"))


def products(program, folder, tensors, shape, x, index, columns, blocks, header):
    """Multiply by one matrix of each chosen expert, or gate two of them.

    Args:
        tensors: the bytes of one or two matrices, whose row blocks follow `header` bytes.
        shape: experts and rows.

    Returns:
        The output of each slot [T, k, R], NaN for slots without an expert, and their sums [T, R].
    """
    (tokens, width), (experts, rows) = x.shape, shape
    files = [folder / name for name in ("x", "index", "first", "second")]
    padded = functional.pad(x, (0, -width % 8)).contiguous().view(torch.uint8)
    for file, data in zip(files, (padded.numpy(), index.numpy(), *tensors), strict=False):
        file.write_bytes(data.tobytes())
    block_bytes = (tensors[0].nbytes - header) // (experts * -(-rows // 16))
    numbers = (_TYPES.index(x.dtype), tokens, rows, width, blocks, 2)
    command = [program, files[2], header, block_bytes, files[0], *numbers, files[1], index.shape[1], experts, columns]
    command = [*command, len(tensors) - 1, files[3]]
    printed = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, check=True, timeout=120).stdout
    place = np.frombuffer(printed, np.int32, index.numel())
    sums = np.frombuffer(printed[-4 * tokens * rows :], np.float32).reshape(tokens, rows)
    outputs = np.frombuffer(printed[place.nbytes : -sums.nbytes], np.float32).reshape(-1, rows)
    chosen = np.where(place[:, None] < 0, np.nan, outputs[place])
    return torch.from_numpy(chosen).view(*index.shape, rows), torch.from_numpy(sums.copy())


def check(program, folder, tensors, x, index, columns, blocks, bound):
    values = [torch.from_numpy(_core.PackedTensor(data).dequantize()).double() for data in tensors]
    check_values(program, folder, tensors, values, x, index, columns, blocks, bound)


def check_values(program, folder, tensors, values, x, index, columns, blocks, bound, header=_HEADER):
    found, sums = products(program, folder, tensors, values[0].shape[:2], x, index, columns, blocks, header)
    expected = torch.full(found.shape, float("nan"), dtype=torch.float64)
    for token, slot in np.ndindex(*index.shape):
        if 0 <= (expert := int(index[token, slot])) < len(values[0]):
            first, *up = (value[expert] @ x[token].double() for value in values)
            expected[token, slot] = functional.silu(first) * up[0] if up else first
    active = ~expected.isnan()
    assert torch.equal(found.isnan(), ~active)
    assert (found - expected)[active].norm() / expected[active].norm() < bound
    torch.testing.assert_close(sums, found.nan_to_num().sum(1), rtol=1e-5, atol=1e-5)


def routing(tokens, top_k, experts, seed):
    """Uneven choices: one expert is nobody's, one has most tokens, some slots have experts that do not exist."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(0, experts, (tokens, top_k), generator=generator)
    index[torch.rand(index.shape, generator=generator) < 0.4] = 0
    index[index == 1] = 0
    index[0, 0], index[-1, -1] = -1, experts
    return index


CASES = [
    # Tokens, experts per token, experts, rows, columns, columns of a product, blocks, type, gated.
    (19, 2, 3, 130, 200, 16, 3, 0, True),
    (40, 1, 3, 33, 260, 32, 2, 1, False),
    (70, 1, 2, 20, 100, 64, 1, 2, True),
    (9, 2, 4, 260, 130, 16, 4, 0, False),
]


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "cases"),
    [(4, 64, True, (0, 1)), (3, 64, False, (2, 3)), (8, 16, True, (0, 3)), (2, None, False, (1, 2))],
)
def test_groupwise_integers(grouped, tmp_path, bits, group, symmetric, cases):
    program = grouped(
        "groupwise_grouped.cu", "GroupwiseLinear", BITS=bits, GROUP=group or 0, SYMMETRIC=symmetric, HALVES=True,
        TOKENS=64, RESIDENT=1, RANK_BITS=0,
    )  # fmt: skip
    for seed in cases:
        tokens, top_k, experts, rows, width, columns, blocks, kind, gated = CASES[seed]
        generator = torch.Generator().manual_seed(seed)
        tensors = [
            GroupwiseTensor.quantize(
                torch.randn(experts, rows, width, generator=generator) * width**-0.5, bits, group,
                symmetric=symmetric, search=False, dtype=torch.float16,
            ).data
            for _ in range(1 + gated)
        ]  # fmt: skip
        x = torch.randn(tokens, width, generator=generator).to(_TYPES[kind])
        index = routing(tokens, top_k, experts, seed)
        check(program, tmp_path, tensors, x, index, columns, blocks, 1e-3 if kind == 2 else 1e-5)


@pytest.mark.parametrize(("planes", "cases"), [(1, (1, 3)), (2, (0, 2))])
def test_codebooks(grouped, tmp_path, planes, cases):
    program = grouped("codebook_grouped.cu", "CodebookLinear", BITS=4, PLANES=planes, TOKENS=64, RESIDENT=1)
    # Values exact in f16.
    step = 256 if planes == 1 else 32
    for seed in cases:
        tokens, top_k, experts, rows, width, columns, blocks, kind, gated = CASES[seed]
        random, tensors = np.random.default_rng(seed), []
        for _ in range(1 + gated):
            codes = random.integers(0, 16, (experts, rows, width), dtype=np.uint8)
            most = 127 * 256 // step
            centroids = (random.integers(-most, most + 1, (experts, rows, 1, 16)) * step).astype(np.int16)
            scales = random.uniform(0.5, 1.5, (experts, rows, 1)).astype(np.float32) * np.float32(5e-5 * width**-0.5)
            tensors.append(
                _core.encode_codebook(
                    codes, centroids, scales, bits=4, block=1 << 16, ndim=3, activation_bits=8 if planes == 1 else 0
                )
            )
        x = torch.from_numpy(random.standard_normal((tokens, width), np.float32)).to(_TYPES[kind])
        index = routing(tokens, top_k, experts, seed)
        check(program, tmp_path, tensors, x, index, columns, blocks, 1e-3 if kind == 2 else 1e-5)


def halves(codes, scales):
    """Codes [E, R, C] and scales [E, R] in the order of operand A (cuda/coded_halves.cuh)."""
    experts, rows, width = codes.shape
    padded = np.zeros((experts, -(-rows // 16) * 16, -(-width // 16) * 16), np.float16)
    padded[:, :rows, :width] = codes
    # Axes: expert, row block, pair of rows, row of it, 16 columns, column / 4, column % 4.
    parts = padded.reshape(experts, -1, 8, 2, padded.shape[2] // 16, 4, 4).transpose(0, 1, 4, 2, 6, 3, 5)
    own = np.zeros(padded.shape[:2], np.float32)
    own[:, :rows] = scales
    head = own.reshape(experts, -1, 16).view(np.uint8).reshape(*parts.shape[:2], 64)
    body = np.ascontiguousarray(parts).view(np.uint8).reshape(*parts.shape[:2], -1)
    return np.concatenate([head, body], 2)


@pytest.mark.parametrize("seed", range(len(CASES)))
def test_decoded_integers(grouped, tmp_path, seed):
    program = grouped("coded_grouped.cu", "CodedTiles")
    tokens, top_k, experts, rows, width, columns, blocks, kind, gated = CASES[seed]
    columns = 96 if columns == 64 else columns
    random, tensors, values = np.random.default_rng(seed), [], []
    for _ in range(1 + gated):
        codes = random.integers(-127, 128, (experts, rows, width))
        scales = random.uniform(0.5, 1.5, (experts, rows)).astype(np.float32) * np.float32(0.02 * width**-0.5)
        tensors.append(halves(codes, scales))
        values.append(torch.from_numpy(codes * scales[:, :, None].astype(np.float64)))
    x = torch.from_numpy(random.standard_normal((tokens, width), np.float32)).to(_TYPES[kind])
    index = routing(tokens, top_k, experts, seed)
    bound = 1e-3 if kind == 2 else 1e-5
    check_values(program, tmp_path, tensors, values, x, index, columns, blocks, bound, header=0)

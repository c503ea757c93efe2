"""Group-wise integers as GPUs decode them, compiled for the host: a warp multiplies the weights of the core."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from moepack import GroupwiseTensor
from moepack.runtime.backends.gpu.compiler import sources

_COMPILER = shutil.which("g++")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Build the host program for a specification, once each."""
    if _COMPILER is None:
        pytest.skip("g++ is missing")
    folder = tmp_path_factory.mktemp("host")

    def build(**definitions):
        path = folder / "-".join(map(str, definitions.values()))
        if not path.exists():
            options = [f"-D{name}={int(value)}" for name, value in definitions.items()]
            source = Path(__file__).parent / "host" / "groupwise.cpp"
            command = [_COMPILER, "-std=c++17", "-O1", f"-I{sources()}", *options, str(source), "-o", str(path)]
            subprocess.run(command, check=True)
        return path

    return build


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
    build = program(
        BITS=bits, GROUP=group or 0, SYMMETRIC=symmetric, HALVES=dtype is torch.float16, TOKENS=8, RESIDENT=2
    )
    blocks = -(-rows // 16)
    block_bytes = (tensor.nbytes - 128) // blocks
    printed = subprocess.run([build, path, "128", str(block_bytes), str(blocks), str(columns)], stdout=-1, check=True)
    values = np.frombuffer(printed.stdout, np.float32).reshape(blocks * 16, columns)
    expected = tensor.dequantize().numpy()
    np.testing.assert_allclose(values[:rows], expected, rtol=2e-7, atol=1e-7 * float(np.abs(expected).max()))
    assert not values[rows:].any()


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    """Build the launches of linear layers for a specification; functions of the host stand in for instructions."""
    if _COMPILER is None:
        pytest.skip("g++ is missing")
    folder = tmp_path_factory.mktemp("linear")
    shutil.copytree(sources(), folder / "cuda")
    for name, old, new in [
        ("ptx", r"#if defined\(__CUDACC__\)", "#if 0"),
        ("warpgroups", r"#if defined\(__CUDACC__\)", "#if 0"),
        ("layer", "extern __shared__", "extern"),
    ]:
        file = folder / "cuda" / "common" / f"{name}.cuh"
        file.write_text(re.sub(old, new, file.read_text(), flags=re.MULTILINE))
    host = Path(__file__).parent / "host"

    def build(**definitions):
        path = folder / "-".join(map(str, definitions.values()))
        options = [f"-D{name}={int(value)}" for name, value in definitions.items()]
        folders = [f"-I{folder / 'cuda'}", f"-I{host}"]
        command = [_COMPILER, "-std=c++20", "-O1", "-pthread", *folders, *options, str(host / "groupwise_linear.cpp")]
        subprocess.run([*command, "-o", str(path)], check=True)
        return path

    return build


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "cases"),
    [
        # Tokens, rows, columns, blocks, items of a ring, whether blocks make their cells, the type of activations.
        (3, 64, False, [(3, 300, 300, 3, 2, 1, 0), (17, 33, 390, 3, 2, 0, 1), (64, 20, 100, 1, 2, 0, 0)]),
        (8, 16, True, [(9, 33, 130, 1, 2, 0, 2)]),
    ],
)
def test_linear_layers_multiply_by_the_weights_of_the_core(linear, tmp_path, bits, group, symmetric, cases):
    build = linear(BITS=bits, GROUP=group, SYMMETRIC=symmetric, HALVES=True, TOKENS=64, RESIDENT=1, RANK_BITS=0)
    for tokens, rows, columns, blocks, depth, own, kind in cases:
        generator = torch.Generator().manual_seed(tokens)
        weight = torch.randn(rows, columns, generator=generator)
        tensor = GroupwiseTensor.quantize(weight, bits, group, symmetric=symmetric, search=False, dtype=torch.float16)
        x = torch.randn(tokens, columns, generator=generator).to((torch.bfloat16, torch.float16, torch.float32)[kind])
        (tmp_path / "weights").write_bytes(tensor.data.tobytes())
        padded = torch.nn.functional.pad(x, (0, -columns % 8)).contiguous()
        (tmp_path / "x").write_bytes(padded.view(torch.uint8).numpy().tobytes())
        block_bytes = (tensor.nbytes - 128) // -(-rows // 16)
        numbers = map(str, (kind, tokens, rows, columns, blocks, depth, own))
        command = [build, tmp_path / "weights", "128", str(block_bytes), tmp_path / "x", *numbers]
        printed = subprocess.run(command, stdout=-1, check=True, timeout=120)
        found = torch.from_numpy(np.frombuffer(printed.stdout, np.float32).reshape(tokens, rows).copy())
        expected = x.double() @ tensor.dequantize().double().T
        assert (found - expected).norm() / expected.norm() < (5e-4 if kind == 2 else 1e-5)

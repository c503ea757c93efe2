"""Saved tensors whose file is modified during use give an error or wrong numbers, but never a crash."""

import faulthandler
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import moepack
from moepack import CorruptionError, TernaryTensor, encode_ternary
from moepack.groupwise import GroupwiseTensor

SHAPE = (3, 70, 128)


def ternary(code: str) -> TernaryTensor:
    codes = torch.randint(-1, 2, SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    return encode_ternary(codes, levels=torch.tensor([-1.0, 1.0]).expand(*SHAPE[:2], 2), code=code)


@pytest.fixture(params=["fsv8", "dict16", "groupwise"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(1)
    tensor = (
        GroupwiseTensor.quantize(torch.randn(SHAPE, generator=generator), bits=4)
        if request.param == "groupwise"
        else ternary(request.param)
    )
    file = tmp_path / f"{tensor.kind}.safetensors"
    tensor.save(file)
    return file


def load(file: Path, **options: bool) -> moepack.TernaryTensor | GroupwiseTensor:
    return (GroupwiseTensor if file.stem == "groupwise" else TernaryTensor).load(file, **options)


def overwrite(file: Path, byte: int) -> None:
    """Overwrite the blob's sections in place, like `cp` onto the file."""
    size, blob = file.stat().st_size, load(file).nbytes
    with open(file, "r+b") as stream:
        stream.seek(size - blob + 128)
        stream.write(bytes([byte]) * (blob - 128))


@pytest.mark.parametrize("byte", [0x00, 0x55, 0xFF])
def test_an_overwritten_tensor_is_reported_as_damaged(saved: Path, byte: int) -> None:
    mapped, resident = load(saved), load(saved, resident=True)
    before, x = resident.decode(), torch.ones(3, 5, 128)
    overwrite(saved, byte)
    for use in (mapped.decode, mapped.dequantize, mapped.verify, lambda: mapped.matmul(x), lambda: mapped == resident):
        try:
            use()
        except CorruptionError as error:
            assert error.file == str(saved)
    resident.verify()
    assert torch.equal(resident.decode(), before)
    with pytest.raises(CorruptionError):
        load(saved)


def test_a_resident_tensor_equals_the_saved_one(saved: Path) -> None:
    mapped, resident = load(saved), load(saved, resident=True)
    assert np.array_equal(mapped.data, resident.data) and resident.data.ctypes.data % 64 == 0
    os.truncate(saved, 1000)
    resident.verify()
    for options in ({}, {"resident": True}):
        with pytest.raises(CorruptionError, match="truncated"):
            load(saved, **options)


def test_a_truncated_mapping_ends_the_process_as_documented(tmp_path: Path) -> None:
    file = tmp_path / "tensor.safetensors"
    ternary("fsv8").save(file)

    def read() -> None:
        faulthandler.disable()
        tensor = TernaryTensor.load(file)
        os.truncate(file, 0)
        tensor.verify()

    child = multiprocessing.get_context("fork").Process(target=read)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGBUS

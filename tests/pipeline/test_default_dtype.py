"""Results do not depend on the dtype that torch gives to new tensors, which programs set to that of their model."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

import moepack
from moepack.precision import single_precision
from places import TINY_MOE

TEXT = TINY_MOE.parent / "texts" / "white-fang.txt"
WEIGHTS = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def in_bfloat16() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Runs a function while new tensors are bfloat16, and checks that they are afterwards."""

    def run(function: Callable[[], Any]) -> Any:
        torch.set_default_dtype(torch.bfloat16)
        found = function()
        assert torch.get_default_dtype() == torch.bfloat16
        torch.set_default_dtype(torch.float32)
        return found

    yield run
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "finequant", "bits": 4, "calibration": TEXT, "samples": 2},
        {"method": "rate", "bits_per_weight": 3, "calibration": TEXT, "samples": 2},
    ],
    ids=lambda settings: settings["method"],
)
def test_a_packed_directory_is_the_same(settings: dict[str, Any], tmp_path: Path, in_bfloat16: Any) -> None:
    moepack.compress(TINY_MOE, tmp_path / "expected", check=False, **settings)
    in_bfloat16(lambda: moepack.compress(TINY_MOE, tmp_path / "found", check=False, **settings))
    names = sorted(file.name for file in (tmp_path / "expected").glob("*.safetensors"))
    assert names
    for name in names:
        assert (tmp_path / "found" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = moepack.load(tmp_path / "expected")(input_ids=ids).logits
    assert torch.equal(in_bfloat16(lambda: moepack.load(tmp_path / "expected")(input_ids=ids).logits), expected)
    before = moepack.evaluate(tmp_path / "expected", TEXT, chars=3000)
    assert in_bfloat16(lambda: moepack.evaluate(tmp_path / "expected", TEXT, chars=3000)).loss == before.loss


def groupwise() -> moepack.GroupwiseTensor:
    found = moepack.quantize_groupwise(WEIGHTS, 3, 64)
    return moepack.encode_groupwise(found.codes, found.scales, bits=3, group_size=64)


def ternary() -> moepack.TernaryTensor:
    codes, levels = moepack.quantize_ternary(WEIGHTS)
    return moepack.encode_ternary(codes, levels=levels)


def coded() -> moepack.CodedTensor:
    return moepack.encode_coded((WEIGHTS * 3).round().to(torch.int8), torch.full((2, 64), 0.25, dtype=torch.float32))


def rounded() -> moepack.CodedTensor:
    return moepack.CodedTensor.quantize(WEIGHTS, 3.0)


@pytest.mark.parametrize("packed", [groupwise, ternary, coded, rounded])
def test_packed_tensors_are_the_same(packed: Callable[[], Any], in_bfloat16: Any) -> None:
    found, expected = in_bfloat16(packed), packed()
    assert torch.equal(torch.from_numpy(found.data), torch.from_numpy(expected.data))
    assert torch.equal(in_bfloat16(lambda: found.dequantize()), expected.dequantize())


def test_the_setting_is_restored_after_blocks_in_several_threads(in_bfloat16: Any) -> None:
    first_has_begun, second_has_begun = Event(), Event()

    def first() -> None:
        with single_precision():
            first_has_begun.set()
            second_has_begun.wait(10)

    def second() -> None:
        first_has_begun.wait(10)
        with single_precision():
            second_has_begun.set()
            one.join(10)
            assert torch.get_default_dtype() == torch.float32

    one = Thread(target=first)

    def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            one.start()
            pool.submit(second).result()

    in_bfloat16(run)

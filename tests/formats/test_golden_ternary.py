"""Golden ternary tensors are read and written with the same bytes."""

import json
from typing import Any

import numpy as np
import pytest

from moepack import _core
from places import GOLDEN

FOLDER = GOLDEN / "ternary"
CASES = json.loads((FOLDER / "cases.json").read_text())


def codes_and_levels(case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    text = "".join(case["rows"]).encode()
    codes = np.array([b"-0+".index(byte) - 1 for byte in text], np.int8).reshape(case["shape"])
    return codes, np.array(case["levels"], np.float32).reshape(*case["shape"][:2], 2)


@pytest.mark.parametrize("code", ["fsv8", "dict16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_file(case: dict[str, Any], code: str) -> None:
    codes, levels = codes_and_levels(case)
    data = np.fromfile(FOLDER / f"{case['name']}.{code}.bin", np.uint8)
    blob = _core.PackedTensor(data)
    blob.verify()
    details = blob.details()
    assert (details["code"], blob.ndim, details["level_dtype"]) == (code, case["rank"], case["level_dtype"])
    assert (blob.kind, blob.format, blob.nbytes) == ("ternary", f"ternary-{code}", len(data))
    np.testing.assert_array_equal(blob.decode(), codes)
    np.testing.assert_array_equal(blob.parameters("levels"), levels)
    again = _core.encode_ternary(codes, levels, ndim=case["rank"], code=code)
    assert again.tobytes() == data.tobytes()


def test_every_file_is_a_case() -> None:
    names = sorted(f"{case['name']}.{code}.bin" for case in CASES for code in ("fsv8", "dict16"))
    assert names == sorted(path.name for path in FOLDER.glob("*.bin"))
    assert {case["level_dtype"] for case in CASES} == {"bfloat16", "float16", "float32"}

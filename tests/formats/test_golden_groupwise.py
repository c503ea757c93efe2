"""Golden group-wise tensors: two implementations read and write the same bytes."""

import json
from typing import Any

import numpy as np
import pytest

from moepack import _core
from oracle import groupwise as oracle
from places import GOLDEN

FOLDER = GOLDEN / "groupwise"
CASES = json.loads((FOLDER / "cases.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_file(case: dict[str, Any]) -> None:
    data = np.fromfile(FOLDER / f"{case['name']}.bin", np.uint8)
    codes = np.frombuffer(bytes.fromhex(case["codes"]), np.uint8).reshape(case["shape"])
    blob = _core.PackedTensor(data)
    blob.verify()
    details = blob.details()
    assert (details["bits"], blob.ndim, details["dtype"]) == (case["bits"], case["rank"], case["dtype"])
    assert details["group_size"] == (case["group"] or max(case["shape"][2], 1))
    assert details["symmetric"] == (case["offsets"] is None)
    assert _core.packed_bytes(blob.kind, blob.shape, **details) == blob.nbytes == len(data)
    np.testing.assert_array_equal(blob.decode(), codes)
    scales, offsets = blob.parameters("scales"), None if details["symmetric"] else blob.parameters("offsets")
    assert scales.ravel().tolist() == case["scales"]
    assert (None if offsets is None else offsets.ravel().tolist()) == case["offsets"]
    np.testing.assert_array_equal(blob.dequantize(), oracle.read(data.tobytes()).weights())
    again = _core.encode_groupwise(
        codes.copy(),
        scales,
        offsets,
        bits=details["bits"],
        group_size=case["group"] or 1 << 20,
        ndim=blob.ndim,
        dtype=details["dtype"],
    )
    assert again.tobytes() == data.tobytes()
    assert oracle.write(oracle.read(data.tobytes())) == data.tobytes()


def test_every_file_is_a_case() -> None:
    assert sorted(f"{case['name']}.bin" for case in CASES) == sorted(path.name for path in FOLDER.glob("*.bin"))
    assert {case["bits"] for case in CASES} == {2, 3, 4, 8}

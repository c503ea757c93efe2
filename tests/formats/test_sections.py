"""Section offsets of packed tensors, on which kernels outside the core rely."""

import numpy as np
import pytest

from moepack import _core
from places import GOLDEN

HEADER = 128
NAMES = {
    "groupwise": ["blocks"],
    "codebook": ["panels"],
    "ternary": ["levels", "index", "starts", "payload"],
    "compensated": ["base", "ranks", "right_scales", "right", "left_scales", "left"],
}
BLOBS = sorted(path for kind in NAMES for path in (GOLDEN / kind).glob("*.bin"))


@pytest.mark.parametrize("path", BLOBS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_sections_lie_one_behind_the_other_and_leave_only_zeros_out(path):
    data = np.fromfile(path, np.uint8)
    tensor = _core.PackedTensor(data)
    sections = tensor.sections()
    assert list(sections) == NAMES[tensor.kind]
    end, covered = HEADER, np.zeros(len(data), bool)
    covered[:HEADER] = True
    for start, size in sections.values():
        assert start % 64 == 0 and end <= start and start + size <= tensor.nbytes
        end = start + size
        covered[start:end] = True
    assert not data[~covered].any()


def test_sections_have_the_content_of_the_format():
    tensor = _core.PackedTensor(np.fromfile(GOLDEN / "compensated" / "three_bits.bin", np.uint8))
    data = np.fromfile(GOLDEN / "compensated" / "three_bits.bin", np.uint8)
    parts = {name: data[start : start + size] for name, (start, size) in tensor.sections().items()}
    assert parts["ranks"].view(np.uint32).tolist() == tensor.parameters("ranks").tolist()
    base = _core.PackedTensor(parts["base"].copy())
    assert (base.kind, base.shape) == ("groupwise", tensor.shape)
    assert np.array_equal(base.parameters("scales"), tensor.parameters("scales"))

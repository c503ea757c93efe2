"""Every bit of a packed directory is covered by a checksum: `verify` names the file of any flipped bit.

Editable side files are reported as changed, all others as damaged. The golden directory is small enough to try all
bytes, which takes minutes: `MOEPACK_ALL_BITS=1 pytest tests/faults/test_bits.py`. Otherwise every 499th is tried.
"""

import os
import shutil
from pathlib import Path

import pytest

import moepack
import packed_support as support
from moepack.format.side import is_editable
from places import GOLDEN

FOLDER = GOLDEN / "directory-v1"
STEP = 1 if os.environ.get("MOEPACK_ALL_BITS") == "1" else 499


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_a_flipped_bit_is_found_and_named(name: str, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(FOLDER, tmp_path / "packed"))
    file = directory / name
    for bit in range(0, 8 * file.stat().st_size, STEP):
        support.flip(file, bit)
        report = moepack.verify(directory)
        found = report.side if is_editable(name) else report.faults
        assert found and found[0].file == name, bit
        support.flip(file, bit)
    assert moepack.verify(directory).ok and not moepack.verify(directory).side

"""Memory maps and their madvise hints."""

import mmap

import numpy as np
import pytest

from moepack.mapping import map_file, own_memory
from moepack.system import maps

HUGE = "hg"
RANDOM = "rr"


def flags_of(array):
    """The kernel's flags of the mapping in which an array begins."""
    inside = False
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            first, *rest = line.split()
            if not first.endswith(":"):
                low, high = (int(address, 16) for address in first.split("-"))
                inside = low <= array.ctypes.data < high
            elif inside and first == "VmFlags:":
                return set(rest)
    raise AssertionError("not in the address space")


@pytest.fixture
def file(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(256)) * 100)
    return tmp_path / "file"


def test_a_mapped_file_is_its_bytes_and_read_only(file):
    data = map_file(file)
    assert data.tobytes() == file.read_bytes()
    assert not data.flags.writeable


def test_a_file_that_cannot_be_mapped(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty"):
        map_file(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        map_file(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("release", "random"), [("6.18.4-generic", True), ("5.18.0", True), ("5.15.0-91", False), ("strange", False)]
)
def test_advice_for_files_is_given_where_the_kernel_reads_2_mb_for_it(file, release, random, monkeypatch):
    monkeypatch.setattr(maps.platform, "release", lambda: release)
    advised = map_file(file)
    assert (HUGE in flags_of(advised)) is (RANDOM in flags_of(advised) or not random)
    assert (RANDOM in flags_of(advised)) is (random and HUGE in flags_of(advised))


def test_no_advice_unless_wanted(file):
    assert not {HUGE, RANDOM} & flags_of(map_file(file, huge=False))


@pytest.mark.parametrize("size", [0, 1, 5_000_001])
def test_own_memory_is_zeroed_writable_and_of_that_size(size):
    memory = own_memory(size)
    assert memory.shape == (size,)
    assert not memory.any()
    memory[:] = 7
    assert (memory == 7).all()


def test_mapping_works_on_systems_without_memory_advice(file, monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert np.array_equal(map_file(file), np.frombuffer(file.read_bytes(), np.uint8))
    assert not own_memory(100).any()

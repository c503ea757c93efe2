"""Damage to packed directories: any damaged byte is found and named, and nothing crashes."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import moepack
import packed_support as support
from moepack import CorruptionError, LoadError, MoepackError
from moepack.format import MANIFEST, PackedDirectory
from moepack.format.header import read_header

FILES = ("config.json", "model.safetensors.index.json", MANIFEST, "tokenizer.json")
SHARDS = tuple(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))


@pytest.fixture(scope="module")
def victim(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that every test damages and `damaged` restores."""
    return Path(shutil.copytree(packed, tmp_path_factory.mktemp("victim") / "packed"))


@contextmanager
def damaged(victim: Path, name: str, content: bytes) -> Iterator[None]:
    """Replace a file for the duration of a block. (A new file, because open mappings must keep the old bytes.)"""
    file, kept = victim / name, victim.parent / f"kept-{name}"
    file.rename(kept)
    try:
        file.write_bytes(content)
        yield
    finally:
        kept.rename(file)


def use_everything(directory: Path) -> None:
    """Open a directory and decode everything; only errors of moepack may be raised."""
    try:
        opened = PackedDirectory.open(directory)
        for name in opened.tensors():
            blob = opened.blob(name)
            blob.decode()
            blob.verify()
    except (MoepackError, ValueError) as error:
        assert isinstance(error, CorruptionError | moepack._core.CorruptionError | LoadError), repr(error)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from((*SHARDS, *FILES)), place=st.integers(0, 2**40), from_start=st.booleans())
@example(name=MANIFEST, place=0, from_start=True)
@example(name=MANIFEST, place=0, from_start=False)
@example(name=SHARDS[0], place=0, from_start=True)
@example(name=SHARDS[0], place=0, from_start=False)
@example(name=SHARDS[0], place=8 * 9, from_start=True)
def test_any_flipped_bit_is_found(victim: Path, name: str, place: int, from_start: bool) -> None:
    content = bytearray((victim / name).read_bytes())
    bit = place % (8 * len(content))
    bit = bit if from_start else 8 * len(content) - 1 - bit
    content[bit // 8] ^= 1 << bit % 8
    with damaged(victim, name, bytes(content)):
        report = moepack.verify(victim)
        assert not report.ok
        assert report.faults[0].file == name
        use_everything(victim)
    assert name != SHARDS[0] or moepack.verify(victim).ok


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from((*SHARDS, *FILES)), keep=st.floats(0, 1, exclude_max=True))
@example(name=SHARDS[0], keep=0.0)
@example(name=MANIFEST, keep=0.0)
def test_any_truncation_is_found(victim: Path, name: str, keep: float) -> None:
    content = (victim / name).read_bytes()
    with damaged(victim, name, content[: int(keep * len(content))]):
        assert moepack.verify(victim).faults[0].file == name
        use_everything(victim)
        if name in SHARDS:
            with pytest.raises(CorruptionError) as caught:
                PackedDirectory.open(victim)
            assert caught.value.file == str(victim / name)


@pytest.mark.parametrize("name", SHARDS)
def test_appended_bytes_are_found(victim: Path, name: str) -> None:
    with damaged(victim, name, (victim / name).read_bytes() + bytes(64)):
        assert moepack.verify(victim).faults[0].file == name
        with pytest.raises(CorruptionError, match="the manifest lists"):
            PackedDirectory.open(victim)


def test_swapped_shards_are_found(victim: Path) -> None:
    first, second = ((victim / name).read_bytes() for name in SHARDS[:2])
    with damaged(victim, SHARDS[0], second), damaged(victim, SHARDS[1], first):
        assert {fault.file for fault in moepack.verify(victim).faults} >= set(SHARDS[:2])
        use_everything(victim)


def test_swapped_tensors_are_found(victim: Path) -> None:
    """Equal sizes, so that every offset stays plausible."""
    content = bytearray((victim / SHARDS[0]).read_bytes())
    infos = read_header(victim / SHARDS[0]).tensors
    a, b = (infos[f"model.layers.0.mlp.experts.{name}"] for name in ("gate_proj", "up_proj"))
    size = min(a.nbytes, b.nbytes)
    content[a.offset : a.offset + size], content[b.offset : b.offset + size] = (
        content[b.offset : b.offset + size],
        content[a.offset : a.offset + size],
    )
    with damaged(victim, SHARDS[0], bytes(content)):
        faults = moepack.verify(victim).faults
        assert {a.name, b.name} <= {fault.tensor for fault in faults}
        use_everything(victim)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_with_right_checksums_never_crashes(victim: Path, data: st.DataObject) -> None:
    """A valid manifest can list any blob: readers must survive it."""
    content = bytearray((victim / SHARDS[1]).read_bytes())
    info = data.draw(st.sampled_from(list(read_header(victim / SHARDS[1]).tensors.values())))
    for _ in range(data.draw(st.integers(1, 4))):
        span = data.draw(st.sampled_from([128, info.nbytes]))
        content[info.offset + data.draw(st.integers(0, span - 1))] = data.draw(st.integers(0, 255))
    manifest = (victim / MANIFEST).read_bytes()
    with damaged(victim, SHARDS[1], bytes(content)), damaged(victim, MANIFEST, manifest):
        support.accept_file(victim, SHARDS[1])
        for fault in moepack.verify(victim).faults:
            assert fault.file == SHARDS[1] and fault.tensor == info.name
        use_everything(victim)


def test_a_mapped_tensor_cannot_be_written(packed: Path) -> None:
    array = next(iter(PackedDirectory.open(packed).tensors().values()))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert isinstance(array, np.ndarray)


def test_an_unreadable_file_is_a_fault_not_a_crash(victim: Path) -> None:
    kept = victim.parent / "kept"
    for name in (SHARDS[0], "tokenizer.json", "config.json"):
        (victim / name).rename(kept)
        (victim / name).mkdir()
        try:
            assert moepack.verify(victim).faults[0].file == name
            use_everything(victim)
        finally:
            (victim / name).rmdir()
            kept.rename(victim / name)
    assert moepack.verify(victim).ok

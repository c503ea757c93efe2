"""Pipes, devices and sparse files in place of a model's files are rejected before anything blocks on them."""

import os
import shutil

import pytest

import moepack
from moepack import MoepackError
from moepack.format import regular


def is_sound(directory):
    try:
        return moepack.verify(directory).ok
    except MoepackError:
        return False


@pytest.mark.parametrize("name", ["config.json", "moepack.json", "model.safetensors.index.json", "shard"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_irregular_files_are_rejected_at_once(kind, name, packed, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(packed, directory)
    file = next(directory.glob("*.safetensors")) if name == "shard" else directory / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
    with pytest.raises(MoepackError):
        moepack.load(directory)
    assert not is_sound(directory)


@pytest.mark.parametrize("kind", ["pipe", "holes"])
def test_a_checkpoint_of_pipes_and_holes_is_refused_at_once(kind, mixtral, tmp_path, monkeypatch):
    directory = tmp_path / "model"
    shutil.copytree(mixtral, directory)
    file = directory / "config.json"
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    else:
        monkeypatch.setattr(regular, "MAX_JSON", 1 << 20)
        file.touch()
        os.truncate(file, 1 << 40)
    with pytest.raises(moepack.CheckpointError, match=r"config.json: (cannot be read: not a regular file|longer than)"):
        moepack.compress(directory, tmp_path / "out", method="ternary")
    assert sorted(tmp_path.iterdir()) == [directory]

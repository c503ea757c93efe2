"""Checkpoints of PyTorch pickles: the same model as safetensors, and damaged or hostile files."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moepack import Checkpoint, CheckpointError, UnsupportedModelError, compress
from moepack.census.tiny import tiny_model
from moepack.checkpoint.quantized import open_checkpoint
from moepack.checkpoint.resolve import configured, resolve_model
from moepack.format import PackedDirectory
from moepack.integrations.loading import open_model
from moepack.methods.finequant import FineQuant

NAME = "pytorch_model.bin"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pickles") / "plain"
    tiny_model("qwen3_moe").to(torch.bfloat16).save_pretrained(path)
    return path


def pickled(plain: Path, target: Path, shards: int = 1) -> Path:
    """Write the model as one pickle, or as shards with an index."""
    target.mkdir()
    (target / "config.json").write_bytes((plain / "config.json").read_bytes())
    tensors = list(load_file(plain / "model.safetensors").items())
    if shards == 1:
        torch.save(dict(tensors), target / NAME)
        return target
    listed: dict[str, str] = {}
    for number in range(shards):
        shard = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        torch.save(dict(tensors[number::shards]), target / shard)
        listed |= dict.fromkeys(dict(tensors[number::shards]), shard)
    (target / f"{NAME}.index.json").write_text(json.dumps({"weight_map": listed}))
    return target


def single(folder: Path, content: Any, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "mixtral"}')
    torch.save(content, folder / NAME, **options)
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_pickles_are_packed_like_safetensors(shards: int, plain: Path, tmp_path: Path) -> None:
    directory = pickled(plain, tmp_path / "pickled", shards)
    for name, source in (("a", plain), ("b", directory)):
        compress(source, tmp_path / name, method=FineQuant(bits=4, dense_bits=4))
    first, second = (PackedDirectory.open(tmp_path / name) for name in "ab")
    assert all(bytes(first.tensor(name)) == bytes(second.tensor(name)) for name in first.manifest.packed())
    ids = torch.arange(3, 19)[None]
    with torch.inference_mode():
        logits = [open_model(path, torch.float32)(input_ids=ids).logits for path in (plain, directory)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_one_file_of_any_name(suffix: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = plain if suffix == ".safetensors" else pickled(plain, tmp_path / "pickled")
    weights = source / ("model.safetensors" if suffix == ".safetensors" else NAME)
    assert resolve_model(weights) == source
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine" / f"weights{suffix}"
    file.write_bytes(weights.read_bytes())
    with pytest.raises(CheckpointError, match=r"mine: has no config\.json, .*--config DIR"):
        open_checkpoint(file)
    expected = Checkpoint.open(source)
    given = configured(file, source)
    (tmp_path / "mine" / "config.json").write_bytes((plain / "config.json").read_bytes())
    for opened in (open_checkpoint(file), open_checkpoint(resolve_model(file)), open_checkpoint(given)):
        assert opened.names() == expected.names()
        assert all(torch.equal(opened.tensor(name), expected.tensor(name)) for name in opened.names())


def test_safetensors_come_first(plain: Path, tmp_path: Path) -> None:
    directory = pickled(plain, tmp_path / "both")
    (directory / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    assert tuple(Checkpoint.open(directory).shards) == ("model.safetensors",)


def test_views_strides_and_shared_storages(tmp_path: Path) -> None:
    whole = torch.arange(60.0).view(3, 4, 5)
    content = {
        "whole": whole,
        "part": whole[1:],
        "turned": whole[0].mT,
        "stacked": whole.mT,
        "every": whole[:, ::2, 1],
        "wide": torch.tensor([[3.0], [4.0]]).expand(2, 6),
        "half": torch.nn.Parameter(whole.half()),
        "none": torch.zeros(0, 7),
        "one": torch.tensor(3),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
    }
    opened = Checkpoint.open(single(tmp_path / "x", content))
    for name, value in content.items():
        found = opened.tensor(name)
        assert found.dtype == value.dtype and torch.equal(found.float(), value.detach().float()), name
        data = value.detach().contiguous().reshape(-1).view(torch.uint8)
        assert opened.raw(name).tobytes() == data.numpy().tobytes(), name
    assert torch.equal(opened.part("stacked", 2), whole.mT[2])
    assert torch.equal(opened.part("part", 1), whole[2])
    assert opened.info("wide").nbytes == 48
    assert any("pickles" in note for note in opened.notes)


def test_no_data_are_read_on_opening(tmp_path: Path) -> None:
    """A description of 2^50 elements costs nothing; it is refused because the file lacks them."""
    directory = single(tmp_path / "x", {"a": torch.zeros(4)})
    raw = (directory / NAME).read_bytes()
    assert raw.count(b"K\x04\x85") == 1
    (directory / NAME).write_bytes(raw.replace(b"K\x04\x85", b"K\x60\x85"))
    with pytest.raises(CheckpointError, match=rf"{NAME}: "):
        Checkpoint.open(directory)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("hostile"),)


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        ({"a": Hostile()}, CheckpointError, "cannot be unpickled"),
        ({"a": 3}, UnsupportedModelError, "not a dictionary of tensors alone"),
        ([torch.ones(2)], UnsupportedModelError, "not a dictionary of tensors alone"),
        ({"a": torch.ones(2, 2).to_sparse()}, CheckpointError, "cannot be unpickled"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, UnsupportedModelError, "tensor 'a': is stored as complex128"),
    ],
)
def test_other_objects(
    content: Any, kind: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = single(tmp_path / "x", content)
    with pytest.raises(kind, match=message):
        Checkpoint.open(directory)
    assert not (tmp_path / "hostile").exists()


def test_the_format_before_pytorch_1_6(tmp_path: Path) -> None:
    directory = single(tmp_path / "x", {"a": torch.ones(2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedModelError, match=r"before PyTorch 1\.6; .*save_pretrained"):
        Checkpoint.open(directory)


def test_compressed_members(tmp_path: Path) -> None:
    directory = single(tmp_path / "x", {"a": torch.ones(200)})
    with zipfile.ZipFile(directory / NAME) as archive:
        contents = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(directory / NAME, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, content in contents.items():
            archive.writestr(entry, content)
    with pytest.raises(UnsupportedModelError, match="compressed members"):
        Checkpoint.open(directory)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    directory = single(tmp_path / "x", {"a": torch.ones(3), "b": torch.ones(2)})
    raw = (directory / NAME).read_bytes()
    for keep in range(0, len(raw), 13):
        (directory / NAME).write_bytes(raw[:keep])
        with pytest.raises((CheckpointError, UnsupportedModelError), match=NAME):
            Checkpoint.open(directory)


def test_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    """For any changed byte, the file is refused with a typed error or every tensor can be read."""
    directory = single(tmp_path / "x", {"a": torch.ones(3), "b": torch.ones(2, 2).T})
    raw = (directory / NAME).read_bytes()
    for position in range(0, len(raw), 7):
        changed = bytearray(raw)
        changed[position] ^= 0x5A
        (directory / NAME).write_bytes(changed)
        try:
            opened = Checkpoint.open(directory)
        except (CheckpointError, UnsupportedModelError):
            continue
        assert all(opened.tensor(name).numel() >= 0 for name in opened.names())


def test_an_index_of_pickles_that_points_elsewhere(plain: Path, tmp_path: Path) -> None:
    directory = pickled(plain, tmp_path / "x", 2)
    (directory / f"{NAME}.index.json").write_text('{"weight_map": {"a": "../a.bin"}}')
    with pytest.raises(CheckpointError, match=r"bin\.index\.json: tensor 'a': the shard"):
        open_checkpoint(directory)

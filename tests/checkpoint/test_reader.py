"""Reading checkpoints: files by safetensors are read bit for bit, and every broken directory is rejected by name.

Broken files are built byte by byte, because no library writes them.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import tiny_models
from moepack import Checkpoint, CheckpointError, CorruptionError, UnsupportedModelError
from moepack.format.header import DTYPES, MAX_HEADER, read_header

CONFIG = {"model_type": "mixtral"}
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def raw_file(path: Path, header: bytes | Mapping[str, Any], data: bytes = b"", length: int | None = None) -> Path:
    """Write a file of the safetensors frame around any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def sharded(directory: Path, shards: Mapping[str, Mapping[str, torch.Tensor]], index: Mapping[str, str]) -> Path:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    for name, tensors in shards.items():
        save_file(dict(tensors), directory / name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return directory


def resident() -> int:
    """The resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A valid checkpoint of two shards with one tensor each, to be damaged."""
    shards = {"1.safetensors": {"a": torch.ones(3)}, "2.safetensors": {"b": torch.zeros(2, 2)}}
    return sharded(tmp_path, shards, {"a": "1.safetensors", "b": "2.safetensors"})


# ---- sound checkpoints


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_equal_to_safetensors(architecture: str, tiny_checkpoint: Callable[[str], Path]) -> None:
    directory = tiny_checkpoint(architecture)
    checkpoint = Checkpoint.open(directory)
    expected = load_file(directory / "model.safetensors")
    assert set(checkpoint.names()) == set(expected) and len(checkpoint) == len(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name), tensor)
        info = checkpoint.info(name)
        assert (info.shape, info.dtype, info.nbytes) == (tuple(tensor.shape), tensor.dtype, tensor.nbytes)
    assert checkpoint.config == json.loads((directory / "config.json").read_text())


def test_shards(tmp_path: Path) -> None:
    directory = tiny_models.build("mixtral", tmp_path, max_shard_size="100KB")
    checkpoint = Checkpoint.open(directory)
    expected = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert len(checkpoint.shards) > 2 and set(checkpoint.names()) == set(expected)
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in expected.items())


def test_every_dtype_scalars_and_empty_tensors(tmp_path: Path) -> None:
    tensors = {name: torch.arange(6).to(dtype).reshape(2, 3) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "hollow": torch.zeros(3, 0, dtype=torch.int8)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    checkpoint = Checkpoint.open(tmp_path)
    for name, tensor in tensors.items():
        read = checkpoint.tensor(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert read.contiguous().view(torch.uint8).equal(tensor.view(torch.uint8)) if tensor.ndim else read == tensor
        assert checkpoint.raw(name).nbytes == tensor.nbytes


def test_data_that_are_not_aligned(tmp_path: Path) -> None:
    header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "b": {**ENTRY, "data_offsets": [1, 9]}}
    raw_file(tmp_path / "model.safetensors", header, b"\7" + struct.pack("<2f", 1.5, -2.0))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tensor = Checkpoint.open(tmp_path).tensor("b")
    assert tensor.tolist() == [1.5, -2.0] and tensor.data_ptr() % 4 == 0


def test_writing_to_a_tensor_leaves_the_file(pair: Path) -> None:
    checkpoint = Checkpoint.open(pair)
    checkpoint.tensor("a").fill_(7)
    assert checkpoint.tensor("a").tolist() == [1, 1, 1]
    assert load_file(pair / "1.safetensors")["a"].tolist() == [1, 1, 1]


def test_tensors_outlive_files_handles_and_the_checkpoint(pair: Path) -> None:
    handles = len(os.listdir("/proc/self/fd"))
    held = [Checkpoint.open(pair).tensor("a") for _ in range(50)]
    assert len(os.listdir("/proc/self/fd")) <= handles + 50
    shutil.rmtree(pair)
    assert all(tensor.tolist() == [1, 1, 1] for tensor in held)


def test_a_tensor_is_mapped_and_not_read(tmp_path: Path) -> None:
    size = 256 << 20
    with raw_file(
        tmp_path / "model.safetensors", {"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    ).open("r+b") as stream:
        stream.truncate(stream.seek(0, 2) + size)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    before = resident()
    tensor = Checkpoint.open(tmp_path).tensor("a")
    assert int(tensor[size - 1]) == 0
    assert resident() - before < 64 << 20


def test_a_snapshot_of_the_hub_cache_is_made_of_links(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    blobs, snapshot = tmp_path_factory.mktemp("blobs"), tmp_path_factory.mktemp("snapshot")
    for i, file in enumerate(sorted(pair.iterdir())):
        shutil.copy(file, blobs / str(i))
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / str(i), snapshot))
    assert Checkpoint.open(snapshot).tensor("a").tolist() == [1, 1, 1]


def test_tensors_beside_the_index_are_read_too(tmp_path: Path) -> None:
    directory = sharded(tmp_path, {"1.safetensors": {"a": torch.ones(1), "b": torch.ones(2)}}, {"a": "1.safetensors"})
    assert set(Checkpoint.open(directory).names()) == {"a", "b"}


def test_unknown_names(pair: Path) -> None:
    checkpoint = Checkpoint.open(pair)
    assert "a" in checkpoint and "c" not in checkpoint
    for call in (checkpoint.info, checkpoint.tensor, checkpoint.raw):
        with pytest.raises(CheckpointError, match="tensor 'c': no such tensor"):
            call("c")


# ---- fingerprints


def test_fingerprint_sees_every_part(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    def changed(change: Callable[[Path], object]) -> str:
        copy = tmp_path_factory.mktemp("copy") / "model"
        shutil.copytree(pair, copy)
        change(copy)
        return Checkpoint.open(copy).fingerprint()

    def flip_last_bit(directory: Path) -> None:
        data = bytearray((directory / "2.safetensors").read_bytes())
        data[-1] ^= 1
        (directory / "2.safetensors").write_bytes(data)

    prints = [
        changed(lambda copy: None),
        changed(flip_last_bit),
        changed(lambda copy: (copy / "config.json").write_text('{"model_type": "mixtral", "x": 1}')),
        changed(lambda copy: save_file({"a": torch.ones(3), "c": torch.ones(1)}, copy / "1.safetensors")),
    ]
    assert prints[0] == Checkpoint.open(pair).fingerprint()
    assert len(set(prints)) == len(prints)


# ---- broken directories


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint.open(tmp_path / "org/model")


def test_no_config(pair: Path) -> None:
    (pair / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: does not exist"):
        Checkpoint.open(pair)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": 3}', "\udcff", "[" * 100_000, "1" * 10_000])
def test_bad_config(pair: Path, text: str) -> None:
    (pair / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint.open(pair)


def test_no_weights(pair: Path) -> None:
    (pair / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        Checkpoint.open(pair)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth"])
def test_pickles_only(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=f"only as pickles .{name}.; .*save_pretrained"):
        Checkpoint.open(tmp_path)


def test_missing_shard(pair: Path) -> None:
    (pair / "2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"tensor 'b': the shard 2\.safetensors does not exist"):
        Checkpoint.open(pair)


def test_a_clone_without_git_lfs(pair: Path) -> None:
    (pair / "2.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7234440\n")
    with pytest.raises(CheckpointError, match=r"2\.safetensors: is a Git LFS pointer"):
        Checkpoint.open(pair)


def test_dangling_link(pair: Path) -> None:
    (pair / "2.safetensors").unlink()
    (pair / "2.safetensors").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="does not exist"):
        Checkpoint.open(pair)


@pytest.mark.parametrize(
    "shard",
    [
        "../1.safetensors",
        "/etc/passwd",
        "/1.safetensors",
        "sub/1.safetensors",
        "..\\1.safetensors",
        "..",
        ".",
        "",
        "a\0.safetensors",
        "config.json",
        3,
        None,
        ["1.safetensors"],
    ],
)
def test_index_that_points_elsewhere(pair: Path, shard: object) -> None:
    shutil.copy(pair / "1.safetensors", pair.parent / "1.safetensors")
    index = pair / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match=r"index\.json: tensor 'a': the shard"):
        Checkpoint.open(pair)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_bad_index(pair: Path, text: str) -> None:
    (pair / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Checkpoint.open(pair)


def test_listed_twice_in_the_index(pair: Path) -> None:
    (pair / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}')
    with pytest.raises(CheckpointError, match="'a' twice"):
        Checkpoint.open(pair)


def test_listed_and_absent(pair: Path) -> None:
    save_file({"z": torch.ones(1)}, pair / "2.safetensors")
    with pytest.raises(CheckpointError, match=r"2\.safetensors: tensor 'b': listed in the index, absent"):
        Checkpoint.open(pair)


def test_duplicate_tensor(pair: Path) -> None:
    save_file({"b": torch.ones(1), "a": torch.ones(3)}, pair / "2.safetensors")
    with pytest.raises(CheckpointError, match=r"2\.safetensors: tensor 'a': is also in 1\.safetensors"):
        Checkpoint.open(pair)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, -1, -8])
def test_truncated_shard(pair: Path, keep: int) -> None:
    shard = pair / "2.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"2\.safetensors: truncated"):
        Checkpoint.open(pair)


def test_shard_that_shrinks_while_it_is_open(pair: Path) -> None:
    checkpoint = Checkpoint.open(pair)
    os.truncate(pair / "1.safetensors", 20)
    with pytest.raises(CheckpointError, match="tensor 'a': the file was modified during the run"):
        checkpoint.tensor("a")
    (pair / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="tensor 'a': cannot be mapped"):
        checkpoint.tensor("a")


def test_shard_that_is_a_directory(pair: Path) -> None:
    (pair / "2.safetensors").unlink()
    (pair / "2.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"2\.safetensors"):
        Checkpoint.open(pair)


# ---- broken headers

HEADERS: dict[str, tuple[bytes | Mapping[str, Any], bytes, str]] = {
    "not json": (b"\x80abc", b"", "JSON"),
    "not an object": (b"[]", b"", "expected a JSON object"),
    "deep": (b"[" * 200_000, b"", "JSON"),
    "duplicate": (b'{"a": 1, "a": 2}', b"", "'a' twice"),
    "no entry": ({"a": 3}, b"", "needs exactly"),
    "missing field": ({"a": {"dtype": "F32", "shape": [2]}}, b"", "needs exactly"),
    "extra field": ({"a": {**ENTRY, "x": 1}}, bytes(8), "needs exactly"),
    "unknown dtype": ({"a": {**ENTRY, "dtype": "F31"}}, bytes(8), "unknown dtype 'F31'"),
    "dtype is a list": ({"a": {**ENTRY, "dtype": ["F32"]}}, bytes(8), "unknown dtype"),
    "negative size": ({"a": {**ENTRY, "shape": [-2]}}, bytes(8), "shape"),
    "boolean size": ({"a": {**ENTRY, "shape": [True, 2]}}, bytes(8), "shape"),
    "fractional size": ({"a": {**ENTRY, "shape": [2.0]}}, bytes(8), "shape"),
    "huge size": ({"a": {**ENTRY, "shape": [2**62, 2**62]}}, bytes(8), "needs"),
    "wrapping product": ({"a": {**ENTRY, "shape": [2**62, 4, 2]}}, bytes(8), "needs"),
    "negative offset": ({"a": {**ENTRY, "data_offsets": [-8, 0]}}, bytes(8), "offsets"),
    "reversed offsets": ({"a": {**ENTRY, "data_offsets": [8, 0]}}, bytes(8), "span"),
    "three offsets": ({"a": {**ENTRY, "data_offsets": [0, 4, 8]}}, bytes(8), "two sizes"),
    "wrong size": ({"a": {**ENTRY, "shape": [3]}}, bytes(8), "needs 12 bytes"),
    "hole": ({"a": {**ENTRY, "data_offsets": [4, 12]}}, bytes(12), "hole"),
    "overlap": ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, bytes(12), "overlaps"),
    "same bytes": ({"a": ENTRY, "b": ENTRY}, bytes(8), "overlaps"),
    "past the end": ({"a": {**ENTRY, "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}, bytes(8), "truncated"),
    "rest": ({"a": ENTRY}, bytes(9), "1 bytes after"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_broken_header(case: str, tmp_path: Path) -> None:
    header, data, message = HEADERS[case]
    file = raw_file(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(file)
    assert caught.value.file == str(file)
    with pytest.raises(CorruptionError, match=message):
        read_header(file, CorruptionError)


@pytest.mark.parametrize("length", [MAX_HEADER + 1, 2**63, 2**64 - 1])
def test_header_too_long(length: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the limit is"):
        read_header(raw_file(tmp_path / "x", b"{}", length=length))


def test_header_without_tensors(tmp_path: Path) -> None:
    assert read_header(raw_file(tmp_path / "x", {"__metadata__": {"a": "b"}})).metadata == {"a": "b"}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_refused_or_harmless(data: st.DataObject, tmp_path: Path) -> None:
    """For any bytes of a shard, a header is rejected with a typed error or stays inside the file."""
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3), "b": torch.zeros(2, 2), "c": torch.zeros(0)}, file)
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    try:
        header = read_header(file)
    except CheckpointError:
        return
    assert sum(info.nbytes for info in header.tensors.values()) < header.size == file.stat().st_size
    assert all(0 < info.offset <= info.offset + info.nbytes <= header.size for info in header.tensors.values())


# ---- messages of rejections


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), r"holds neither model\.safetensors nor model\.safetensors\.index\.json$"),
        (("training_args.bin", "optimizer.pt"), r"holds neither .*; it has optimizer\.pt, training_args\.bin$"),
        (("consolidated.safetensors",), r"holds neither .*; it has consolidated\.safetensors$"),
        (("model-00001-of-00002.safetensors", "a.gguf", "b.gguf", "c.gguf"), r"it has a\.gguf, .* and others$"),
        (("pytorch_model.bin", "optimizer.pt"), r"only as pickles \(pytorch_model\.bin\)"),
    ],
)
def test_a_directory_without_weights_names_its_files(files: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        Checkpoint.open(tmp_path)


def test_an_adapter_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is a peft adapter, not a model"):
        Checkpoint.open(tmp_path)

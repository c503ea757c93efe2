"""The packed directory: the shard writer, the manifest, opening and verifying."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import moepack
import packed_support as support
from moepack import CorruptionError, DiskError, LoadError
from moepack.checkpoint import Checkpoint, describe
from moepack.checkpoint.balanced import balanced
from moepack.format import MANIFEST, PackedDirectory, shard
from moepack.format.atomic import publish_file, write_all, write_file
from moepack.format.side import LARGEST
from moepack.methods import Rate
from moepack.solvers.rtn import quantize_ternary


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "copy"))


def entry(name: str, array: np.ndarray, dtype: str, packed: bool = False) -> shard.Entry:
    flat = array.reshape(-1).view(np.uint8)
    return shard.Entry(name, dtype, array.shape, lambda: memoryview(flat), packed)


def test_shard_is_read_by_safetensors_and_aligned(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    blob = rng.integers(0, 256, 192, dtype=np.uint8)
    odd = rng.integers(0, 256, 3, dtype=np.uint8)
    wide = rng.standard_normal((3, 5))
    empty = np.zeros((0, 7), np.float32)
    entries = [entry("odd", odd, "U8"), entry("wide", wide, "F64"), entry("z.blob", blob, "U8", True)]
    entries += [entry("empty", empty, "F32"), entry("scalar", np.array(2.5, np.float32), "F32")]
    path = tmp_path / "x.safetensors"
    written = shard.write_shard(path, entries, {"format": "pt"})
    loaded = load_file(path)
    for name, array in {"odd": odd, "wide": wide, "z.blob": blob, "empty": empty}.items():
        assert np.array_equal(loaded[name].numpy(), array)
        assert loaded[name].shape == array.shape
    assert loaded["scalar"].shape == () and loaded["scalar"] == 2.5
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    from moepack.format.header import read_header

    header = read_header(path)
    assert header.tensors["z.blob"].offset % 64 == 0
    assert all(info.offset % info.dtype.itemsize == 0 for info in header.tensors.values())
    assert written.size == path.stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_shard_does_not_depend_on_the_order_of_entries(tmp_path: Path) -> None:
    entries = [entry(f"t{i}", np.arange(i + 1, dtype=np.float32), "F32") for i in range(9)]
    first = shard.write_shard(tmp_path / "a", entries, {})
    second = shard.write_shard(tmp_path / "b", entries[::-1], {})
    assert first == second
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_shard_rejects_invalid_entries(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        shard.write_shard(tmp_path / "a", [entry("blob", np.zeros(100, np.uint8), "U8", True)], {})
    lying = shard.Entry("t", "F32", (3,), lambda: memoryview(bytes(8)))
    with pytest.raises(ValueError, match="'t' has 8 bytes, but its shape needs 12"):
        shard.write_shard(tmp_path / "a", [lying], {})
    assert list(tmp_path.iterdir()) == []


def test_publish_file_leaves_the_old_file_when_the_block_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, b"old")
    with pytest.raises(KeyboardInterrupt), publish_file(path) as file:
        write_all(file, memoryview(b"new and longer"))
        raise KeyboardInterrupt
    assert support.contents(tmp_path) == {"file": b"old"}
    with pytest.raises(DiskError) as caught:
        write_file(tmp_path / "absent" / "file", b"")
    assert caught.value.file is not None and "absent" in caught.value.file


def test_directory_is_a_model_directory(packed: Path, mixtral: Path) -> None:
    config = json.loads((packed / "config.json").read_bytes())
    source = json.loads((mixtral / "config.json").read_bytes())
    quantization = config.pop("quantization_config")
    assert config == source
    assert quantization["quant_method"] == "moepack" and quantization["code"] == "fsv8"
    assert quantization["packed"]["model.layers.0.mlp.experts"]["gate_proj"] == [4, 96, 64]
    index = json.loads((packed / "model.safetensors.index.json").read_bytes())
    for name, file in index["weight_map"].items():
        with safe_open(packed / file, "pt") as reader:
            assert name in reader.keys()  # noqa: SIM118
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (packed / name).read_bytes() == (mixtral / name).read_bytes()


def test_dense_tensors_are_copied_bit_for_bit(mixtral: Path, tmp_path: Path) -> None:
    """By a method that does not pack the balanced form."""
    packed = tmp_path / "packed"
    moepack.compress(mixtral, packed, method=Rate(3.0, roles="none"))
    source = load_file(mixtral / "model.safetensors")
    dense = {name: tensor for name, tensor in source.items() if ".experts." not in name}
    found = {}
    for file in packed.glob("*.safetensors"):
        found.update({name: tensor for name, tensor in load_file(file).items() if ".experts." not in name})
    assert found.keys() == dense.keys() and len(dense) > 10
    for name, tensor in dense.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_packed_tensors_are_mapped_and_hold_the_quantized_weights(packed: Path, mixtral: Path) -> None:
    checkpoint = Checkpoint.open(mixtral)
    model = describe(checkpoint)
    sources = {name for layer in model.layers for part in layer.projections for name in part.sources}
    source = balanced(checkpoint, model, sources)
    assert source is not None
    directory = PackedDirectory.open(packed)
    assert len(directory.tensors()) == 6
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name, array in directory.tensors().items():
        assert array.dtype == np.uint8 and array.ndim == 1
        assert not array.flags.writeable and array.ctypes.data % 64 == 0
        layer, projection = name.split(".")[2], names[name.rsplit(".", 1)[1]]
        codes, levels = directory.blob(name).decode(), directory.blob(name).parameters("levels")
        for expert in range(4):
            weight = source.tensor(f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{projection}.weight")
            expected, pairs = quantize_ternary(weight)
            assert np.array_equal(codes[expert], expected.numpy())
            assert np.array_equal(levels[expert], pairs.numpy())


def test_manifest_tells_the_truth(packed: Path, mixtral: Path) -> None:
    manifest = support.manifest_of(packed)
    directory = PackedDirectory.open(packed)
    assert set(manifest.files) | {MANIFEST} == set(support.contents(packed))
    for name, record in manifest.packed().items():
        codes = directory.blob(name).decode()
        assert record.shape == codes.shape
        assert record.details["nonzeros"] == np.count_nonzero(codes)
        assert record.source_bytes == 2 * codes.size
        assert record.nbytes == directory.tensor(name).nbytes
        assert record.module == name.rsplit(".", 1)[0]


def test_verify_finds_nothing_in_a_sound_directory(packed: Path) -> None:
    report = moepack.verify(packed)
    assert report.ok and report.faults == ()
    assert report.tensors == 6
    assert report.files == len(support.contents(packed))
    assert report.nbytes == sum(map(len, support.contents(packed).values())) - len((packed / MANIFEST).read_bytes())


def test_a_future_version_is_refused_with_both_versions(copy: Path) -> None:
    support.rewrite_manifest(copy, lambda content: content.update(version=7, something_new={}))
    with pytest.raises(CorruptionError, match="format version 7; this moepack reads up to 1") as caught:
        PackedDirectory.open(copy)
    assert caught.value.file == str(copy / MANIFEST)
    assert "version 7" in str(moepack.verify(copy).faults[0])


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None])
def test_an_invalid_version_is_rejected(copy: Path, version: object) -> None:
    support.rewrite_manifest(copy, lambda content: content.update(version=version))
    with pytest.raises(CorruptionError, match="version"):
        PackedDirectory.open(copy)


def test_unpacked_directories_are_rejected(tmp_path: Path, mixtral: Path) -> None:
    for path in (tmp_path / "absent", tmp_path, mixtral):
        for function in (PackedDirectory.open, moepack.verify):
            with pytest.raises(LoadError) as caught:
                function(path)
            assert caught.value.file == str(path)


def test_stray_and_missing_files_are_faults(copy: Path) -> None:
    (copy / "adapter.safetensors").write_text("mine")
    (copy / "onnx").mkdir()
    (copy / ".gitattributes").write_text("added by the hub, tolerated")
    (copy / "tokenizer.json").unlink()
    assert {(fault.file, fault.what) for fault in moepack.verify(copy).faults} == {
        ("adapter.safetensors", "the manifest does not list it"),
        ("onnx", "the manifest does not list it"),
        ("tokenizer.json", "missing"),
    }
    PackedDirectory.open(copy)


def test_side_files_may_change_and_are_listed_apart(copy: Path) -> None:
    (copy / "README.md").write_text("# a model card")
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    (copy / "generation_config.json").unlink()
    (copy / "tokenizer_config.json").write_text("{}")
    report = moepack.verify(copy)
    assert report.ok and report.faults == ()
    assert {(each.file, each.change) for each in report.side} == {
        ("README.md", "added"),
        ("chat_template.jinja", "added"),
        ("generation_config.json", "missing"),
        ("tokenizer_config.json", "changed"),
    }


def test_a_large_file_is_not_a_side_file(copy: Path) -> None:
    with open(copy / "notes.txt", "wb") as file:
        file.truncate(LARGEST + 1)
    assert [fault.file for fault in moepack.verify(copy).faults] == ["notes.txt"]


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00003.safetensors", "model.safetensors.index.json"])
def test_a_missing_file_that_matters_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    assert moepack.verify(copy).faults[0].file == name
    if name != "model.safetensors.index.json":
        with pytest.raises(CorruptionError) as caught:
            PackedDirectory.open(copy)
        assert caught.value.file == str(copy / name)


def test_damage_is_located(copy: Path) -> None:
    manifest = support.manifest_of(copy)
    name, record = list(manifest.packed().items())[1]
    from moepack.format.header import read_header

    info = read_header(copy / record.file).tensors[name]
    support.flip(copy / record.file, 8 * (info.offset + 200))
    faults = moepack.verify(copy).faults
    assert (faults[0].file, faults[0].tensor, faults[0].offset) == (record.file, name, info.offset)
    assert name in str(faults[0]) and record.file in str(faults[0])


def test_contradictions_of_a_consistent_forger_are_found(copy: Path) -> None:
    """All checksums are valid; only the content is wrong."""
    config = json.loads((copy / "config.json").read_bytes())
    config["quantization_config"]["packed"]["model.layers.0.mlp.experts"]["gate_proj"] = [4, 96, 63]
    (copy / "config.json").write_text(json.dumps(config))
    support.accept_file(copy, "config.json")
    index = json.loads((copy / "model.safetensors.index.json").read_bytes())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    support.accept_file(copy, "model.safetensors.index.json")
    assert {fault.file for fault in moepack.verify(copy).faults} == {"config.json", "model.safetensors.index.json"}


def test_a_blob_that_decodes_wrongly_is_found_behind_right_checksums(copy: Path) -> None:
    file = copy / "model-00001-of-00003.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    padded = tensors[name].clone()
    padded[-1] = 1  # the zeros after the payload
    tensors[name] = padded
    save_file(tensors, file)
    support.accept_file(copy, file.name)
    faults = moepack.verify(copy).faults
    assert any(fault.tensor == name for fault in faults)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("shape", [4, 96, 65], "shape is"),
        ("details", {"code": "dict16", "nonzeros": 1}, "code is fsv8"),
        ("kind", "unheard of", "unknown kind"),
        ("nbytes", 64, "size differ"),
        ("file", "model-00002-of-00003.safetensors", "is missing from"),
    ],
)
def test_a_manifest_that_lies_about_a_tensor_is_found(copy: Path, key: str, value: object, message: str) -> None:
    name = "model.layers.0.mlp.experts.gate_proj"
    support.rewrite_manifest(copy, lambda content: content["tensors"][name].__setitem__(key, value))
    assert any(message in fault.what for fault in moepack.verify(copy).faults)
    with pytest.raises(CorruptionError) as caught:
        PackedDirectory.open(copy).blob(name)
    assert caught.value.tensor == name


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("files"),
        lambda content: content.update(files=[]),
        lambda content: content["files"].update({"../outside": {"size": 0, "sha256": "0" * 64}}),
        lambda content: content["files"].update({MANIFEST: {"size": 0, "sha256": "0" * 64}}),
        lambda content: content["files"]["config.json"].update(size=-1),
        lambda content: content["files"]["config.json"].update(sha256="x"),
        lambda content: content["tensors"]["model.norm.weight"].update(file="absent"),
        lambda content: content["tensors"]["model.norm.weight"].update(dtype="F33"),
        lambda content: content["tensors"]["model.norm.weight"].update(shape=[2**63]),
        lambda content: content["tensors"]["model.norm.weight"].update(extra=1),
        lambda content: content["tensors"].update(x=None),
        lambda content: content.update(format="other"),
        lambda content: content.update(method=3),
    ],
)
def test_a_manifest_of_wrong_shape_is_refused(copy: Path, change: object) -> None:
    support.rewrite_manifest(copy, change)  # type: ignore[arg-type]
    with pytest.raises(CorruptionError) as caught:
        PackedDirectory.open(copy)
    assert caught.value.file == str(copy / MANIFEST)
    assert not moepack.verify(copy).ok


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"format": "moepack", "format": 1}'])
def test_a_manifest_that_is_not_a_json_object_is_rejected(copy: Path, text: bytes) -> None:
    (copy / MANIFEST).write_bytes(text)
    with pytest.raises(CorruptionError):
        PackedDirectory.open(copy)
    assert moepack.verify(copy).faults[0].file == MANIFEST


def test_a_manifest_in_another_spelling_is_refused(copy: Path) -> None:
    """Otherwise a flipped bit in white space would not be detected."""
    content = json.loads((copy / MANIFEST).read_bytes())
    (copy / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CorruptionError, match="canonical"):
        PackedDirectory.open(copy)

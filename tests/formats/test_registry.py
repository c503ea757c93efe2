"""Packed formats: the core's registry, and the whole path of a format that a test registers in one place."""

import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import moepack
import packed_support as support
from moepack import CorruptionError, _core
from moepack.cli import app
from moepack.export import export
from moepack.format import PackedDirectory
from moepack.registry import kinds, open_tensor
from places import ROOT
from runtime_support import KIND, DenseMatrix, DenseMethod, dense_blob, logits, tiny_model, write_packed


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_packed(tiny_model("mixtral"), tmp_path_factory.mktemp("toy") / "packed", DenseMethod(["attention"]))


def test_a_registered_format_is_verified_shown_loaded_multiplied_and_exported(directory, tmp_path):
    report = moepack.verify(directory)
    assert report.ok and report.tensors > 0
    shown = CliRunner().invoke(app, ["inspect", str(directory)]).output.partition("\n")[2]
    assert shown.count(KIND) == report.tensors
    opened, model = PackedDirectory.open(directory), tiny_model("mixtral")
    blob = opened.blob("model.layers.0.mlp.experts.down_proj")
    assert isinstance(blob, DenseMatrix) and np.array_equal(
        blob.dequantize(), model.get_submodule("model.layers.0.mlp.experts").down_proj.detach().numpy()
    )
    torch.testing.assert_close(logits(moepack.load(directory)), logits(model), rtol=1e-4, atol=1e-4)
    export(directory, tmp_path / "plain")
    assert (tmp_path / "plain" / "config.json").is_file()


def test_damage_to_a_registered_format_is_found(directory, tmp_path):
    """Only the format itself knows that a weight must be finite: checksums are those of the damaged file."""
    name, copy = "model.layers.0.mlp.experts.down_proj", tmp_path / "copy"
    copy.mkdir()
    for file, content in support.contents(directory).items():
        (copy / file).write_bytes(content)
    record = support.manifest_of(copy).tensors[name]
    mapped = PackedDirectory.open(copy).tensor(name)
    content = bytearray((copy / record.file).read_bytes())
    start = bytes(content).index(mapped[:128].tobytes())
    content[start + 64 : start + 68] = np.float32(np.nan).tobytes()
    (copy / record.file).write_bytes(content)
    support.accept_file(copy, record.file)
    faults = moepack.verify(copy).faults
    assert [(fault.tensor, fault.what) for fault in faults] == [(name, "test-dense: a weight is not finite")]
    support.rewrite_manifest(copy, lambda manifest: manifest["tensors"][name]["details"].update(width=16))
    with pytest.raises(CorruptionError, match="width is 32, but the manifest lists 16"):
        PackedDirectory.open(copy).blob(name)


def test_the_specification_names_every_format_of_the_core():
    table = (ROOT / "docs" / "format.md").read_text().split("\n\n")[1]
    rows = dict(re.findall(r"^\| (.+) tensor \| (?:\d+; )*(\d+)\b", table, re.MULTILINE))  # the newest version
    names = {"groupwise": "group-wise"}
    assert rows == {names.get(kind, kind): str(version) for kind, _, version in _core.formats()}
    assert {kind for kind, _, _ in _core.formats()} | {KIND} <= kinds()


def test_bytes_of_no_format_are_a_typed_error():
    with pytest.raises(_core.UnknownFormatError, match=r"NEWMAGIC \(known: MOEPTERN"):
        _core.PackedTensor(np.frombuffer(b"NEWMAGIC" + bytes(56), np.uint8))
    with pytest.raises(_core.CorruptionError, match="7 bytes"):
        _core.PackedTensor(np.zeros(7, np.uint8))
    with pytest.raises(_core.UnknownFormatError):
        _core.PackedTensor(dense_blob(np.zeros((1, 2, 3), np.float32)))
    assert open_tensor(dense_blob(np.zeros((1, 2, 3), np.float32))).kind == KIND


def test_sizes_need_a_whole_specification():
    size = _core.packed_bytes("groupwise", (2, 16, 64), bits=4, group_size=32, symmetric=True)
    assert size == 128 + 2 * (64 + 16 * 64 // 2)
    for kind, specification, message in [
        ("groupwise", {"bits": 4, "group_size": 32}, "symmetric is missing"),
        ("groupwise", {"bits": 5, "group_size": 32, "symmetric": True}, "5 bits"),
        ("groupwise", {"bits": 300, "group_size": 32, "symmetric": True}, "bits is too large"),
        ("codebook", {"bits": 4, "block_size": 100, "activation_bits": 0}, "blocks of 100"),
        ("ternary", {"code": "fsv8"}, "depends on its codes"),
        ("unheard of", {}, "unknown kind"),
    ]:
        with pytest.raises(ValueError, match=message):
            _core.packed_bytes(kind, (2, 16, 640), **specification)
    with pytest.raises(TypeError):
        _core.packed_bytes("groupwise", (2, 16, 64), bits=4.5)


@pytest.mark.parametrize(("experts", "rows"), [(2**31 - 1, 16), (1, 2**40), (2**40, 0)])
def test_tensors_of_nothing_cannot_ask_for_endless_work(experts, rows):
    none = np.zeros((1, 16, 0), np.float32)
    header = _core.encode_groupwise(none.astype(np.uint8), none, none, bits=4, group_size=64, ndim=3).copy()
    header[16:40] = np.array([experts, rows, 0], np.uint64).view(np.uint8)
    with pytest.raises(CorruptionError):
        open_tensor(header)

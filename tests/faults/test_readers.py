"""Mutation tests of readers of untrusted files: any content gives a typed error or a valid value.

Texts are mutated both as bytes and as the JSON they contain, which reaches code behind the parser. (Headers of
safetensors files: `test_reader.py`. Packed tensors: `rust/fuzz`.)
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import moepack
from moepack import Checkpoint, CheckpointError, CorruptionError, LoadError, MoepackError, ResumeError
from moepack.checkpoint.qmoe import read_matrix
from moepack.format import MANIFEST, Manifest, PackedDirectory
from moepack.format import manifest as manifest_module
from moepack.format.manifest import FileRecord
from moepack.pipeline import journal
from moepack.pipeline.rewrite import _kept

mutations = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 10**30, 0.5, 1e308]),
    st.text(max_size=4),
    st.sampled_from(["..", "/etc/passwd", "a/b", "model-00001-of-00003.safetensors", "\ud800", "U8", "dense"]),
    st.builds(list),
    st.builds(dict),
    st.builds(lambda: [[[]]]),
)


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every position in a JSON value: its container, and its key or index."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [place for key in keys for place in [(value, key), *nodes(value[key])]]


def mutated(data: st.DataObject, content: Any) -> Any:
    """A JSON value with up to three places replaced, removed or doubled under another name."""
    content = json.loads(json.dumps(content))
    for _ in range(data.draw(st.integers(1, 3))):
        places = nodes(content)
        if not places:
            break
        container, key = data.draw(st.sampled_from(places))
        action = data.draw(st.sampled_from(["replace", "remove", "rename"]))
        if action == "replace":
            container[key] = data.draw(VALUES)
        elif action == "remove" or not isinstance(container, dict):
            del container[key]
        else:
            container[data.draw(st.text(max_size=5))] = container.pop(key)
    return content


def scrambled(data: st.DataObject, raw: bytes) -> bytes:
    """Bytes with some changed, truncated anywhere."""
    content = bytearray(raw)
    for _ in range(data.draw(st.integers(0, 4))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    return bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)


def text_of(content: Any) -> bytes:
    return json.dumps(content).encode()


@pytest.fixture(scope="module")
def victim(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(packed, tmp_path_factory.mktemp("victim") / "packed"))


@mutations
@given(st.data())
def test_manifests(victim: Path, packed: Path, data: st.DataObject) -> None:
    """With a valid checksum, as from a hostile writer: a `CorruptionError`, or a directory that opens."""
    content = json.loads((packed / MANIFEST).read_bytes())
    del content["checksum"]
    try:
        raw = manifest_module._canonical(mutated(data, content))
    except ValueError:  # not representable in JSON
        raw = scrambled(data, (packed / MANIFEST).read_bytes())
    (victim / MANIFEST).write_bytes(raw)
    try:
        assert isinstance(Manifest.parse(raw, "x"), Manifest)
        opened = PackedDirectory.open(victim)
        for name in opened.tensors():
            opened.blob(name)
    except CorruptionError as error:
        assert error.file is not None
    moepack.verify(victim)


@mutations
@given(st.data())
def test_configurations_and_indices(victim: Path, packed: Path, data: st.DataObject) -> None:
    """`verify` compares everything; it reports and never raises."""
    shutil.copy(packed / MANIFEST, victim / MANIFEST)
    name = data.draw(st.sampled_from(["config.json", "model.safetensors.index.json"]))
    raw = (packed / name).read_bytes()
    change: Callable[[], bytes] = data.draw(
        st.sampled_from([lambda: text_of(mutated(data, json.loads(raw))), lambda: scrambled(data, raw)])
    )
    content = change()
    (victim / name).write_bytes(content)
    assert moepack.verify(victim).ok == (content == raw)
    (victim / name).write_bytes(raw)


@mutations
@given(st.data())
def test_the_index_of_a_checkpoint(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("checkpoint")
    for name in ("a", "b"):
        (directory / f"{name}.safetensors").write_bytes(save({name: torch.ones(2)}))
    (directory / "config.json").write_bytes(text_of(mutated(data, {"model_type": "mixtral", "hidden_size": 2})))
    index = {"metadata": {"total_size": 16}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (directory / "model.safetensors.index.json").write_bytes(text_of(mutated(data, index)))
    try:
        checkpoint = Checkpoint.open(directory)
    except CheckpointError as error:
        assert error.file is not None
    else:
        assert all(info.file.parent == directory for info in map(checkpoint.info, checkpoint.names()))
    shutil.rmtree(directory)


FINGERPRINT = {"model": "m", "method": "ternary", "settings": "code=fsv8", "format": "1", "moepack": "0.1.0"}


@mutations
@given(st.data())
def test_journals(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A damaged journal is used only for shards that exist with the recorded bytes."""
    path = tmp_path_factory.mktemp("job") / "out.partial"
    path.mkdir()
    (path / "1.safetensors").write_bytes(b"whole")
    record = FileRecord.of(b"whole")
    lines = [
        FINGERPRINT,
        {"stamps": {"x": "1 2 3"}},
        {"shard": "1.safetensors", "size": record.size, "sha256": record.sha256, "tensors": {}},
        {"made_of": {"1.safetensors": "0"}},
    ]
    texts = [text_of(mutated(data, line)) if data.draw(st.booleans()) else text_of(line) for line in lines]
    raw = b"\n".join(texts) + b"\n"
    (path / journal.JOURNAL).write_bytes(scrambled(data, raw) if data.draw(st.booleans()) else raw)
    try:
        workspace = journal.Workspace.open(path, FINGERPRINT, True, stamps={"x": "1 2 3"})
    except ResumeError as error:
        assert error.file is not None
    else:
        assert set(workspace.done) <= {"1.safetensors"} and not workspace.complete
        workspace.close()
    shutil.rmtree(path.parent)


@mutations
@given(st.data())
def test_states(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    file = tmp_path_factory.mktemp("job") / "out.state"
    file.write_bytes(scrambled(data, save({"rotation": torch.eye(4)}, {"owner": "me"})))
    try:
        found = _kept(file, "me")
    except ResumeError as error:
        assert error.file == str(file)
    else:
        assert found is None or all(isinstance(tensor, torch.Tensor) for tensor in found.values())


@mutations
@given(
    words=st.lists(st.integers(-(2**15), 2**15 - 1), max_size=12),
    offsets=st.lists(st.integers(-2, 2**31 - 1), max_size=6),
    levels=st.lists(st.sampled_from([-1.0, 0.0, 1.0, float("nan"), float("inf")]), max_size=10),
    columns=st.integers(0, 64),
)
def test_published_matrices(words: list[int], offsets: list[int], levels: list[float], columns: int) -> None:
    """Matrices in the QMoE authors' format."""
    starts = torch.tensor(offsets, dtype=torch.int32)
    try:
        tensor = read_matrix(torch.tensor(words, dtype=torch.int16), starts, torch.tensor(levels), columns, name="w")
    except CheckpointError as error:
        assert error.tensor == "w"
    else:
        assert tensor.shape == (len(offsets) - 1, columns)


@mutations
@given(st.data())
def test_saved_tensors(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    file = tmp_path_factory.mktemp("saved") / "x"
    codes = torch.tensor([[0, 1, -1, 0, 1]] * 3, dtype=torch.int8)
    moepack.encode_ternary(codes, levels=torch.tensor([[-1.0, 1.0]] * 3)).save(file)
    file.write_bytes(scrambled(data, file.read_bytes()))
    for options in ({}, {"resident": True}, {"verify": False}):
        try:
            moepack.TernaryTensor.load(file, **options).decode()
        except (CorruptionError, LoadError) as error:
            assert isinstance(error, MoepackError) and error.file == str(file)

"""Side files follow the model, and all commands use the same set of files."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

import moepack
import packed_support as support
from moepack.checkpoint import Checkpoint
from moepack.cli import main
from moepack.errors import CheckpointError, CorruptionError, MoepackError
from moepack.export import export
from moepack.format import side
from moepack.format.weights import weight_files
from moepack.integrations.loading import open_model
from moepack.methods import create
from moepack.pipeline.estimate import estimate
from moepack.pipeline.journal import JOURNAL, Workspace


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("the sea and the wolf and the fire said " * 40)
    return tmp_path / "text.txt"


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"

CARRIED = {
    "additional_chat_templates/tool_use.jinja": "T{{ messages }}",
    "additional_chat_templates/rag.jinja": "R{{ messages }}",
    "chat_template.jinja": "{{ messages }}",
    "preprocessor_config.json": "{}",
    "video_preprocessor_config.json": "{}",
    "processor_config.json": "{}",
    "vocab.any": "a b c",
    "modules.json": "[]",
    "1_Pooling/config.json": "{}",
    "deep/er/file.txt": "text",
    "code.py": "raise SystemExit",
    "journal": "a name like one of ours",
}
LEFT = {
    "original/params.json": "{}",
    "original/consolidated.00.pth": "weights",
    "checkpoint-5/config.json": "{}",
    "checkpoint-5/optimizer.pt": "weights",
    "journal.jsonl": "a name of ours",
    "adapter_config.json": json.dumps({"base_model_name_or_path": "nowhere"}),
    ".cache/x": "hidden",
    "1_Pooling/.hidden": "hidden",
    "deep/__pycache__/code.pyc": "compiled",
    "deep/file.txt.lock": "what a download leaves",
    "tokenizer.json.incomplete": "what a download leaves",
    "fsdp/__0_0.distcp": "weights",
    "optimizer.pt": "weights",
    "consolidated.safetensors": POINTER,
    "model-00007-of-00009.safetensors": "a shard of an earlier save",
    "pytorch_model.bin": "weights",
}


def put(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


@pytest.fixture
def source(mixtral: Path, tmp_path: Path) -> Path:
    """A checkpoint with all kinds of additional files."""
    directory = Path(shutil.copytree(mixtral, tmp_path / "source"))
    put(directory, CARRIED | LEFT)
    return directory


def carried(directory: Path) -> dict[str, str]:
    found = support.contents(directory)
    return {name: found[name].decode() for name in CARRIED | LEFT if name in found}


def test_small_files_go_where_the_model_goes(source: Path, tmp_path: Path) -> None:
    report = moepack.compress(source, tmp_path / "packed", method="finequant", bits=8)
    assert report.skipped == ("checkpoint-5", "fsdp", "original", "tokenizer.json.incomplete")
    moepack.load(tmp_path / "packed").save_pretrained(tmp_path / "saved")
    export(tmp_path / "packed", tmp_path / "plain", to="bf16")
    for name in ("packed", "saved", "plain"):
        assert carried(tmp_path / name) == CARRIED, name
    for name in ("packed", "saved"):
        found = moepack.verify(tmp_path / name)
        assert found.ok and not found.side
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed") is not None


def test_files_in_folders_are_verified(source: Path, tmp_path: Path) -> None:
    packed = moepack.compress(source, tmp_path / "packed", method="finequant", bits=8).path
    put(packed, {"1_Pooling/config.json": "{ }", "additional_chat_templates/rag.jinja": "edited", "new/a.txt": "added"})
    (packed / "deep" / "er" / "file.txt").unlink()
    (packed / "deep" / "out.txt").symlink_to(tmp_path / "elsewhere")
    put(packed, {"weights/a.safetensors": "", "1_Pooling/more.pt": ""})
    found = moepack.verify(packed)
    assert {(fault.file, fault.what.partition(",")[0]) for fault in found.faults} == {
        ("1_Pooling/config.json", "has 3 bytes"),
        ("1_Pooling/more.pt", "the manifest does not list it"),
        ("deep/er/file.txt", "missing"),
        ("deep/out.txt", "is a link out of the directory"),
        ("weights", "the manifest does not list it"),
    }
    assert {(each.file, each.change) for each in found.side} == {
        ("additional_chat_templates/rag.jinja", "changed"),
        ("new/a.txt", "added"),
    }


def test_a_folder_outside_is_reported_and_not_copied(source: Path, tmp_path: Path) -> None:
    put(tmp_path / "elsewhere", {"rag.jinja": "R"})
    shutil.rmtree(source / "additional_chat_templates")
    (source / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(moepack.MoepackWarning, match="additional_chat_templates: links out of the model's directory"):
        report = moepack.compress(source, tmp_path / "packed", method="finequant", bits=8)
    assert "additional_chat_templates" in report.skipped


def test_git_lfs_pointers_of_side_files_are_reported_and_not_copied(source: Path, tmp_path: Path) -> None:
    put(source, {"tokenizer.model": POINTER, "deep/er/file.txt": POINTER})
    with pytest.warns(moepack.MoepackWarning) as caught:
        report = moepack.compress(source, tmp_path / "packed", method="finequant", bits=8)
    assert sum("git lfs pull" in str(each.message) for each in caught) == 2
    assert "tokenizer.model" in report.skipped and not (tmp_path / "packed" / "tokenizer.model").exists()
    assert not (tmp_path / "packed" / "deep").exists() and moepack.verify(tmp_path / "packed").ok


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_git_lfs_pointers_instead_of_json_are_reported(name: str, mixtral: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(mixtral, tmp_path / "source"))
    (directory / "model.safetensors").unlink()
    put(directory, {name: POINTER})
    for door in (moepack.compress, estimate):
        with pytest.raises(CheckpointError, match=rf"{name}: is a Git LFS pointer"):
            door(directory, tmp_path / "out", method=create("finequant"))


def test_leftovers_of_an_earlier_run_in_folders_are_removed(tmp_path: Path) -> None:
    put(tmp_path / "out.partial", {"a/b/x.txt": "", "a/y.txt": "", "gone/z.txt": "", "top.txt": ""})
    (tmp_path / "out.partial" / JOURNAL).write_text("{}\n")
    workspace = Workspace.open(tmp_path / "out.partial", {}, resume=True)
    workspace.sweep({"a/b/x.txt"})
    assert {*support.contents(workspace.path)} == {"a/b/x.txt", JOURNAL}
    assert not (workspace.path / "gone").exists()
    workspace.close()
    Workspace.open(tmp_path / "out.partial", {}, resume=False).close()
    assert {*support.contents(tmp_path / "out.partial")} == {JOURNAL}


def test_a_folder_is_taken_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, {"a/x.txt": "1234", "a/b/y.txt": "5678", "out/x.txt": "", "two/model.bin": "", "two/x.txt": ""})
    (tmp_path / "out" / "link").symlink_to(tmp_path.parent)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("a")
    names = ("a", "out", "two", "empty", "link")
    assert [side.side_names(tmp_path / name) for name in names] == [["a/b/y.txt", "a/x.txt"], [], [], [], []]
    monkeypatch.setattr(side, "LARGEST", 7)
    assert side.side_names(tmp_path / "a") == []
    monkeypatch.setattr(side, "LARGEST", 8)
    assert side.side_names(tmp_path / "a")
    monkeypatch.setattr(side, "MOST", 1)
    assert side.side_names(tmp_path / "a") == []


@pytest.mark.parametrize("name", ["../x", "a/../x", "/x", "a//x", "x/", "a/./x", "a\\x", "a\0x", "", "moepack.json"])
def test_names_that_leave_the_directory_are_refused(name: str, packed: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(packed, tmp_path / "packed"))
    record = {"size": 0, "sha256": "0" * 64}
    support.rewrite_manifest(directory, lambda content: content["files"].__setitem__(name, record))
    with pytest.raises(CorruptionError, match="bad file name"):
        moepack.load(directory)


# ---- one rule for which files count


@pytest.mark.parametrize("stray", [name for name in LEFT if "/" not in name])
def test_every_command_accepts_a_checkpoint_with_a_stray_file(
    stray: str, mixtral: Path, tmp_path: Path, text: Path
) -> None:
    source = Path(shutil.copytree(mixtral, tmp_path / "source"))
    put(source, {stray: LEFT[stray]})
    assert estimate(source, tmp_path / "packed", create("finequant", bits=8)).layers
    packed = moepack.compress(source, tmp_path / "packed", method="finequant", bits=8).path
    want, found = (open_model(place, torch.float32)(torch.arange(9)[None]).logits for place in (source, packed))
    assert (want - found).norm() < 0.05 * want.norm()
    for words in (["eval", source, "--text", text], ["report", packed, "--reference", source, "--text", text]):
        with pytest.raises(SystemExit) as ended, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            main([str(word) for word in words])
        assert not ended.value.code, words


@pytest.mark.parametrize("stray", ["consolidated.safetensors", "optimizer.pt", "model-00007-of-00009.safetensors"])
def test_a_packed_directory_with_a_stray_file_is_loaded_and_listed(stray: str, packed: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(packed, tmp_path / "packed"))
    put(directory, {stray: LEFT[stray]})
    for options in ({}, {"resident": True}):
        assert moepack.load(directory, **options) is not None
    export(directory, tmp_path / "plain")
    assert [fault.file for fault in moepack.verify(directory).faults] == [stray]


def test_weights_that_transformers_would_open_instead_are_refused(packed: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(packed, tmp_path / "packed"))
    save_file({"lm_head.weight": torch.zeros(2, 2)}, directory / "model.safetensors", {"format": "pt"})
    for function in (moepack.load, transformers.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(MoepackError, match=r"model\.safetensors"):
            function(directory)


def test_the_files_that_count_are_those_that_transformers_opens(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    assert weight_files(tmp_path) == {}
    put(tmp_path, {"2.safetensors": "", "1.safetensors": "", "3.safetensors": ""})
    index.write_text(json.dumps({"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}))
    assert weight_files(tmp_path) == {"1.safetensors": ("b",), "2.safetensors": ("a", "c")}
    assert [*weight_files(tmp_path)] == ["1.safetensors", "2.safetensors"]
    put(tmp_path, {"model.safetensors": ""})
    assert weight_files(tmp_path) == {"model.safetensors": ()}


@pytest.mark.parametrize("name", ["other.safetensors", "other.safetensors.index.json"])
def test_the_file_that_the_configuration_names_is_read(name: str, mixtral: Path, tmp_path: Path) -> None:
    """Like transformers, regardless of a file with the usual name."""
    source = Path(shutil.copytree(mixtral, tmp_path / "source"))
    (source / "model.safetensors").rename(source / "other.safetensors")
    put(source, {"model.safetensors": POINTER})
    names = Checkpoint.open(mixtral).names()
    if name.endswith(".json"):
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, "other.safetensors")}
        (source / name).write_text(json.dumps(index))
    config = json.loads((source / "config.json").read_text()) | {"transformers_weights": name}
    (source / "config.json").write_text(json.dumps(config))
    ids = torch.arange(9)[None]
    want = open_model(mixtral, torch.float32)(ids).logits
    assert torch.equal(open_model(source, torch.float32)(ids).logits, want)
    packed = moepack.compress(source, tmp_path / "packed", method="finequant", bits=8).path
    assert moepack.verify(packed).ok
    assert (moepack.load(packed, torch.float32)(ids).logits - want).norm() < 0.05 * want.norm()
    for bad in ("../other.safetensors", "gone.safetensors", "model.bin", 3):
        (source / "config.json").write_text(json.dumps(config | {"transformers_weights": bad}))
        with pytest.raises(CheckpointError, match="transformers_weights"):
            Checkpoint.open(source)


def test_a_checkpoint_whose_own_shard_is_a_pointer_is_refused_by_all(mixtral: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(mixtral, tmp_path / "source"))
    (source / "model.safetensors").write_text(POINTER)
    for function in (Checkpoint.open, open_model, lambda place: moepack.compress(place, tmp_path / "packed")):
        with pytest.raises(MoepackError, match="Git LFS pointer"):
            function(source)


def test_folders_of_the_hubs_cache_are_links_into_its_blobs(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "models--a--b" / "snapshots" / "c"
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    for number, name in enumerate(sorted(support.contents(source))):
        shutil.copy(source / name, blobs / str(number))
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        up = "../" * (len(Path(name).parts) + 1)
        (place / name).symlink_to(f"{up}blobs/{number}")
    packed = moepack.compress(place, tmp_path / "packed", method="finequant", bits=8).path
    assert carried(packed) == CARRIED and moepack.verify(packed).ok
    (place / "1_Pooling" / "out.json").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text("of this machine")
    report = moepack.compress(place, tmp_path / "again", method="finequant", bits=8)
    assert "1_Pooling" in report.skipped and not (report.path / "1_Pooling").exists()

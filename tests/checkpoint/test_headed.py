"""Checkpoints whose config.json names the headless model although the head is stored."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moepack import UnsupportedModelError, compress, describe, load
from moepack.census.tiny import tiny_model
from moepack.checkpoint.quantized import open_checkpoint
from moepack.cli import main
from moepack.integrations.loading import open_model
from moepack.methods.finequant import FineQuant

IDS = torch.arange(3, 19)[None]
FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss", "glm4_moe"]


def configure(directory: Path, **settings: Any) -> Path:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return directory


def read_alike(directory: Path, out: Path) -> None:
    """Loaded by stock transformers, by moepack unpacked, and packed by both."""
    stock, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    expected = stock(IDS).logits
    torch.testing.assert_close(open_model(directory, torch.float32)(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    report = compress(directory, out, method=FineQuant(bits=8))
    assert any("a model without a head" in note for note in report.notes)
    assert json.loads((out / "config.json").read_text())["architectures"] == [type(stock).__name__]
    auto = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    for packed in (load(out, torch.float32), auto):
        assert (packed(IDS).logits - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_saved_below_its_tied_head_is_whole(family: str, tmp_path: Path) -> None:
    """Its names have no prefix, too."""
    model = tiny_model(family).to(torch.bfloat16).model
    model.save_pretrained(tmp_path / "source")
    configure(tmp_path / "source", tie_word_embeddings=True)
    read_alike(tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_is_stored_counts(family: str, tmp_path: Path) -> None:
    model = tiny_model(family).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    configure(tmp_path / "source", architectures=[type(model.model).__name__])
    read_alike(tmp_path / "source", tmp_path / "out")


def test_a_missing_head_is_reported(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").to(torch.bfloat16).model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="names Qwen3MoeModel, a model without head"):
        describe(open_checkpoint(tmp_path))


def test_a_note_of_the_class_outlives_one_of_names(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    tensors = {f"module.{name}": x for name, x in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    notes = open_checkpoint(configure(tmp_path, architectures=["Qwen3MoeModel"])).notes
    assert any("a model without a head" in note for note in notes) and any("'module.'" in note for note in notes)


@pytest.mark.parametrize(
    "words", [["generate", "--prompt", "a"], ["chat"], ["serve", "--port", "0"], ["eval", "--text", "text.txt"]]
)
def test_a_model_without_head_is_not_served(
    words: list[str], tiny_checkpoint: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """A packed model loaded without its head gives its hidden states."""
    monkeypatch.chdir(tmp_path)
    compress(tiny_checkpoint("qwen3_moe"), tmp_path / "packed", method=FineQuant(bits=8))
    configure(tmp_path / "packed", architectures=["Qwen3MoeModel"])
    (tmp_path / "text.txt").write_text("the sea and the wolf " * 100)
    command, *options = words
    with pytest.raises(SystemExit) as ended:
        main([command, "packed", *options])
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code not in (0, None) and "Qwen3MoeModel has no language-model head" in said, said

"""A head that config.json ties to the embedding but that is stored with other values."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moepack import compress, load
from moepack.census.tiny import tiny_model
from moepack.checkpoint.quantized import open_checkpoint
from moepack.integrations.loading import open_model
from moepack.methods.rate import Rate

IDS = torch.arange(3, 19)[None]


@pytest.mark.parametrize("same", [True, False])
def test_a_head_is_tied_where_transformers_ties_it(same: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny_model("qwen3_moe").to(torch.bfloat16).save_pretrained(source)
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if same else embedding.flip(0).contiguous()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})

    stock = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(IDS).logits
    assert torch.equal(open_model(source, torch.float32)(IDS).logits, stock)
    assert open_checkpoint(source).config["tie_word_embeddings"] is same
    report = compress(source, tmp_path / "packed", method=Rate(8.0))
    assert any("untied" in note for note in report.notes) is not same
    found = load(tmp_path / "packed", "float32", mode="exact")(IDS).logits
    assert (found - stock).norm() < 0.1 * stock.norm()

"""LoRA by peft on a model whose experts, and linear layers, are packed."""

from pathlib import Path
from typing import Any

import pytest
import torch

import moepack
from moepack.integrations.loading import open_tokenizer
from moepack.methods.finequant import FineQuant
from moepack.runtime.linear import PackedLinear

peft = pytest.importorskip("peft", reason="the extra `train` is not installed")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(scope="module", params=[None, 8], ids=["linear layers as they were", "linear layers packed"])
def model(request: Any, tmp_path_factory: Any) -> Any:
    """tiny-moe with experts in four bits and adapters in its attention."""
    from moepack.integrations.lora import accept_packed

    out = tmp_path_factory.mktemp("lora") / "packed"
    moepack.compress(EXAMPLES / "tiny-moe", out, method=FineQuant(bits=4, dense_bits=request.param))
    config = accept_packed(peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_alpha=8))
    adapted = peft.get_peft_model(moepack.load(out, torch.float32), config)
    packed = isinstance(adapted.base_model.model.model.layers[0].self_attn.q_proj.base_layer, PackedLinear)
    assert packed == (request.param is not None)
    return adapted


def test_the_loss_falls(model: Any) -> None:
    tokenizer = open_tokenizer(EXAMPLES / "tiny-moe")
    text = (EXAMPLES / "texts/white-fang.txt").read_text()[20_000:24_000]
    ids = torch.tensor(tokenizer(text)["input_ids"][:256]).view(2, 128)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    model.train()
    for _ in range(6):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in trained)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    with model.disable_adapter(), torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(losses[0], abs=2e-3)


def test_adapters_are_saved_and_packed_ones_never_merged(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    if isinstance(model.base_model.model.model.layers[0].self_attn.q_proj.base_layer, PackedLinear):
        with pytest.raises(RuntimeError, match="cannot be merged"):
            model.merge_and_unload()

"""`moepack export --adapter` writes what peft merges into the unpacked model."""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import moepack
import runtime_support as support
from adapter_support import expert_parameters, fresh, logits, randomized, twins
from moepack.census.tiny import tiny_model
from moepack.cli import app
from moepack.errors import LoadError, UnsupportedModelError
from moepack.export import export
from moepack.integrations.loading import open_model
from moepack.methods.finequant import FineQuant

peft = pytest.importorskip("peft", reason="the extra `train` is not installed")


OTHERS = ["gpt_oss", "nemotron_h"]
"""Architectures whose experts peft does not count as linear layers."""


def merged_state(architecture: str, adapter: Path, dense_bits: int | None) -> dict[str, torch.Tensor]:
    """The weights of the unpacked model with an adapter merged by peft."""
    stock = peft.PeftModel.from_pretrained(fresh(architecture, dense_bits)[1], adapter)
    found: dict[str, torch.Tensor] = stock.merge_and_unload().state_dict()
    return found


@pytest.mark.parametrize("dense_bits", [None, 8], ids=["linear layers as they were", "linear layers packed"])
@pytest.mark.parametrize("architecture", ["deepseek_v2", "gpt_oss", "mixtral", "nemotron_h", "qwen2_moe"])
def test_an_exported_adapter_equals_peft_s_merge(architecture: str, dense_bits: int | None, tmp_path: Path) -> None:
    """In every tensor: attention, routers, experts, biases, and directly trained parameters."""
    packed, stock = fresh(architecture, dense_bits)
    names = {"target_modules": "all-linear", "modules_to_save": ["lm_head"]}
    if architecture in OTHERS:
        names = {"target_modules": ["q_proj"], "target_parameters": expert_parameters(stock)}
    biases = "lora_only" if architecture == "qwen2_moe" else "none"
    if architecture == "qwen2_moe":  # whose experts "all-linear" leaves out in peft
        names["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    model = randomized(peft.get_peft_model(packed, peft.LoraConfig(r=4, use_rslora=True, bias=biases, **names)))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.requires_grad and "lora_" not in name:
                value.add_(0.5)
    model.save_pretrained(tmp_path / "adapter")
    export(twins(architecture, dense_bits)[2], tmp_path / "out", adapter=tmp_path / "adapter")
    kind = type(fresh(architecture, dense_bits)[1])
    found = kind.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    expected = merged_state(architecture, tmp_path / "adapter", dense_bits)
    before = fresh(architecture, dense_bits)[1].state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2**-7, atol=1e-5, msg=f"{name} differs")
    changed = {name.split(".")[-2] for name, value in found.items() if (value - before[name]).abs().max() > 0.03}
    assert {"experts", "q_proj"} <= changed
    assert "lm_head" in changed or architecture in OTHERS


def test_dora_is_merged_and_other_methods_are_refused(tmp_path: Path) -> None:
    directory, stock = twins("qwen3_moe")[2], fresh("qwen3_moe")[1]
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj"], use_dora=True, r=4)
    randomized(peft.get_peft_model(stock, config)).save_pretrained(tmp_path / "dora")
    export(directory, tmp_path / "out", adapter=tmp_path / "dora")
    files = (tmp_path / "out").glob("*.safetensors")
    found = {name: value for file in files for name, value in load_file(file).items()}
    for name, value in merged_state("qwen3_moe", tmp_path / "dora", 8).items():
        if "q_proj" in name or "o_proj" in name:
            torch.testing.assert_close(found[name].float(), value, rtol=2**-7, atol=1e-5)
    config = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    peft.get_peft_model(fresh("qwen3_moe")[1], config).save_pretrained(tmp_path / "ia3")
    with pytest.raises(UnsupportedModelError, match="only LoRA adapters"):
        export(directory, tmp_path / "ia3-out", adapter=tmp_path / "ia3")
    config = peft.LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights="pissa")
    peft.get_peft_model(fresh("qwen3_moe")[1], config).save_pretrained(tmp_path / "pissa")
    with pytest.raises(UnsupportedModelError, match="init_lora_weights='pissa' changed the weights"):
        export(directory, tmp_path / "pissa-out", adapter=tmp_path / "pissa")
    with pytest.raises(ValueError, match="bf16"):
        export(directory, tmp_path / "gguf", "gguf", adapter=tmp_path / "dora")
    with pytest.raises(LoadError, match="there is no adapter_config"):
        export(directory, tmp_path / "none", adapter=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"dora", "ia3", "out", "pissa"}


@pytest.mark.parametrize("change", ["other sizes", "a layer more", "a layer less"])
def test_an_adapter_of_another_model_is_not_merged(change: str, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    model = peft.get_peft_model(fresh("qwen3_moe")[1], peft.LoraConfig(target_modules=["q_proj", "k_proj"], r=4))
    model.save_pretrained(adapter)
    state = load_file(adapter / "adapter_model.safetensors")
    name = next(name for name in state if "layers.1" in name)
    if change == "other sizes":
        state[name] = torch.zeros(3, 5)
    elif change == "a layer more":
        state[name.replace("layers.1", "layers.7")] = state[name].clone()
    else:
        del state[name]
    save_file(state, adapter / "adapter_model.safetensors")
    with pytest.raises(LoadError, match=r"onto this model|another model"):
        export(twins("qwen3_moe")[2], tmp_path / "out", adapter=adapter)


def test_an_adapter_of_tied_weights_is_not_merged(tmp_path: Path) -> None:
    """It would change both, or write two tensors for one."""
    directory = tmp_path / "packed"
    model = tiny_model("mixtral")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    support.write_packed(model.float(), directory, FineQuant(bits=8))
    stock = moepack.load(directory, torch.float32).dequantize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapter = peft.get_peft_model(stock, peft.LoraConfig(target_modules=["embed_tokens"], r=4))
        adapter.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(UnsupportedModelError, match="tied"):
        export(directory, tmp_path / "out", adapter=tmp_path / "adapter")


def test_the_command_merges_an_adapter(tmp_path: Path) -> None:
    stock = randomized(peft.get_peft_model(fresh("qwen3_moe")[1], peft.LoraConfig(target_modules="all-linear", r=4)))
    stock.save_pretrained(tmp_path / "adapter")
    command = ["export", str(twins("qwen3_moe")[2]), str(tmp_path / "out"), "--adapter", str(tmp_path / "adapter")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    model = open_model(tmp_path / "out", torch.float32)
    torch.testing.assert_close(logits(model), logits(stock), rtol=0.05, atol=0.05)
    result = CliRunner().invoke(app, [*command[:2], str(tmp_path / "file"), "--to", "gguf", *command[3:]])
    assert result.exit_code != 0 and "bf16" in result.output

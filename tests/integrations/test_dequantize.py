"""`model.dequantize()`, copies and pickles of packed models."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import moepack
import runtime_support as support
from adapter_support import CLOSE, fresh, logits, pickled, randomized, tied, tokens, twins
from moepack.errors import LoadError, UnsupportedModelError
from moepack.methods.finequant import FineQuant

peft = pytest.importorskip("peft", reason="the extra `train` is not installed")


@pytest.mark.parametrize("architecture", [*support.ARCHITECTURES, "dbrx", "gpt_oss", "longcat_flash"])
def test_a_model_is_dequantized_in_its_place(architecture: str, tmp_path: Path) -> None:
    """The result is the ordinary model with its class's modules, names and `save_pretrained`."""
    packed, stock, _ = twins(architecture)
    model = copy.deepcopy(packed)
    assert model.dequantize() is model and model.state_dict().keys() == stock.state_dict().keys()
    assert not any(type(module).__module__.startswith("moepack.") for module in model.modules())
    assert not hasattr(model, "hf_quantizer") and not hasattr(model.config, "quantization_config")
    inputs = support.inputs(packed) if architecture in support.ARCHITECTURES else {"input_ids": tokens(packed)}
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = packed(**inputs).logits
        torch.testing.assert_close(model(**inputs).logits, expected, **CLOSE)
        torch.testing.assert_close(again(**inputs).logits, expected, **CLOSE)


def test_a_dequantized_model_takes_a_dtype_and_keeps_ties() -> None:
    packed = moepack.load(tied(), torch.float32, mode="exact")
    expected = logits(packed)
    plain = packed.dequantize(torch.bfloat16)
    assert {value.dtype for value in plain.parameters()} == {torch.bfloat16}
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    assert (logits(plain).float() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("architecture", ["qwen2_moe", "gpt_oss", "switch_transformers"])
def test_decoded_weights_are_trained_as_the_others(architecture: str) -> None:
    """A model that trains only its norms also learns, so every parameter is checked."""
    packed, _ = fresh(architecture)
    model = packed.dequantize()
    assert all(value.requires_grad for value in model.parameters())
    frozen = fresh(architecture)[0].requires_grad_(False).dequantize()
    assert not any(value.requires_grad for value in frozen.parameters())


def test_adapters_are_unloaded_before_a_model_is_dequantized() -> None:
    packed, _ = fresh("qwen3_moe")
    model = peft.get_peft_model(packed, peft.LoraConfig(target_modules=["q_proj"], r=4))
    with pytest.raises(UnsupportedModelError, match="unload"):
        packed.dequantize()
    torch.testing.assert_close(logits(model.unload().dequantize()), logits(fresh("qwen3_moe")[1]))


def test_a_model_on_two_kinds_of_devices_is_not_dequantized() -> None:
    packed, _ = fresh("qwen3_moe")
    packed.model.layers[1].mlp.experts.home = torch.device("cpu")
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.experts.*one device"):
        packed.dequantize()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_and_pickles_have_bytes_of_their_own(copied: Any, tmp_path: Path) -> None:
    """They do not need the packed directory, with or without adapters."""
    support.write_packed(support.tiny_model("qwen3_moe"), tmp_path / "packed", FineQuant(bits=8, dense_bits=8))
    packed = moepack.load(tmp_path / "packed", torch.float32)
    expected, again = logits(packed), copied(packed)
    model = randomized(peft.get_peft_model(packed, peft.LoraConfig(target_modules="all-linear", r=4)))
    adapted, adapted_again = logits(model), copied(model)
    for file in (tmp_path / "packed").iterdir():
        file.unlink()
    torch.testing.assert_close(logits(again), expected)
    torch.testing.assert_close(logits(adapted_again), adapted)
    assert not any(type(module).__module__.startswith("moepack.") for module in again.dequantize().modules())


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_of_streamed_models_map_their_files(copied: Any, tmp_path: Path) -> None:
    """A copy does not load bytes that are not in memory; the error names the missing file."""
    support.write_packed(support.tiny_model("qwen3_moe"), tmp_path / "packed", FineQuant(bits=8))
    model = moepack.load(tmp_path / "packed", torch.float32, mode="exact", host_memory="1GB")
    torch.testing.assert_close(logits(copied(model)), logits(model))
    (tmp_path / "packed").rename(tmp_path / "moved")
    with pytest.raises(LoadError, match="packed"):
        copied(model)

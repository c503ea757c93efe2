"""Architecture descriptions: each suffices to compress and load, including one defined here."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.mixtral import modeling_mixtral

import moepack
from moepack.checkpoint import Checkpoint, describe
from moepack.checkpoint.architectures import (
    ARCHITECTURES,
    STANDARD,
    Architecture,
    Layout,
    Linears,
    architecture,
    described,
    register,
)
from moepack.decoding.families import FAMILIES
from moepack.decoding.translation import Translation, is_known
from moepack.export import export
from moepack.methods.finequant import FineQuant
from moepack.modules.linear import PackedLinear
from runtime_support import SETTINGS, SWITCH, logits, tiny_model, write_packed

INT8 = FineQuant(bits=8, dense_bits=8)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the error of 8 bits; the median ignores tokens whose experts change by rounding."""
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.02


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_described_architecture_is_compressed_and_loaded(model_type: str, tmp_path: Path) -> None:
    if model_type not in SETTINGS:
        pytest.skip("this version of transformers has no experts module of it")
    model = tiny_model(model_type)
    loaded = moepack.load(write_packed(model, tmp_path / "packed", INT8), dtype="float32", mode="exact")
    assert_close(logits(loaded), logits(model))
    found = described(model_type)
    assert found.top_k(model.config.to_dict()) == (1 if model_type == SWITCH else 2)
    assert is_known(loaded.get_decoder()) == (model_type in FAMILIES)
    if model_type in FAMILIES:
        Translation(loaded.get_decoder())


def test_undescribed_models_are_read_by_the_standard_names() -> None:
    assert described("glm4_moe") is STANDARD and "standard" not in ARCHITECTURES
    assert STANDARD.top_k({"top_k": True, "moe_top_k": 6}) == 6


def test_a_model_type_has_one_description() -> None:
    register(ARCHITECTURES["mixtral"])
    with pytest.raises(ValueError, match="already registered"):
        register(Architecture("mixtral", layouts=(), dense={}))


# ---- a new architecture: a renamed Mixtral with other names of experts and attention


class ToyConfig(transformers.MixtralConfig):  # type: ignore[misc]
    model_type = "toy_moe"


class ToyForCausalLM(modeling_mixtral.MixtralForCausalLM):  # type: ignore[misc]
    config_class = ToyConfig


TOY = Architecture(
    "toy_moe",
    layouts=(
        Layout(
            {
                "ffn.{}.entrance": ("gate_proj",),
                "ffn.{}.factor": ("up_proj",),
                "ffn.{}.exit": ("down_proj",),
            }
        ),
    ),
    dense={"attention": Linears("self_attn", reads=("q_proj", "k_proj"), writes=("o_proj",))},
)


@pytest.fixture
def toy(tmp_path: Path) -> tuple[Any, Path]:
    """A tiny model and its checkpoint in the layout of `TOY`."""
    model = ToyForCausalLM(ToyConfig(**tiny_model("mixtral").config.to_diff_dict() | {"model_type": "toy_moe"}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5))
    directory = tmp_path / "toy"
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for block in (f"model.layers.{layer}.mlp" for layer in range(model.config.num_hidden_layers)):
        gate_up, down = (tensors.pop(f"{block}.experts.{name}") for name in ("gate_up_proj", "down_proj"))
        for expert, (joint, exit) in enumerate(zip(gate_up, down, strict=True)):
            gate, up = joint.chunk(2)
            found = {"entrance": gate, "factor": up, "exit": exit}
            tensors |= {f"{block}.ffn.{expert}.{name}": matrix.contiguous() for name, matrix in found.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return model.eval(), directory


@pytest.fixture
def registered() -> Any:
    """The toy architecture is registered in transformers, and in moepack during the test."""
    register(TOY)
    yield
    architecture._known.pop("toy_moe")


transformers.AutoConfig.register("toy_moe", ToyConfig)
transformers.AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM)


def test_without_a_description_the_toy_is_refused(toy: tuple[Any, Path]) -> None:
    with pytest.raises(moepack.CheckpointError, match="is missing from the checkpoint, although the model needs it"):
        describe(Checkpoint.open(toy[1]))


def test_stray_tensors_among_the_experts_of_a_new_architecture_are_found(
    toy: tuple[Any, Path], registered: None
) -> None:
    tensors = load_file(toy[1] / "model.safetensors")
    save_file({**tensors, "model.layers.1.mlp.ffn.0.bias": torch.ones(3)}, toy[1] / "model.safetensors")
    with pytest.raises(moepack.CheckpointError, match=r"ffn\.0\.bias': is stored with the experts"):
        describe(Checkpoint.open(toy[1]))


def test_a_description_is_all_that_a_new_architecture_needs(
    toy: tuple[Any, Path], registered: None, tmp_path: Path
) -> None:
    model, source = toy
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    moepack.compress(source, packed, method=INT8)
    assert moepack.verify(packed).ok
    loaded = moepack.load(packed, dtype="float32", mode="exact")
    linears = {name.rpartition(".")[2] for name, module in loaded.named_modules() if type(module) is PackedLinear}
    assert linears == {"q_proj", "k_proj", "o_proj"}
    assert_close(logits(loaded), logits(model))
    export(packed, plain)
    assert set(Checkpoint.open(plain).names()) == set(Checkpoint.open(source).names())

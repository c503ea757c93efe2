"""Adapters by peft on packed models: found, computed, trained, saved and loaded as on the unpacked ones."""

import copy
import functools
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import moepack
import runtime_support as support
from moepack.census.tiny import tiny_model
from moepack.errors import LoadError, UnsupportedModelError
from moepack.export import export
from moepack.integrations.loading import open_tokenizer
from moepack.methods.finequant import FineQuant
from moepack.runtime.linear import PackedLinear
from moepack.runtime.plan import Plan, Unknown

peft = pytest.importorskip("peft", reason="the extra `train` is not installed")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
DECODERS = [name for name in support.ARCHITECTURES if name != support.SWITCH]
OTHERS = {
    "gpt_oss": ["experts.gate_up_proj", "experts.down_proj"],
    "llama4_text": ["experts.gate_up_proj", "experts.down_proj"],
    "longcat_flash": ["experts.gate_up_proj", "experts.down_proj"],
    "nemotron_h": ["experts.up_proj", "experts.down_proj"],
    "qwen3_next": ["experts.gate_up_proj", "experts.down_proj"],
}
"""Architectures that hold experts in other ways, and the parameters that they are."""
CLOSE = {"rtol": 2e-3, "atol": 2e-4}
"""Products of packed weights and of decoded ones are summed in another order; the layers behind amplify it."""


@functools.cache
def twins(architecture: str, dense_bits: int | None = 8) -> tuple[Any, Any, Path]:
    """A packed model, the same model with decoded weights, and the packed directory. To be copied, not changed."""
    directory = Path(mkdtemp()) / "packed"
    model = support.tiny_model(architecture) if architecture in support.ARCHITECTURES else tiny_model(architecture)
    support.write_packed(model.float(), directory, FineQuant(bits=8, dense_bits=dense_bits))
    packed = moepack.load(directory, torch.float32, mode="exact")
    return packed, copy.deepcopy(packed).dequantize(), directory


def fresh(architecture: str, dense_bits: int | None = 8) -> tuple[Any, Any]:
    packed, stock, _ = twins(architecture, dense_bits)
    return copy.deepcopy(packed), copy.deepcopy(stock)


def adapted(model: Any) -> dict[str, torch.Size]:
    """What is trained, with shapes."""
    return {name: value.shape for name, value in model.named_parameters() if value.requires_grad}


def randomized(model: Any, seed: int = 7) -> Any:
    """The model with adapters that do something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in sorted(model.named_parameters()):
            if "lora_" in name:
                value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    return model


def tokens(model: Any) -> torch.Tensor:
    """Some, two sequences."""
    text = model.config.get_text_config()
    return torch.arange(24).mul(7).remainder(min(60, text.vocab_size - 4)).add(3).view(2, 12)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens(model)).logits
    return found


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of everything that is trained, by a loss of its own for each token; routers may be random in training."""
    model.eval()
    found = model(input_ids=tokens(model)).logits
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    (found * weights).mean().backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def assert_same(packed: Any, stock: Any) -> None:
    """Outputs and gradients are those of the same adapters on decoded weights."""
    torch.testing.assert_close(logits(packed), logits(stock), **CLOSE)
    found, expected = gradients(packed), gradients(stock)
    assert found.keys() == expected.keys() and found
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < 1e-2, (name, error)


@pytest.mark.parametrize("architecture", DECODERS)
def test_all_linear_is_what_peft_adapts_on_the_unpacked_model(architecture: str, tmp_path: Path) -> None:
    """An adapter that was made, and saved, on the unpacked model loads beside packed weights and computes the same."""
    packed, stock = fresh(architecture)
    # The router of PhiMoE is a linear layer that gives a tuple, which peft cannot run on the unpacked model either.
    exclude = ["router"] if architecture == "phimoe" else None
    config = peft.LoraConfig(target_modules="all-linear", exclude_modules=exclude, r=4)
    stock = randomized(peft.get_peft_model(stock, copy.deepcopy(config)))
    stock.save_pretrained(tmp_path)
    before = logits(packed)
    trained = peft.get_peft_model(copy.deepcopy(packed), config)
    assert adapted(trained) == adapted(stock)
    loaded = peft.PeftModel.from_pretrained(packed, tmp_path, is_trainable=True).eval()
    assert_same(loaded, stock)
    with loaded.eval().disable_adapter():
        torch.testing.assert_close(logits(loaded), before)


@pytest.mark.parametrize("architecture", OTHERS)
def test_experts_of_every_form_take_adapters(architecture: str) -> None:
    if architecture not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have it")
    packed, stock = fresh(architecture)
    config = peft.LoraConfig(target_modules=[], target_parameters=OTHERS[architecture], r=4)
    stock = randomized(peft.get_peft_model(stock, copy.deepcopy(config)))
    packed = randomized(peft.get_peft_model(packed, config))
    assert adapted(packed) == adapted(stock)
    assert_same(packed.eval(), stock.eval())


@pytest.mark.parametrize(
    "names",
    [["q_proj", "gate_proj", "up_proj", "down_proj"], ["q_proj", "experts"], r".*(q_proj|experts)", ["gate_up_proj"]],
    ids=["projections", "the module", "an expression", "a parameter"],
)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "granitemoe", "gpt_oss"])
def test_experts_are_named_as_modules_or_projections(architecture: str, names: Any) -> None:
    """Whether peft knows the architecture's names (Qwen3) or not, what is named is adapted and computed."""
    packed, stock = fresh(architecture)
    model = randomized(peft.get_peft_model(packed, peft.LoraConfig(target_modules=names, r=4)))
    there = {name.split(".lora_")[0].replace(".base_layer", "").rpartition(".")[2] for name in adapted(model)}
    assert there == ({"experts"} if names == ["gate_up_proj"] else {"q_proj", "experts"})
    assert len([name for name in adapted(model) if "experts" in name]) == (4 if names == ["gate_up_proj"] else 8)
    config = copy.copy(model.peft_config["default"])
    config._custom_modules = None
    assert_same(model.eval(), randomized(peft.get_peft_model(stock, config)).eval())


@pytest.mark.parametrize("asked", [{"target_modules": ["experts"]}, {"target_modules": ["v_proj"]}], ids=str)
def test_no_plan_of_the_core_outlives_adapters(asked: dict[str, Any]) -> None:
    packed, _ = fresh("qwen3_moe")
    decoder = packed.model
    plan = Plan(decoder)
    model = peft.get_peft_model(packed, peft.LoraConfig(r=4, **asked))
    assert not plan.holds()
    with pytest.raises(Unknown):
        Plan(decoder)
    model.unload()
    assert Plan(decoder).holds()


def test_generated_tokens_follow_the_adapter() -> None:
    packed, stock = fresh("qwen3_moe")
    ids = tokens(packed)[:1]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "output_scores": True}
    options |= {"return_dict_in_generate": True, "pad_token_id": 0}
    plain = packed.generate(ids, **options)
    config = peft.LoraConfig(target_modules="all-linear", r=4)
    stock = randomized(peft.get_peft_model(stock, copy.deepcopy(config)))
    model = randomized(peft.get_peft_model(packed, config))
    found, expected = model.generate(input_ids=ids, **options), stock.generate(input_ids=ids, **options)
    torch.testing.assert_close(torch.stack(found.scores), torch.stack(expected.scores), **CLOSE)
    with model.disable_adapter():
        again = model.generate(input_ids=ids, **options)
    torch.testing.assert_close(torch.stack(again.scores), torch.stack(plain.scores), **CLOSE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Path:
    """An adapter of everything, saved from a packed model."""
    packed, _ = fresh("qwen3_moe")
    directory: Path = tmp_path_factory.mktemp("adapter")
    config = peft.LoraConfig(target_modules="all-linear", r=4, use_rslora=True, task_type="CAUSAL_LM")
    model = randomized(peft.get_peft_model(packed, config))
    model.peft_config["default"].base_model_name_or_path = str(twins("qwen3_moe")[2])
    model.save_pretrained(directory)
    return directory


def expected_logits(saved: Path) -> torch.Tensor:
    """What the unpacked model gives with the saved adapter, and which its own weights do not."""
    _, stock = fresh("qwen3_moe")
    before = logits(stock)
    found = logits(peft.PeftModel.from_pretrained(stock, saved))
    assert (found - before).abs().max() > 0.1
    return found


@pytest.mark.parametrize("door", ["PeftModel", "AutoPeftModel", "load_adapter", "inject", "add_adapter", "second"])
def test_a_saved_adapter_loads_by_every_door(saved: Path, door: str) -> None:
    packed, _ = fresh("qwen3_moe")
    if door == "PeftModel":
        packed = peft.PeftModel.from_pretrained(packed, saved)
    elif door == "AutoPeftModel":
        packed = peft.AutoPeftModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        moepack.set_compute_mode("exact", packed)
    elif door == "load_adapter":
        packed.load_adapter(str(saved))
    elif door == "inject":
        config = peft.PeftConfig.from_pretrained(saved)
        packed = peft.inject_adapter_in_model(config, packed)
        peft.set_peft_model_state_dict(packed, load_file(saved / "adapter_model.safetensors"))
    elif door == "add_adapter":
        try:
            packed.add_adapter(peft.PeftConfig.from_pretrained(saved))
        except ValueError as error:
            pytest.skip(f"this transformers wants a newer peft: {error}")
        peft.set_peft_model_state_dict(packed, load_file(saved / "adapter_model.safetensors"))
    else:
        packed = peft.get_peft_model(packed, peft.LoraConfig(target_modules="all-linear", r=2))
        packed.load_adapter(saved, "other")
        packed.set_adapter("other")
    torch.testing.assert_close(logits(packed.eval()), expected_logits(saved), **CLOSE)


def merged_state(architecture: str, adapter: Path, dense_bits: int | None) -> dict[str, torch.Tensor]:
    """The weights of the unpacked model with an adapter merged by peft."""
    stock = peft.PeftModel.from_pretrained(fresh(architecture, dense_bits)[1], adapter)
    found: dict[str, torch.Tensor] = stock.merge_and_unload().state_dict()
    return found


@pytest.mark.parametrize("dense_bits", [None, 8], ids=["linear layers as they were", "linear layers packed"])
@pytest.mark.parametrize("architecture", ["deepseek_v2", "gpt_oss", "mixtral", "nemotron_h", "qwen2_moe"])
def test_an_exported_adapter_is_what_peft_merges(architecture: str, dense_bits: int | None, tmp_path: Path) -> None:
    """In every tensor: attention, routers, experts, biases, and what was trained itself."""
    packed, _ = fresh(architecture, dense_bits)
    names = {"target_modules": "all-linear", "modules_to_save": ["lm_head"]}
    if architecture in OTHERS:
        names = {"target_modules": ["q_proj"], "target_parameters": OTHERS[architecture]}
    biases = "lora_only" if architecture == "qwen2_moe" else "none"
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
        torch.testing.assert_close(found[name], value, rtol=2**-7, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    changed = {name.rpartition(".")[0].rpartition(".")[2] for name in expected if not found[name].equal(before[name])}
    assert {"experts", "q_proj"} <= changed | {"experts"} & changed


def test_dora_is_merged_and_other_methods_are_refused(tmp_path: Path) -> None:
    directory, stock = twins("qwen3_moe")[2], fresh("qwen3_moe")[1]
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj"], use_dora=True, r=4)
    randomized(peft.get_peft_model(stock, config)).save_pretrained(tmp_path / "dora")
    export(directory, tmp_path / "out", adapter=tmp_path / "dora")
    found = load_file(next((tmp_path / "out").glob("*.safetensors")))
    tensors = {name: value for file in (tmp_path / "out").glob("*.safetensors") for name, value in load_file(file).items()}
    assert found.keys() <= tensors.keys()
    for name, value in merged_state("qwen3_moe", tmp_path / "dora", 8).items():
        if "q_proj" in name or "o_proj" in name:
            torch.testing.assert_close(tensors[name].float(), value, rtol=2**-7, atol=1e-5)
    config = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    peft.get_peft_model(fresh("qwen3_moe")[1], config).save_pretrained(tmp_path / "ia3")
    with pytest.raises(UnsupportedModelError, match="LoRA can be merged"):
        export(directory, tmp_path / "ia3-out", adapter=tmp_path / "ia3")
    with pytest.raises(ValueError, match="bf16"):
        export(directory, tmp_path / "gguf", "gguf", adapter=tmp_path / "dora")
    with pytest.raises(LoadError, match="cannot read the adapter"):
        export(directory, tmp_path / "none", adapter=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"dora", "ia3", "out"}


def test_an_adapter_of_another_model_is_not_merged(tmp_path: Path) -> None:
    model = peft.get_peft_model(fresh("mixtral")[1], peft.LoraConfig(target_modules=["q_proj"], r=4))
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(LoadError, match="beside this model"):
        export(twins("deepseek_v2")[2], tmp_path / "out", adapter=tmp_path / "adapter")

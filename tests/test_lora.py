"""Adapters by peft on packed models: found, computed, trained, saved and loaded as on the unpacked ones."""

import copy
import functools
import pickle
import warnings
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import moepack
import runtime_support as support
from moepack.census.tiny import tiny_model
from moepack.cli import app
from moepack.errors import LoadError, UnsupportedModelError
from moepack.export import export
from moepack.integrations.loading import open_tokenizer
from moepack.methods.finequant import FineQuant
from moepack.methods.floe import Floe
from moepack.methods.rate import Rate
from moepack.runtime.linear import PackedLinear
from moepack.runtime.plan import Guard, Plan, Unknown

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


def test_no_recorded_step_outlives_a_switch_of_adapters() -> None:
    """Recordings have the choice of adapters and their scales built in, so what guards them must see both."""
    model = peft.get_peft_model(fresh("qwen3_moe")[0], peft.LoraConfig(target_modules="all-linear", r=4))
    model.add_adapter("other", peft.LoraConfig(target_modules="all-linear", r=4))
    decoder = model.get_base_model().model
    guard = Guard.of(decoder)
    assert guard.holds()
    with model.disable_adapter():
        assert not guard.holds()
    assert guard.holds()
    model.set_adapter("other")
    assert not guard.holds()
    model.set_adapter("default")
    assert guard.holds()
    decoder.layers[1].mlp.experts.set_scale("default", 3.0)
    assert not guard.holds()


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


DOORS = ["PeftModel", "AutoPeftModel", "AutoModel", "load_adapter", "inject", "add_adapter", "second"]


@pytest.mark.parametrize("door", DOORS)
def test_a_saved_adapter_loads_by_every_door(saved: Path, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = fresh("qwen3_moe")
    if door == "PeftModel":
        packed = peft.PeftModel.from_pretrained(packed, saved)
    elif door == "AutoPeftModel":
        packed = peft.AutoPeftModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        moepack.set_compute_mode("exact", packed)
    elif door == "AutoModel":
        packed = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        moepack.set_compute_mode("exact", packed)
    elif door == "load_adapter":
        packed.load_adapter(str(saved))
    elif door == "inject":
        config = peft.PeftConfig.from_pretrained(saved)
        packed = peft.inject_adapter_in_model(config, packed)
        peft.set_peft_model_state_dict(packed, load_file(saved / "adapter_model.safetensors"))
    elif door == "add_adapter":
        # Some versions of transformers ask for a peft that is not released yet before they add an adapter.
        monkeypatch.setattr(transformers.integrations.peft, "check_peft_version", lambda **_: None)
        packed.add_adapter(peft.PeftConfig.from_pretrained(saved))
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
    with pytest.raises(UnsupportedModelError, match="LoRA can be merged"):
        export(directory, tmp_path / "ia3-out", adapter=tmp_path / "ia3")
    with pytest.raises(ValueError, match="bf16"):
        export(directory, tmp_path / "gguf", "gguf", adapter=tmp_path / "dora")
    with pytest.raises(LoadError, match="cannot read the adapter"):
        export(directory, tmp_path / "none", adapter=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"dora", "ia3", "out"}


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
    with pytest.raises(LoadError, match=r"beside this model|another model's"):
        export(twins("qwen3_moe")[2], tmp_path / "out", adapter=adapter)


def test_an_adapter_of_tied_weights_is_not_merged(tmp_path: Path) -> None:
    """It would change both of them, or write two where the model has one."""
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


METHODS = sorted(
    (name, kind)
    for name, kind in ((str(name.value), kind) for name, kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items())
    if "target_modules" in kind.__dataclass_fields__ and name not in ("LORA", "XLORA", "ADAPTION_PROMPT")
)


@pytest.mark.parametrize("name, kind", METHODS, ids=[name for name, _ in METHODS])
def test_other_methods_are_refused_by_name(name: str, kind: Any) -> None:
    """All that peft brings, before anything in the model has changed."""
    packed, _ = fresh("qwen3_moe")
    modules = {name: module for name, module in packed.named_modules() if name}
    needed = {"total_step": 10, "feedforward_modules": []}
    settings = {key: value for key, value in needed.items() if key in kind.__dataclass_fields__}
    with pytest.raises(UnsupportedModelError, match=rf"q_proj' is packed, and .* none of {name}"):
        peft.get_peft_model(packed, kind(target_modules=["q_proj", "v_proj"], **settings))
    assert all(packed.get_submodule(path) is module for path, module in modules.items())


SETTINGS = {
    "KaSA": ({"kasa_config": peft.KasaConfig() if hasattr(peft, "KasaConfig") else True}, "KaSA"),
    "a start from the weights": ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    "a whole layer": ({"modules_to_save": ["self_attn"]}, r"self_attn' is packed.*modules_to_save"),
    "layers repeated": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    "a projection as a parameter": ({"target_parameters": ["experts.gate_proj"]}, "no gate_proj"),
}


@pytest.mark.parametrize("settings, sentence", SETTINGS.values(), ids=SETTINGS)
def test_settings_that_need_weights_are_refused_by_name(settings: dict[str, Any], sentence: str) -> None:
    packed, _ = fresh("qwen3_moe")
    names = {name for name, _ in packed.named_modules()}
    with pytest.raises(UnsupportedModelError, match=sentence):
        peft.get_peft_model(packed, peft.LoraConfig(target_modules=["q_proj"], r=4, **settings))
    assert names == {name for name, _ in packed.named_modules()}


WORKING = {
    "rank-stabilized": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "other starts": {"init_lora_weights": "gaussian"},
    "ranks by name": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "one layer": {"layers_to_transform": [1]},
    "biases of adapters": {"lora_bias": True},
    "biases of layers": {"bias": "lora_only"},
    "a head of its own": {"modules_to_save": ["lm_head"]},
    "tokens of the embedding": {"trainable_token_indices": [3, 5]},
    "activated by tokens": {"alora_invocation_tokens": [10, 17]},
}


@pytest.mark.parametrize("settings", WORKING.values(), ids=WORKING)
def test_settings_of_lora_do_as_on_the_unpacked_model(settings: dict[str, Any], tmp_path: Path) -> None:
    packed, stock = fresh("qwen2_moe")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, **settings)
    stock = randomized(peft.get_peft_model(stock, copy.deepcopy(config)))
    packed = randomized(peft.get_peft_model(packed, copy.deepcopy(config)))
    assert adapted(packed) == adapted(stock)
    assert_same(packed.eval(), stock.eval())
    packed.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(fresh("qwen2_moe")[0], tmp_path)
    torch.testing.assert_close(logits(again), logits(packed.eval()))


def test_several_adapters_switch_add_up_and_go() -> None:
    packed, stock = fresh("qwen3_moe")
    found = []
    for model in (packed, stock):
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=4))
        adapted.add_adapter("other", peft.LoraConfig(target_modules="all-linear", r=2))
        randomized(adapted)
        seen = [logits(adapted.eval())]
        adapted.base_model.set_adapter(["default", "other"])
        seen.append(logits(adapted))
        adapted.set_adapter("other")
        seen.append(logits(adapted))
        adapted.delete_adapter("default")
        seen.append(logits(adapted))
        found.append(torch.stack([*seen, logits(adapted.unload())]))
    torch.testing.assert_close(*found, **CLOSE)
    assert (found[0][0] - found[0][1]).abs().max() > 0.1 < (found[0][1] - found[0][2]).abs().max()


def test_adapters_that_are_mixed_in_a_batch_or_weighed() -> None:
    packed, stock = fresh("qwen3_moe")
    found = []
    for model in (packed, stock):
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4)
        adapted = peft.get_peft_model(model, copy.deepcopy(config))
        adapted.add_adapter("other", config)
        randomized(adapted).eval()
        with torch.no_grad():
            seen = [adapted(input_ids=tokens(model), adapter_names=["other", "__base__"]).logits]
        for combination in ("linear", "svd", "cat"):
            adapted.add_weighted_adapter(["default", "other"], [0.5, 0.7], combination, combination_type=combination)
            adapted.set_adapter(combination)
            seen.append(logits(adapted))
        found.append(torch.stack(seen))
    torch.testing.assert_close(*found, **CLOSE)


def test_training_as_of_quantized_models_with_layers_computed_again() -> None:
    found = []
    for model in fresh("qwen3_moe"):
        model.gradient_checkpointing_enable()
        model = peft.prepare_model_for_kbit_training(model)
        found.append(
            gradients(randomized(peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=4))))
        )
    assert found[0].keys() == found[1].keys() and found[0]
    for name, gradient in found[1].items():
        assert (found[0][name] - gradient).norm() <= 1e-2 * gradient.norm(), name


def test_nothing_is_merged_and_nothing_half_merged() -> None:
    """Layers that are not packed stay adapted, too, where one that is packed refuses."""
    packed, _ = fresh("qwen3_moe", None)
    model = randomized(peft.get_peft_model(packed, peft.LoraConfig(target_modules="all-linear", r=4)))
    before, modules = logits(model), [name for name, _ in model.named_modules()]
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(RuntimeError, match=r"cannot be merged into packed weights.*--adapter"):
            merge()
    assert modules == [name for name, _ in model.named_modules()]
    torch.testing.assert_close(logits(model), before)


def test_where_nothing_packed_is_adapted_peft_merges() -> None:
    packed, stock = fresh("qwen3_moe", None)
    found = []
    for model in (packed, stock):
        adapted = randomized(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=4)))
        found.append(logits(adapted.merge_and_unload()))
    torch.testing.assert_close(*found, **CLOSE)


@pytest.mark.parametrize("architecture", ["dbrx", support.SWITCH])
def test_experts_that_take_no_adapters_say_so(architecture: str) -> None:
    packed, _ = fresh(architecture)
    named = ["wi", "wo"] if architecture == support.SWITCH else ["Wqkv", "experts"]
    with pytest.raises(UnsupportedModelError, match=r"experts' is a layer of packed experts that takes no adapters"):
        peft.get_peft_model(packed, peft.LoraConfig(target_modules=named, r=4))
    if architecture == support.SWITCH:
        with pytest.raises(UnsupportedModelError, match="packed experts"):
            peft.get_peft_model(packed, peft.LoraConfig(target_modules="all-linear", r=4))
    config = peft.LoraConfig(target_modules="all-linear", exclude_modules=r".*\.experts(\..*)?", r=4)
    assert not any("experts" in name for name in adapted(peft.get_peft_model(packed, config)))


def test_a_model_is_dequantized_in_its_place(tmp_path: Path) -> None:
    """Into the ordinary model: its class's own modules, names, ties and `save_pretrained`."""
    for architecture in (*support.ARCHITECTURES, "gpt_oss", "dbrx", "longcat_flash"):
        packed, stock, _ = twins(architecture)
        model = copy.deepcopy(packed)
        assert model.dequantize() is model and model.state_dict().keys() == stock.state_dict().keys()
        assert not any(type(module).__module__.startswith("moepack.") for module in model.modules())
        assert not hasattr(model, "hf_quantizer") and not hasattr(model.config, "quantization_config")
        inputs = support.inputs(packed) if architecture in support.ARCHITECTURES else {"input_ids": tokens(packed)}
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits, packed(**inputs).logits, **CLOSE)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits(again), logits(model))


@pytest.fixture(scope="module")
def tied(tiny_checkpoint: Any, tmp_path_factory: Any) -> Path:
    """Mixtral with everything packed; its head multiplies by the embedding's bytes."""
    directory: Path = tmp_path_factory.mktemp("tied") / "packed"
    moepack.compress(tiny_checkpoint("mixtral"), directory, method=Rate(5.0))
    return directory


def test_a_dequantized_model_takes_a_dtype_and_keeps_ties(tied: Path) -> None:
    packed = moepack.load(tied, torch.float32, mode="exact")
    expected = logits(packed)
    plain = packed.dequantize(torch.bfloat16)
    assert {value.dtype for value in plain.parameters()} == {torch.bfloat16}
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    assert (logits(plain).float() - expected).norm() < 0.05 * expected.norm()


def test_adapters_that_transformers_added_are_saved_alone(saved: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """`save_pretrained` writes them as of any model, and not the packed directory without them."""
    monkeypatch.setattr(transformers.integrations.peft, "check_peft_version", lambda **_: None)
    packed, _ = fresh("qwen3_moe")
    packed.load_adapter(str(saved))
    for number, model in enumerate((packed, copy.deepcopy(packed), pickled(packed))):
        model.save_pretrained(tmp_path / str(number))
        assert not (tmp_path / str(number) / "moepack.json").exists()
        again = peft.PeftModel.from_pretrained(fresh("qwen3_moe")[0], tmp_path / str(number))
        torch.testing.assert_close(logits(again), expected_logits(saved), **CLOSE)


def test_adapters_are_unloaded_before_a_model_is_dequantized() -> None:
    packed, _ = fresh("qwen3_moe")
    model = peft.get_peft_model(packed, peft.LoraConfig(target_modules=["q_proj"], r=4))
    with pytest.raises(UnsupportedModelError, match="unload"):
        packed.dequantize()
    torch.testing.assert_close(logits(model.unload().dequantize()), logits(fresh("qwen3_moe")[1]))


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_and_pickles_have_bytes_of_their_own(copied: Any, tmp_path: Path) -> None:
    """They do without the directory that the model was loaded from, with adapters and without."""
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
    """Bytes that are not in memory are not brought there by a copy, which names the file that is gone."""
    support.write_packed(support.tiny_model("qwen3_moe"), tmp_path / "packed", FineQuant(bits=8))
    model = moepack.load(tmp_path / "packed", torch.float32, mode="exact", host_memory="1GB")
    torch.testing.assert_close(logits(copied(model)), logits(model))
    (tmp_path / "packed").rename(tmp_path / "moved")
    with pytest.raises(LoadError, match="packed"):
        copied(model)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
def test_virtual_tokens_stand_beside_a_packed_embedding(kind: str, tied: Path) -> None:
    packed = moepack.load(tied, torch.float32, mode="exact")
    before = logits(packed)
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(packed, config)
    found = logits(model)[:, -before.shape[1] :]
    assert found.shape == before.shape and not torch.allclose(found, before)
    assert gradients(model)


def test_packed_embeddings_and_tied_heads_are_left_to_their_weights(tied: Path) -> None:
    found = adapted(peft.get_peft_model(moepack.load(tied), peft.LoraConfig(target_modules="all-linear", r=4)))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in found} >= {"q_proj", "experts"}
    assert not any("lm_head" in name or "embed" in name for name in found)
    for settings in (
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3]},
    ):
        with pytest.raises(UnsupportedModelError, match="packed"):
            peft.get_peft_model(moepack.load(tied), peft.LoraConfig(r=4, **settings))


ORDERS = {
    "moepack first": "import sys, moepack, transformers; moepack.load; assert 'peft' not in sys.modules; import peft",
    "peft first": "import peft.tuners.vera, transformers, moepack",
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_any_order_of_imports_registers(order: str) -> None:
    result = support.python(
        f"""
        {order}
        from peft import LoraConfig, get_peft_model
        model = transformers.AutoModelForCausalLM.from_pretrained({str(twins("qwen3_moe")[2])!r})
        model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
        names = [name for name, value in model.named_parameters() if value.requires_grad]
        found = {{name.split(".lora_")[0].replace(".base_layer", "").rpartition(".")[2] for name in names}}
        assert found == {{"q_proj", "k_proj", "v_proj", "o_proj", "gate", "experts"}}, found
        """
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("options", [{"resident": True}, {"host_memory": "1GB"}], ids=str)
def test_adapters_stand_beside_bytes_wherever_they_are(options: dict[str, Any], saved: Path) -> None:
    packed = moepack.load(twins("qwen3_moe")[2], torch.float32, mode="exact", **options)
    model = peft.PeftModel.from_pretrained(packed, saved)
    torch.testing.assert_close(logits(model), expected_logits(saved), **CLOSE)


def test_experts_by_channels_take_no_adapters(tiny_checkpoint: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((EXAMPLES / "texts/white-fang.txt").read_text()[:4000])
    method = Floe(calibration=str(text), samples=2, sequence_length=32)
    moepack.compress(tiny_checkpoint("qwen3_moe"), tmp_path / "packed", method=method)
    with pytest.raises(UnsupportedModelError, match=r"experts' is a layer of packed experts .*SparseExperts"):
        peft.get_peft_model(moepack.load(tmp_path / "packed"), peft.LoraConfig(target_modules="all-linear", r=4))
    config = peft.LoraConfig(target_modules=["q_proj"], r=4)
    assert adapted(peft.get_peft_model(moepack.load(tmp_path / "packed"), config))


def test_the_command_merges_an_adapter(saved: Path, tmp_path: Path) -> None:
    command = ["export", str(twins("qwen3_moe")[2]), str(tmp_path / "out"), "--adapter", str(saved)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    model = moepack.integrations.loading.open_model(tmp_path / "out", torch.float32)
    torch.testing.assert_close(logits(model), expected_logits(saved), rtol=0.05, atol=0.05)
    result = CliRunner().invoke(app, [*command[:2], str(tmp_path / "file"), "--to", "gguf", *command[3:]])
    assert result.exit_code != 0 and "bf16" in result.output


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

"""LoRA adapters on packed models are found, computed and trained as on the unpacked models."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import moepack
import runtime_support as support
from adapter_support import CLOSE, adapted, assert_same, expert_parameters, fresh, gradients, logits, randomized, tokens
from moepack.decoding.translation import Guard, Translation, Unknown
from moepack.errors import UnsupportedModelError
from moepack.integrations.loading import open_tokenizer
from moepack.methods.finequant import FineQuant
from moepack.modules.linear import PackedLinear
from places import NOVEL, TINY_MOE

peft = pytest.importorskip("peft", reason="the extra `train` is not installed")


DECODERS = [name for name in support.ARCHITECTURES if name != support.SWITCH]


OTHERS = [
    "deepseek_v4",
    "ernie4_5_vl_moe",
    "gpt_oss",
    "granitemoehybrid",
    "jetmoe",
    "llama4_text",
    "longcat_flash",
    "nemotron_h",
    "qwen3_next",
    "qwen3_vl_moe",
    "step3p7",
]
"""Architectures with other layouts of experts: transposed, interleaved, without a gate, with clamps and norms."""


@pytest.mark.parametrize("architecture", DECODERS)
def test_all_linear_selects_the_same_layers_as_on_the_unpacked_model(architecture: str, tmp_path: Path) -> None:
    """An adapter created and saved on the unpacked model loads on packed weights and computes the same."""
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
    packed, stock = fresh(architecture)
    config = peft.LoraConfig(target_modules=[], target_parameters=expert_parameters(stock), r=4)
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
    """Named modules are adapted and computed, whether or not peft knows the architecture's names (Qwen3)."""
    packed, stock = fresh(architecture)
    model = randomized(peft.get_peft_model(packed, peft.LoraConfig(target_modules=names, r=4)))
    there = {name.split(".lora_")[0].replace(".base_layer", "").rpartition(".")[2] for name in adapted(model)}
    assert there == ({"experts"} if names == ["gate_up_proj"] else {"q_proj", "experts"})
    assert len([name for name in adapted(model) if "experts" in name]) == (4 if names == ["gate_up_proj"] else 8)
    config = copy.copy(model.peft_config["default"])
    config._custom_modules = None
    assert_same(model.eval(), randomized(peft.get_peft_model(stock, config)).eval())


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_a_projection_that_shares_its_parameter_is_not_adapted_alone(architecture: str) -> None:
    packed, _ = fresh(architecture)
    with pytest.raises(UnsupportedModelError, match=r"packed.*up_proj.*gate_up_proj"):
        peft.get_peft_model(packed, peft.LoraConfig(target_modules=["q_proj", "gate_proj"], r=4))


@pytest.mark.parametrize("asked", [{"target_modules": ["experts"]}, {"target_modules": ["v_proj"]}], ids=str)
def test_no_plan_of_the_core_outlives_adapters(asked: dict[str, Any]) -> None:
    packed, _ = fresh("qwen3_moe")
    decoder = packed.model
    translation = Translation(decoder)
    model = peft.get_peft_model(packed, peft.LoraConfig(r=4, **asked))
    assert not translation.holds()
    with pytest.raises(Unknown):
        Translation(decoder)
    model.unload()
    assert Translation(decoder).holds()


def test_no_recorded_step_outlives_a_switch_of_adapters() -> None:
    """Recordings contain the choice of adapters and their scales, so their guards must check both."""
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


SETTINGS = {
    "KaSA": ({"kasa_config": peft.KasaConfig() if hasattr(peft, "KasaConfig") else True}, "KaSA"),
    "a start from the weights": ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    "a whole layer": ({"modules_to_save": ["self_attn"]}, r"self_attn' is packed.*modules_to_save"),
    "a start of experts from the weights": (
        {"init_lora_weights": "olora", "target_parameters": ["experts.down_proj"], "target_modules": []},
        "experts' is packed, and init_lora_weights='olora'",
    ),
    "dropout of experts": (
        {"lora_dropout": 0.1, "target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
        r"experts' holds its experts in parameters.* no lora_dropout; set lora_dropout=0\.0",
    ),
    "DoRA of experts": ({"use_dora": True, "target_modules": ["q_proj", "experts"]}, "no use_dora"),
    "biases of adapters of experts": ({"lora_bias": True, "target_parameters": ["experts.down_proj"]}, "no lora_bias"),
    "layers repeated": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    "a projection as a parameter": ({"target_parameters": ["experts.gate_proj"]}, "no gate_proj"),
}


@pytest.mark.parametrize("settings, sentence", SETTINGS.values(), ids=SETTINGS)
def test_settings_that_need_weights_are_refused_by_name(settings: dict[str, Any], sentence: str) -> None:
    packed, _ = fresh("qwen3_moe")
    names = {name for name, _ in packed.named_modules()}
    with pytest.raises(UnsupportedModelError, match=sentence):
        peft.get_peft_model(packed, peft.LoraConfig(**{"target_modules": ["q_proj"], "r": 4, **settings}))
    assert names == {name for name, _ in packed.named_modules()}


WORKING = {
    "rank-stabilized": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "other starts": {"init_lora_weights": "gaussian"},
    "ranks by name": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "one layer": {"layers_to_transform": [1]},
    "biases of adapters": {"lora_bias": True},
    "biases of layers": {"bias": "lora_only"},
    "dropout of all linear layers": {"lora_dropout": 0.1, "target_modules": "all-linear"},
    "a head of its own": {"modules_to_save": ["lm_head"]},
    "tokens of the embedding": {"trainable_token_indices": [3, 5]},
    "activated by tokens": {"alora_invocation_tokens": [10, 17]},
}


@pytest.mark.parametrize("settings", WORKING.values(), ids=WORKING)
def test_settings_of_lora_do_as_on_the_unpacked_model(settings: dict[str, Any], tmp_path: Path) -> None:
    packed, stock = fresh("qwen2_moe")
    config = peft.LoraConfig(**{"target_modules": ["q_proj", "v_proj"], "r": 4, **settings})
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


def test_a_rejected_merge_changes_no_module() -> None:
    """Unpacked layers keep their adapters if a packed layer rejects one."""
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


@pytest.fixture(scope="module", params=[None, 8], ids=["linear layers as they were", "linear layers packed"])
def model(request: Any, tmp_path_factory: Any) -> Any:
    """tiny-moe with experts in four bits and adapters in its attention."""
    from moepack.integrations.lora import accept_packed

    out = tmp_path_factory.mktemp("lora") / "packed"
    moepack.compress(TINY_MOE, out, method=FineQuant(bits=4, dense_bits=request.param))
    config = accept_packed(peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_alpha=8))
    adapted = peft.get_peft_model(moepack.load(out, torch.float32), config)
    packed = isinstance(adapted.base_model.model.model.layers[0].self_attn.q_proj.base_layer, PackedLinear)
    assert packed == (request.param is not None)
    return adapted


def test_the_loss_falls(model: Any) -> None:
    tokenizer = open_tokenizer(TINY_MOE)
    text = NOVEL.read_text()[20_000:24_000]
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

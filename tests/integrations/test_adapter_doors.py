"""peft adapters on packed models: every entry point of peft and transformers, every method of peft, and rejections."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import moepack
import runtime_support as support
from adapter_support import CLOSE, adapted, fresh, gradients, logits, pickled, randomized, tied, twins
from moepack.errors import UnsupportedModelError
from moepack.methods.floe import Floe
from places import NOVEL

peft = pytest.importorskip("peft", reason="the extra `train` is not installed")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Path:
    """An adapter of all targets, saved from a packed model."""
    packed, _ = fresh("qwen3_moe")
    directory: Path = tmp_path_factory.mktemp("adapter")
    config = peft.LoraConfig(target_modules="all-linear", r=4, use_rslora=True, task_type="CAUSAL_LM")
    model = randomized(peft.get_peft_model(packed, config))
    model.peft_config["default"].base_model_name_or_path = str(twins("qwen3_moe")[2])
    model.save_pretrained(directory)
    return directory


def expected_logits(saved: Path) -> torch.Tensor:
    """The outputs of the unpacked model with the saved adapter; they differ from those without."""
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
        # Some versions of transformers require an unreleased peft before they add an adapter.
        monkeypatch.setattr(transformers.integrations.peft, "check_peft_version", lambda **_: None)
        packed.add_adapter(peft.PeftConfig.from_pretrained(saved))
        peft.set_peft_model_state_dict(packed, load_file(saved / "adapter_model.safetensors"))
    else:
        packed = peft.get_peft_model(packed, peft.LoraConfig(target_modules="all-linear", r=2))
        packed.load_adapter(saved, "other")
        packed.set_adapter("other")
    torch.testing.assert_close(logits(packed.eval()), expected_logits(saved), **CLOSE)


def test_adapters_that_transformers_added_are_saved_alone(saved: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """`save_pretrained` writes adapters as for any model, not the packed directory without them."""
    monkeypatch.setattr(transformers.integrations.peft, "check_peft_version", lambda **_: None)
    packed, _ = fresh("qwen3_moe")
    packed.load_adapter(str(saved))
    for number, model in enumerate((packed, copy.deepcopy(packed), pickled(packed))):
        model.save_pretrained(tmp_path / str(number))
        assert not (tmp_path / str(number) / "moepack.json").exists()
        again = peft.PeftModel.from_pretrained(fresh("qwen3_moe")[0], tmp_path / str(number))
        torch.testing.assert_close(logits(again), expected_logits(saved), **CLOSE)


@pytest.mark.parametrize("options", [{"resident": True}, {"host_memory": "1GB"}], ids=str)
def test_adapters_stand_beside_bytes_wherever_they_are(options: dict[str, Any], saved: Path) -> None:
    packed = moepack.load(twins("qwen3_moe")[2], torch.float32, mode="exact", **options)
    model = peft.PeftModel.from_pretrained(packed, saved)
    torch.testing.assert_close(logits(model), expected_logits(saved), **CLOSE)


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


METHODS = sorted(
    (name, kind)
    for name, kind in ((str(name.value), kind) for name, kind in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items())
    if "target_modules" in kind.__dataclass_fields__ and name not in ("LORA", "XLORA", "ADAPTION_PROMPT")
)


@pytest.mark.parametrize("name, kind", METHODS, ids=[name for name, _ in METHODS])
def test_other_methods_are_refused_by_name(name: str, kind: Any) -> None:
    """All methods of peft are rejected before the model changes."""
    packed, _ = fresh("qwen3_moe")
    modules = {name: module for name, module in packed.named_modules() if name}
    needed = {"total_step": 10, "feedforward_modules": []}
    settings = {key: value for key, value in needed.items() if key in kind.__dataclass_fields__}
    with pytest.raises(UnsupportedModelError, match=rf"q_proj' is packed, and .* not {name}"):
        peft.get_peft_model(packed, kind(target_modules=["q_proj", "v_proj"], **settings))
    assert all(packed.get_submodule(path) is module for path, module in modules.items())


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
def test_virtual_tokens_stand_beside_a_packed_embedding(kind: str) -> None:
    packed = moepack.load(tied(), torch.float32, mode="exact")
    before = logits(packed)
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(packed, config)
    found = logits(model)[:, -before.shape[1] :]
    assert found.shape == before.shape and not torch.allclose(found, before)
    assert gradients(model)


def test_packed_embeddings_and_tied_heads_are_left_to_their_weights() -> None:
    found = adapted(peft.get_peft_model(moepack.load(tied()), peft.LoraConfig(target_modules="all-linear", r=4)))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in found} >= {"q_proj", "experts"}
    assert not any("lm_head" in name or "embed" in name for name in found)
    for settings in (
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3]},
    ):
        with pytest.raises(UnsupportedModelError, match="packed"):
            peft.get_peft_model(moepack.load(tied()), peft.LoraConfig(r=4, **settings))


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


@pytest.mark.parametrize(("paper_form", "experts"), [(False, "RefinedExperts"), (True, "SparseExperts")])
def test_experts_by_channels_take_no_adapters(
    tiny_checkpoint: Any, paper_form: bool, experts: str, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(NOVEL.read_text()[:4000])
    method = Floe(calibration=str(text), samples=2, sequence_length=32, paper_form=paper_form)
    moepack.compress(tiny_checkpoint("qwen3_moe"), tmp_path / "packed", method=method)
    with pytest.raises(UnsupportedModelError, match=rf"experts' is a layer of packed experts .*{experts}"):
        peft.get_peft_model(moepack.load(tmp_path / "packed"), peft.LoraConfig(target_modules="all-linear", r=4))
    for names in ({"target_modules": ["q_proj"]}, {"target_modules": "all-linear", "exclude_modules": ["experts"]}):
        model = peft.get_peft_model(moepack.load(tmp_path / "packed"), peft.LoraConfig(r=4, **names))
        assert any("q_proj" in name for name in adapted(model))
        assert not any("experts" in name for name in adapted(model))


def test_an_adapter_is_not_taken_for_a_model(saved: Path) -> None:
    with pytest.raises(moepack.LoadError, match=r"is a peft adapter, not a model"):
        moepack.load(saved)

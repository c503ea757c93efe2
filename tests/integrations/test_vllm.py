"""The vLLM plugin against a stub of its interfaces: packed layers, decoded layers, and rejections."""

import json
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import moepack
import vllm_stub
from moepack import LoadError
from moepack.export import export
from moepack.format.balance import balance_of
from moepack.methods.finequant import FineQuant
from places import ROOT
from runtime_support import tiny_model, write_packed

BLOCK = "block_sparse_moe"  # what the hub, and vLLM, call Mixtral's


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with vllm_stub.installed():
        points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
        module, _, name = points["vllm.general_plugins"]["moepack"].partition(":")
        for _ in range(2):
            getattr(import_module(module), name)()
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral whose experts and attention are packed."""
    method = FineQuant(bits=4, group_size=16, dense_bits="attention=8")
    return write_packed(tiny_model("mixtral").bfloat16(), tmp_path_factory.mktemp("vllm") / "packed", method)


def loaded(directory: Path, activation: str = "silu", block: str = BLOCK) -> Any:
    """The stub's model of a directory, loaded like in vLLM."""
    settings = vllm_stub.VllmConfig(directory)
    model = vllm_stub.Model(settings.model_config.hf_config, settings.quant_config, block, activation)
    loader: Any = vllm_stub.loaders["moepack"](settings.load_config)
    loader.download_model(settings.model_config)
    loader.load_weights(model, settings.model_config)
    return model


def plain(directory: Path, out: Path) -> dict[str, torch.Tensor]:
    """The ordinary checkpoint of a packed directory."""
    export(directory, out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    return dict(model.state_dict())


def test_layers_multiply_from_packed_bytes(directory: Path) -> None:
    model, expected = loaded(directory), moepack.load(directory).model
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    chosen, shares = torch.randint(0, 4, (5, 2), dtype=torch.int32), torch.rand(5, 2)
    for number, theirs in enumerate(expected.layers):
        ours = model.get_submodule(str(number))
        attention = theirs.self_attn
        joined = torch.cat([getattr(attention, f"{name}_proj")(x) for name in "qkv"], dim=-1)
        assert torch.equal(ours.qkv_proj(x), joined) and torch.equal(ours.o_proj(x), attention.o_proj(x))
        found = ours.experts.quant_method.apply(ours.experts, x, shares, chosen, None, None)
        assert torch.equal(found, theirs.mlp.experts(x, chosen.long(), shares))
        assert not [*ours.parameters()]


def test_everything_else_is_decoded_under_the_hubs_names(directory: Path, tmp_path: Path) -> None:
    packed, decoded = loaded(directory).loaded, loaded(directory, activation="gelu").loaded
    names = {name for name in decoded if ".experts." in name}
    assert len(names) == 2 * 4 * 3 and decoded.keys() - packed.keys() == names
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in names
    assert "lm_head.weight" in packed and not any("_proj" in name for name in packed)
    expected = plain(directory, tmp_path / "plain")
    fused = expected["model.layers.1.mlp.experts.down_proj"][3]
    columns = balance_of(directory).columns("model.layers.1.mlp.experts.down_proj")
    assert columns is not None
    restored = decoded["model.layers.1.block_sparse_moe.experts.3.w2.weight"].float() * columns[3]
    torch.testing.assert_close(restored, fused.float(), rtol=0.01, atol=0)  # both are rounded to bfloat16
    assert torch.equal(packed["lm_head.weight"], expected["lm_head.weight"])


def test_a_joined_layer_that_is_packed_in_part_is_decoded(directory: Path) -> None:
    quantization = vllm_stub.VllmConfig(directory).quant_config
    quantization.packed_modules_mapping = vllm_stub.Model.packed_modules_mapping
    del quantization.modules["model.layers.0.self_attn.k_proj"]
    layer = vllm_stub.LinearBase(32, [32, 16, 16], quantization, "model.layers.0.self_attn.qkv_proj")
    assert isinstance(layer.quant_method, vllm_stub.UnquantizedLinearMethod)
    absorbed = vllm_stub.LinearBase(32, [32], quantization, "model.layers.0.self_attn.kv_b_proj")
    assert isinstance(absorbed.quant_method, vllm_stub.UnquantizedLinearMethod)
    with pytest.raises(LoadError, match=r"a different shape from model\.layers\.0\.self_attn\.o_proj"):
        vllm_stub.LinearBase(32, [31], quantization, "model.layers.0.self_attn.o_proj")


GRAPHS = SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL"), cudagraph_capture_sizes=[1, 64, 512])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"parallel": {"tensor_parallel_size": 2}}, "leave --tensor-parallel-size at 1"),
        ({"parallel": {"pipeline_parallel_size": 2}}, "leave --pipeline-parallel-size at 1"),
        ({"parallel": {"data_parallel_size": 2}}, "leave --data-parallel-size at 1"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "leave --prefill-context-parallel-size at 1"),
        ({"parallel": {"enable_expert_parallel": True}}, "leave out --enable-expert-parallel"),
        ({"parallel": {"enable_eplb": True}}, "leave out --enable-eplb"),
        ({"load_format": "auto"}, "start it with --load-format moepack"),
        ({"load_format": "dummy"}, "start it with --load-format moepack"),
        ({"lora_config": SimpleNamespace(max_lora_rank=8)}, "leave out --enable-lora"),
        ({"offload_config": SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=4.0))}, "leave out --cpu-offload-gb"),
        ({"cache_config": SimpleNamespace(cpu_offload_gb=4.0)}, "leave out --cpu-offload-gb"),
        ({"compilation_config": GRAPHS}, "would record 512: start it with --enforce-eager or --max-cudagraph-capture"),
    ],
)
def test_settings_that_packed_tensors_do_not_support_are_rejected(
    directory: Path, settings: dict[str, Any], reason: str
) -> None:
    """Rejected by the calling process before it builds a layer."""
    with pytest.raises(LoadError, match=reason):
        vllm_stub.VllmConfig(directory, **settings)


def test_only_packed_directories_are_held_to_it(directory: Path, mixtral: Path) -> None:
    split = {"tensor_parallel_size": 2}
    vllm_stub.VllmConfig(mixtral, "auto", parallel=split, lora_config=SimpleNamespace(), compilation_config=GRAPHS)
    with pytest.raises(LoadError, match="is not a packed directory: leave out --load-format moepack"):
        vllm_stub.VllmConfig(mixtral)
    vllm_stub.VllmConfig(directory, offload_config=SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=0)))


def test_a_draft_model_is_checked_with_its_own_load_format(directory: Path, mixtral: Path) -> None:
    auto, packed = (SimpleNamespace(load_format=name) for name in ("auto", "moepack"))

    def draft(path: Path, load: Any) -> Any:
        return SimpleNamespace(draft_model_config=vllm_stub.model(path), draft_load_config=load)

    vllm_stub.VllmConfig(directory, speculative_config=draft(mixtral, auto))
    vllm_stub.VllmConfig(mixtral, "auto", speculative_config=draft(directory, packed))
    with pytest.raises(LoadError, match="set the draft_load_config"):
        vllm_stub.VllmConfig(directory, speculative_config=draft(mixtral, None))
    with pytest.raises(LoadError, match="start it with --load-format moepack"):
        vllm_stub.VllmConfig(mixtral, "auto", speculative_config=draft(directory, None))
    with pytest.raises(LoadError, match="leave --tensor-parallel-size at 1"):
        speculative = draft(directory, packed)
        vllm_stub.VllmConfig(mixtral, "auto", {"tensor_parallel_size": 2}, speculative_config=speculative)
    own = draft(mixtral, auto)
    vllm_stub.VllmConfig(directory, model_config=own.draft_model_config, speculative_config=own)


def test_a_newer_directory_is_refused(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    kind: Any = vllm_stub.quantizations["moepack"]
    with pytest.raises(LoadError, match="upgrade moepack"):
        kind.from_config(config | {"version": 2})

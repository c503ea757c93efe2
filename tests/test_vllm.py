"""The plugin for vLLM, against a stand-in for its interfaces: what runs packed, what is decoded, what is refused."""

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
from moepack.methods.finequant import FineQuant
from runtime_support import tiny_model, write_packed

BLOCK = "block_sparse_moe"  # what the hub, and vLLM, call Mixtral's


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with vllm_stub.installed():
        points = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["entry-points"]
        module, _, name = points["vllm.general_plugins"]["moepack"].partition(":")
        for _ in range(2):
            getattr(import_module(module), name)()
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral whose experts and attention are packed."""
    method = FineQuant(bits=4, group_size=16, dense_bits="attention=8")
    return write_packed(tiny_model("mixtral").bfloat16(), tmp_path_factory.mktemp("vllm") / "packed", method)


def loaded(directory: Path, activation: str = "silu", block: str = BLOCK, **settings: Any) -> Any:
    """The stand-in's model of a directory, by the way that vLLM takes."""
    config = transformers.AutoConfig.from_pretrained(directory)
    kind: Any = vllm_stub.quantizations["moepack"]
    quantization = kind.from_config(json.loads((directory / "config.json").read_text())["quantization_config"])
    quantization.maybe_update_config(str(directory), hf_config=config, revision=None)
    vllm_stub.current[:] = [vllm_stub.settings(**settings)]
    model = vllm_stub.Model(config, quantization, block, activation)
    loader: Any = vllm_stub.loaders["moepack"](vllm_stub.current[0].load_config)
    model_config = SimpleNamespace(model=str(directory), revision=None)
    loader.download_model(model_config)
    loader.load_weights(model, model_config)
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


def test_everything_else_comes_decoded_by_the_hubs_names(directory: Path, tmp_path: Path) -> None:
    packed, decoded = loaded(directory).loaded, loaded(directory, activation="gelu").loaded
    names = {name for name in decoded if ".experts." in name}
    assert len(names) == 2 * 4 * 3 and decoded.keys() - packed.keys() == names
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in names
    assert "lm_head.weight" in packed and not any("_proj" in name for name in packed)
    expected = plain(directory, tmp_path / "plain")
    fused = expected["model.layers.1.mlp.experts.down_proj"][3]
    assert torch.equal(decoded["model.layers.1.block_sparse_moe.experts.3.w2.weight"], fused)
    assert torch.equal(packed["lm_head.weight"], expected["lm_head.weight"])


def test_a_joined_layer_that_is_packed_in_part_is_decoded(directory: Path) -> None:
    kind: Any = vllm_stub.quantizations["moepack"]
    quantization = kind()
    quantization.maybe_update_config(str(directory))
    vllm_stub.current[:] = [vllm_stub.settings()]
    quantization.packed_modules_mapping = vllm_stub.Model.packed_modules_mapping
    del quantization.modules["model.layers.0.self_attn.k_proj"]
    layer = vllm_stub.LinearBase(32, [32, 16, 16], quantization, "model.layers.0.self_attn.qkv_proj")
    assert isinstance(layer.quant_method, vllm_stub.UnquantizedLinearMethod)
    absorbed = vllm_stub.LinearBase(32, [32], quantization, "model.layers.0.self_attn.kv_b_proj")
    assert isinstance(absorbed.quant_method, vllm_stub.UnquantizedLinearMethod)
    with pytest.raises(LoadError, match=r"another shape than model\.layers\.0\.self_attn\.o_proj"):
        vllm_stub.LinearBase(32, [31], quantization, "model.layers.0.self_attn.o_proj")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensor_parallel_size": 2}, "leave --tensor-parallel-size at 1"),
        ({"pipeline_parallel_size": 2}, "leave --pipeline-parallel-size at 1"),
        ({"enable_expert_parallel": True}, "leave out --enable-expert-parallel"),
        ({"load_format": "auto"}, "start it with --load-format moepack"),
    ],
)
def test_what_packed_tensors_cannot_do_is_refused(directory: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(LoadError, match=reason):
        loaded(directory, **settings)


def test_a_newer_directory_is_refused(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    kind: Any = vllm_stub.quantizations["moepack"]
    with pytest.raises(LoadError, match="upgrade moepack"):
        kind.from_config(config | {"version": 2})

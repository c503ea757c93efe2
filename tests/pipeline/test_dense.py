"""Linear layers outside the experts: detection, packing, and equal results."""

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
import torch

import moepack
import packed_support as support
import tiny_models
from moepack import _core
from moepack.calibration import CalibrationRequest, CalibrationSettings, Calibrator
from moepack.checkpoint import Checkpoint, describe
from moepack.cli import main
from moepack.format import PackedDirectory
from moepack.methods import Calibrates, PackedBytes, Solution
from moepack.modules.linear import PackedLinear
from places import ROOT
from runtime_support import ARCHITECTURES, DenseMethod, logits, tiny_model, write_packed

ROLES = ("attention", "shared", "mlp", "head")


class TernaryLinears(DenseMethod):
    """Packs everything as ternary, so that `verify` has blobs to decode; records the order of calls."""

    name = "test-linears"

    def __init__(self, roles=("attention", "shared", "mlp"), fail=None):
        super().__init__(roles)
        self.fail, self.seen = fail, []

    def solve(self, stage):
        found = {}
        for name, weights in stage.tensors.items():
            self.seen.append(name)
            if name == self.fail:
                raise KeyboardInterrupt
            stack = [weights.expert(expert).float() for expert in stage.experts]
            codes, levels = moepack.quantize_ternary(torch.stack(stack))
            values = torch.where(codes > 0, levels[..., 1:], torch.where(codes < 0, levels[..., :1], 0.0))
            found[name] = Solution({"codes": codes, "levels": levels}, values)
        return found

    def pack(self, weights, solution):
        codes, levels = (solution.parts[name].numpy() for name in ("codes", "levels"))
        return PackedBytes("ternary", _core.encode_ternary(codes, levels, ndim=weights.ndim), {"code": "fsv8"})


class WatchingLinears(Calibrates, TernaryLinears):
    """A calibrated method: the model runs during the job, and a resumed job must run its packed layers."""

    def __init__(self, **settings):
        super().__init__(**settings)
        text = ROOT / "README.md"
        self.request = CalibrationRequest(str(text), 2, 32, CalibrationSettings(group=3))

    request = None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_linear_layer_and_the_embedding_are_found_and_nothing_else(architecture: str, tmp_path: Any) -> None:
    model = tiny_model(architecture)
    model.save_pretrained(tmp_path)
    found = [linear for layer in describe(Checkpoint.open(tmp_path)).dense for linear in layer.linears]
    modules = dict(model.named_modules())
    expected = {name for name, module in modules.items() if isinstance(module, torch.nn.Linear)}
    expected = {n for n in expected if ".experts." not in n and not n.endswith(("gate", "classifier", "router"))}
    if model.config.tie_word_embeddings:
        expected.discard("lm_head")
    if architecture != "switch_transformers":  # whose encoder and decoder share it
        expected.add("model.embed_tokens")
    assert {linear.name for linear in found} == expected
    for linear in found:
        assert torch.equal(linear.matrix(), modules[linear.name].weight)
        assert linear.shape == tuple(modules[linear.name].weight.shape)
        assert linear.role == (
            "head" if linear.name == "lm_head"
            else "embedding" if linear.name == "model.embed_tokens"
            else "shared" if "shared_" in linear.name
            else "attention" if "ttention" in linear.name or "self_attn" in linear.name
            else "mlp"
        )  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_with_packed_linear_layers_is_the_original(architecture: str, tmp_path: Any) -> None:
    model = tiny_model(architecture)
    directory = write_packed(model, tmp_path / "packed", DenseMethod(ROLES))
    loaded = moepack.load(directory)
    packed = {name for name, module in loaded.named_modules() if isinstance(module, PackedLinear)}
    described = describe(Checkpoint.open(tmp_path / "packed-source"))
    assert packed == {linear.name for layer in described.dense for linear in layer.linears if linear.role in ROLES}
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-4)
    assert logits(loaded.bfloat16()).dtype == torch.bfloat16
    manifest = PackedDirectory.open(directory).manifest
    record = manifest.tensors[min(packed) + ".weight"]
    assert (record.module, record.projection, len(record.shape)) == (min(packed), "weight", 2)
    assert not record.experts and record.details["role"] in ROLES


def test_linear_layers_of_other_roles_stay(tmp_path: Any) -> None:
    directory = write_packed(tiny_model("deepseek_v2"), tmp_path / "packed", DenseMethod(["shared"]))
    loaded = moepack.load(directory)
    kinds = {name: type(module) for name, module in loaded.named_modules()}
    assert kinds["model.layers.1.mlp.shared_experts.up_proj"] is PackedLinear
    assert kinds["model.layers.1.self_attn.q_proj"] is torch.nn.Linear
    assert kinds["model.layers.0.mlp.up_proj"] is torch.nn.Linear


def test_a_bias_stays_a_parameter_and_survives_a_state_dict(tmp_path: Any) -> None:
    model = tiny_model("qwen2_moe")
    loaded = moepack.load(write_packed(model, tmp_path / "packed", DenseMethod(["attention"])))
    name = "model.layers.0.self_attn.q_proj"
    module = loaded.get_submodule(name)
    assert torch.equal(module.bias, model.get_submodule(name).bias)
    state = {key: value.clone() for key, value in loaded.state_dict().items()}
    state[f"{name}.bias"] += 1
    loaded.load_state_dict(state)
    assert torch.equal(loaded.get_submodule(name).bias, model.get_submodule(name).bias + 1)


def test_a_format_without_transposed_products_refuses_gradients(tmp_path: Any) -> None:
    loaded = moepack.load(write_packed(tiny_model("mixtral"), tmp_path / "packed", DenseMethod(["attention"])))
    x = torch.zeros(3, 32, requires_grad=True)
    with pytest.raises(moepack.LoadError, match="does not support gradients"):
        loaded.model.layers[0].self_attn.q_proj(x).sum().backward()


def test_stock_transformers_fails_where_only_a_linear_layer_is_packed(tmp_path: Any) -> None:
    """Without the experts' names, the collision of the linear layers alone must stop the loader."""
    directory = write_packed(tiny_model("qwen2_moe"), tmp_path / "packed", DenseMethod(["shared"]))
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {name: file for name, file in content["weight_map"].items() if ".experts." not in name}
    index.write_text(json.dumps(content))
    code = """
        import sys, transformers
        try:
            transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
        except RuntimeError as error:
            assert "ignore_mismatched_sizes" in str(error), error
        else:
            sys.exit("loaded without moepack")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(directory)]
    without = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # where moepack is installed, torch imports it
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=without)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("architecture", ["deepseek_v2", "switch_transformers"])
def test_verify_and_inspect(architecture: str, tiny_checkpoint: Any, tmp_path: Any, capsys: Any) -> None:
    out = tmp_path / "out"
    report = moepack.compress(tiny_checkpoint(architecture), out, method=TernaryLinears())
    assert moepack.verify(out).ok
    assert report.dense_weights > 0 and report.dense_bytes < report.dense_source_bytes
    with pytest.raises(SystemExit):
        main(["inspect", str(out), "--json"])
    totals = json.loads(capsys.readouterr().out)["totals"]
    assert totals["linears"]["weights"] == report.dense_weights and totals["linears"]["after"] == report.dense_bytes
    assert totals["experts"]["after"] == report.expert_bytes
    with pytest.raises(SystemExit):
        main(["inspect", str(out)])
    assert "packed linear layers" in capsys.readouterr().out


def test_a_shape_that_the_manifest_denies_is_found(tmp_path: Any) -> None:
    out = tmp_path / "out"
    moepack.compress(tiny_models.build("mixtral", tmp_path / "model"), out, method=TernaryLinears())
    name = "model.layers.0.self_attn.q_proj.weight"

    def swap(content: dict[str, Any]) -> None:
        content["tensors"][name]["shape"] = [1, *content["tensors"][name]["shape"]]

    support.rewrite_manifest(out, swap)
    assert any(fault.tensor == name for fault in moepack.verify(out).faults)


@pytest.mark.parametrize("kind", [TernaryLinears, WatchingLinears])
def test_an_interrupted_job_continues_in_the_order_of_execution(kind: Any, tmp_path: Any, monkeypatch: Any) -> None:
    block, passed = Calibrator._block, []

    def watched(*arguments: Any) -> Any:
        for run in block(*arguments):
            passed.append(run.layer.name)
            yield run

    monkeypatch.setattr(Calibrator, "_block", watched)
    model = tiny_models.build("switch_transformers", tmp_path / "model")
    whole, again = kind(), kind()
    moepack.compress(model, tmp_path / "whole", method=whole)
    order = [name.split(".layer.")[0] for name in whole.seen if "." in name]
    assert order == sorted(order, key=lambda name: (name.startswith("decoder"), name))
    stop = kind(fail="decoder.block.1.layer.0.SelfAttention.q")
    with pytest.raises(KeyboardInterrupt):
        moepack.compress(model, tmp_path / "out", method=stop)
    layers = passed.copy()
    passed.clear()
    moepack.compress(model, tmp_path / "out", method=again)
    assert support.contents(tmp_path / "out") == support.contents(tmp_path / "whole")
    assert again.seen and not set(again.seen) & {name for name in whole.seen if name.startswith("encoder")}
    if kind is WatchingLinears:
        assert len(passed) > 4 and layers[: len(passed)] == passed


def test_a_weight_that_is_not_a_number_names_its_tensor(tmp_path: Any) -> None:
    model = tiny_model("mixtral")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = np.nan
    with pytest.raises(moepack.InvalidTensorError, match="holds nan"):
        write_packed(model, tmp_path / "packed", TernaryLinears())


def test_a_linear_layer_that_the_model_lacks_or_sizes_otherwise(tmp_path: Any) -> None:
    directory = write_packed(tiny_model("mixtral"), tmp_path / "packed", DenseMethod(["attention"]))
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["packed"]["model.layers.0.self_attn.q_proj"]["weight"] = [8, 32]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(moepack.LoadError, match="but the model's configuration has"):
        moepack.load(directory)
    config["quantization_config"]["packed"]["model.norm"] = {"weight": [8, 32]}
    del config["quantization_config"]["packed"]["model.layers.0.self_attn.q_proj"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(moepack.UnsupportedModelError, match="linear layer"):
        moepack.load(directory)

"""`describe` agrees with the model that transformers builds from the same checkpoint."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.granitemoe import modeling_granitemoe

from moepack import Checkpoint, CheckpointError, UnsupportedModelError, describe
from moepack.checkpoint import MoeModel
from moepack.checkpoint.architectures import ARCHITECTURES

DECODER: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN = {"num_experts": 4, "moe_intermediate_size": 20, "mlp_only_layers": [1]}
LATENT = {
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
GROUPS = {"n_group": 2, "topk_group": 1}
GRANITE = {"num_local_experts": 4}
SWITCH: dict[str, Any] = {
    "vocab_size": 32,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_heads": 2,
    "num_experts": 4,
    "num_layers": 4,
    "num_decoder_layers": 6,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 3,
}

# Architecture: its configuration, and the layers that are sparse in it.
KNOWN: dict[str, tuple[dict[str, Any], list[int]]] = {
    "mixtral": ({**DECODER, "num_local_experts": 11}, [0, 1, 2]),
    "phimoe": ({**DECODER, "num_local_experts": 4}, [0, 1, 2]),
    "qwen2_moe": ({**DECODER, **QWEN, "shared_expert_intermediate_size": 12}, [0, 2]),
    "qwen3_moe": ({**DECODER, **QWEN, "head_dim": 8}, [0, 2]),
    "olmoe": ({**DECODER, "num_experts": 4}, [0, 1, 2]),
    "deepseek_v2": ({**DECODER, **LATENT}, [1, 2]),
    "deepseek_v3": ({**DECODER, **LATENT, **GROUPS}, [1, 2]),
    "granitemoe": ({**DECODER, **GRANITE}, [0, 1, 2]),
    "switch_transformers": (SWITCH, [1, 3, 1, 3, 5]),
}
STANDARD: dict[str, tuple[dict[str, Any], list[int]]] = {
    "glm4_moe": ({**DECODER, **LATENT, **GROUPS, "head_dim": 8}, [1, 2]),
    "granitemoeshared": ({**DECODER, **GRANITE, "shared_intermediate_size": 12}, [0, 1, 2]),
    "dots1": ({**DECODER, **LATENT, **GROUPS, "head_dim": 8}, [1, 2]),
    "ernie4_5_moe": ({**DECODER, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 20, "head_dim": 8}, [1, 2]),
    "minimax": ({**DECODER, "num_local_experts": 4, "head_dim": 8}, [0, 1, 2]),
}
MODELS = {**KNOWN, **STANDARD}
# Models without experts.
STRANGE: dict[str, dict[str, Any]] = {"llama": DECODER}

Build = Callable[[str], Path]


def build(model_type: str, config: dict[str, Any], path: Path) -> Path:
    torch.manual_seed(0)
    configuration = transformers.AutoConfig.for_model(model_type, **config)
    auto = (
        transformers.AutoModelForSeq2SeqLM if model_type == "switch_transformers" else transformers.AutoModelForCausalLM
    )
    model = auto.from_config(configuration).to(torch.bfloat16)
    for parameter in model.parameters():
        # Some parameters are initialized to zeros or ones, which would hide an exchange of two.
        torch.nn.init.normal_(parameter)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Build:
    root = tmp_path_factory.mktemp("architectures")

    def directory(model_type: str) -> Path:
        if model_type.startswith("granitemoe") and not hasattr(modeling_granitemoe, "GraniteMoeExperts"):
            pytest.skip("transformers keeps Granite's experts in its standard module from 5.13 on")
        path = root / model_type
        return path if path.exists() else build(model_type, MODELS[model_type][0], path)

    return directory


def load(path: Path) -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(path)
    seq2seq = config.is_encoder_decoder
    auto = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
    model, report = auto.from_pretrained(path, dtype=torch.bfloat16, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model


def module_weights(module: torch.nn.Module, projection: str) -> torch.Tensor:
    """The weights `[E, R, C]` that transformers loaded for a projection."""
    if projection in ("wi", "wo"):
        return torch.stack([getattr(module[f"expert_{i}"], projection).weight for i in range(len(module))])
    if projection == "down_proj":
        return module.down_proj
    gate, up = module.gate_up_proj.chunk(2, dim=1)
    return gate if projection == "gate_proj" else up


def assert_partition(checkpoint: Checkpoint, model: MoeModel) -> None:
    """Every tensor is either dense or consumed, and never both."""
    sources = {name for layer in model.layers for part in layer.projections for name in part.sources}
    assert not sources & set(model.dense_names)
    assert sources | set(model.dense_names) == set(checkpoint.names())
    assert len(model.dense_names) == len(set(model.dense_names))
    for layer in model.layers:
        assert {*layer.router, *layer.shared} <= set(model.dense_names)
        assert not set(layer.router) & set(layer.shared)


@pytest.mark.parametrize("model_type", MODELS)
def test_agrees_with_transformers(model_type: str, built: Build) -> None:
    checkpoint = Checkpoint.open(built(model_type))
    described = describe(checkpoint)
    modules = dict(load(built(model_type)).named_modules())
    assert described.architecture == model_type
    assert [layer.name for layer in described.layers] == [
        name for name in modules if name.endswith(".experts") and "shared" not in name
    ]
    assert [int(re.findall(r"\d+", layer.name)[0]) for layer in described.layers] == MODELS[model_type][1]
    for layer in described.layers:
        for projection in layer.projections:
            expected = module_weights(modules[layer.name], projection.name)
            assert projection.shape == tuple(expected.shape)
            assert projection.nbytes == expected.nbytes
            for i in range(layer.experts):
                assert torch.equal(projection.expert(i), expected[i])
    assert_partition(checkpoint, described)


@pytest.mark.parametrize("model_type", MODELS)
def test_no_expert_is_dense_and_no_router_is_quantized(model_type: str, built: Build) -> None:
    described = describe(Checkpoint.open(built(model_type)))
    assert not [name for name in described.dense_names if re.search(r"\bexperts\.|block_sparse_moe\..*_linear\.", name)]
    assert all(layer.router for layer in described.layers)
    routers = {name for layer in described.layers for name in layer.router}
    assert all(re.search(r"\.(gate|router|moe_statics)\.", name) for name in routers)
    shared = {name for name in described.dense_names if "shared_" in name and ".block_sparse_moe" not in name}
    if model_type != "granitemoeshared":
        assert shared == {name for layer in described.layers for name in layer.shared}


def test_the_table_lists_the_tested_architectures() -> None:
    assert set(KNOWN) == set(ARCHITECTURES)
    assert not set(STANDARD) & set(ARCHITECTURES)


@pytest.mark.parametrize("model_type", KNOWN)
def test_packed_names_collide_with_the_stock_model(model_type: str, built: Build) -> None:
    """Without moepack, loading must fail: some packed tensor has the name of a parameter with another shape."""
    described = describe(Checkpoint.open(built(model_type)))
    parameters = dict(load(built(model_type)).named_parameters())
    for layer in described.layers:
        names = [projection.packed_name for projection in layer.projections]
        assert len(set(names)) == len(names) and all(name.startswith(layer.name + ".") for name in names)
        assert any(name in parameters for name in names)
        assert all(parameters[name].ndim > 1 for name in names if name in parameters)


def test_recognised_models_say_so(built: Build) -> None:
    assert describe(Checkpoint.open(built("mixtral"))).notes == ()
    assert "recognised by structure" in describe(Checkpoint.open(built("glm4_moe"))).notes[0]


# ---- the same weights in other layouts


def rewrite(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None], **config: Any) -> Path:
    """Copy a checkpoint with changed tensors and config entries (None removes an entry)."""
    target.mkdir(exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    merged = {**json.loads((source / "config.json").read_text()), **config}
    merged = {key: value for key, value in merged.items() if value is not None}
    (target / "config.json").write_text(json.dumps(merged))
    return target


def fuse(model: MoeModel, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the tensors of the experts by the two stacked ones of transformers' own names."""
    if model.architecture != "granitemoe":
        for name in [name for name in tensors if ".block_sparse_moe." in name]:
            tensors[name.replace(".block_sparse_moe.", ".mlp.")] = tensors.pop(name)
    for layer in model.layers:
        stacks = {part.name: torch.stack([part.expert(i) for i in range(layer.experts)]) for part in layer.projections}
        for part in layer.projections:
            for name in part.sources:
                tensors.pop(name.replace(".block_sparse_moe.", ".mlp."), None)
                tensors.pop(name, None)
        tensors[f"{layer.name}.gate_up_proj"] = torch.cat((stacks["gate_proj"], stacks["up_proj"]), dim=1)
        tensors[f"{layer.name}.down_proj"] = stacks["down_proj"]


@pytest.mark.parametrize("model_type", [name for name in KNOWN if name != "switch_transformers"])
def test_fused_on_disk(model_type: str, built: Build, tmp_path: Path) -> None:
    expected = describe(Checkpoint.open(built(model_type)))
    directory = rewrite(built(model_type), tmp_path, lambda tensors: fuse(expected, tensors))
    checkpoint = Checkpoint.open(directory)
    found = describe(checkpoint)
    load(directory)
    assert_partition(checkpoint, found)
    assert [layer.name for layer in found.layers] == [layer.name for layer in expected.layers]
    for layer, other in zip(found.layers, expected.layers, strict=True):
        for part, twin in zip(layer.projections, other.projections, strict=True):
            assert (part.name, part.shape, part.packed_name) == (twin.name, twin.shape, twin.packed_name)
            assert len(part.sources) == 1 and part.nbytes == twin.nbytes
            assert all(torch.equal(part.expert(i), twin.expert(i)) for i in range(layer.experts))


def test_layers_of_multi_token_prediction_stay_dense(built: Build, tmp_path: Path) -> None:
    def append_layer(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.2.")]:
            tensors[name.replace(".2.", ".3.", 1)] = tensors[name].clone()
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(16, 32)

    checkpoint = Checkpoint.open(rewrite(built("deepseek_v3"), tmp_path, append_layer))
    described = describe(checkpoint)
    assert [layer.name for layer in described.layers] == [f"model.layers.{i}.mlp.experts" for i in (1, 2)]
    assert "model.layers.3.mlp.experts.0.up_proj.weight" in described.dense_names
    assert any("model.layers.3: " in note and "multi-token" in note for note in described.notes)
    assert set(described.unread) == {name for name in checkpoint.names() if name.startswith("model.layers.3.")}
    assert_partition(checkpoint, described)


# ---- rejections


def refused(path: Path, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        describe(Checkpoint.open(path))


EXPERT = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensor

    return change


def drop_all(pattern: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if re.search(pattern, name)]:
            del tensors[name]

    return change


BROKEN: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], type[Exception], str]] = {
    "an expert's tensor is missing": (
        drop(EXPERT.format(3, "w2")),
        CheckpointError,
        r"tensor '.*experts\.3\.w2\.weight': no such tensor",
    ),
    "the first expert's tensor is missing": (drop(EXPERT.format(0, "w1")), CheckpointError, r"experts\.0\.w1.*none"),
    "a layer's experts are missing": (drop_all(r"layers\.1\..*experts"), CheckpointError, r"layers\.1\..*found none"),
    "a router is missing": (drop_all(r"layers\.1\..*moe\.gate"), CheckpointError, r"layers\.1\..*no router"),
    "an expert too many": (
        put(EXPERT.format(11, "w1"), torch.ones(24, 16)),
        CheckpointError,
        "is stored with the experts",
    ),
    "a bias": (
        put(EXPERT.format(0, "w1").replace("weight", "bias"), torch.ones(24)),
        CheckpointError,
        r"w1\.bias': is stored with the experts",
    ),
    "two layouts": (
        put("model.layers.1.block_sparse_moe.experts.gate_up_proj", torch.ones(11, 48, 16)),
        CheckpointError,
        "found several",
    ),
    "a layer under two names": (
        lambda tensors: tensors.update(
            {
                name.replace("block_sparse_moe", "mlp"): tensor.clone()
                for name, tensor in tensors.items()
                if "layers.1.block_sparse_moe" in name
            }
        ),
        CheckpointError,
        "stored twice",
    ),
    "one shape differs": (
        put(EXPERT.format(5, "w1"), torch.ones(16, 16)),
        CheckpointError,
        r"experts\.5\.w1.*\[16, 16\], but the first expert has \[24, 16\]",
    ),
    "an expert is a vector": (put(EXPERT.format(5, "w1"), torch.ones(24)), CheckpointError, "but a matrix is expected"),
    "fp8": (
        put(EXPERT.format(5, "w1"), torch.ones(24, 16).to(torch.float8_e4m3fn)),
        UnsupportedModelError,
        r"experts\.5\.w1.*float8_e4m3fn, already quantized",
    ),
    "int8": (
        put(EXPERT.format(5, "w3"), torch.ones(24, 16).to(torch.int8)),
        UnsupportedModelError,
        "already quantized",
    ),
    "no experts at all": (drop_all("block_sparse_moe"), UnsupportedModelError, "no layer with experts"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_mixtral(case: str, built: Build, tmp_path: Path) -> None:
    change, kind, message = BROKEN[case]
    refused(rewrite(built("mixtral"), tmp_path, change), kind, message)


def test_projections_that_do_not_fit(built: Build, tmp_path: Path) -> None:
    def transpose(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".w2.weight")]:
            tensors[name] = tensors[name].T

    refused(
        rewrite(built("mixtral"), tmp_path, transpose), CheckpointError, "shapes of the projections are inconsistent"
    )


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("input_linear", (4, 48), "but 4 stacked matrices are expected"),
        ("input_linear", (3, 48, 16), "but 4 stacked matrices are expected"),
        ("output_linear", (5, 16, 24), "but 4 stacked matrices are expected"),
        ("input_linear", (4, 47, 16), "projections are inconsistent"),
        ("input_linear", (4, 50, 16), "projections are inconsistent"),
        ("output_linear", (4, 24, 16), "projections are inconsistent"),
    ],
)
def test_stacks_of_a_wrong_shape(name: str, shape: tuple[int, ...], message: str, built: Build, tmp_path: Path) -> None:
    change = put(f"model.layers.1.block_sparse_moe.{name}.weight", torch.ones(shape))
    refused(rewrite(built("granitemoe"), tmp_path, change), CheckpointError, message)


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        ({"num_local_experts": 12}, CheckpointError, r"experts\.11\.w1\.weight': no such tensor"),
        ({"num_local_experts": 10**12}, CheckpointError, "experts, but the block has only"),
        ({"num_local_experts": 10}, CheckpointError, "is stored with the experts"),
        ({"num_local_experts": 0}, CheckpointError, "contradictory"),
        ({"num_local_experts": "8"}, CheckpointError, "no valid number of experts"),
        ({"num_experts": 3}, CheckpointError, "contradictory numbers of experts"),
        ({"num_hidden_layers": None}, CheckpointError, "no valid number of layers"),
        ({"num_hidden_layers": 10**12}, CheckpointError, r"\(num_hidden_layers\), but model\.layers\.3 has no tensor"),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedModelError, "already quantized .*'fp8'"),
        ({"quantization_config": {"quant_method": "moepack"}}, UnsupportedModelError, "already packed by moepack"),
        ({"quantization_config": "int4"}, UnsupportedModelError, "already quantized"),
    ],
)
def test_config_that_contradicts(
    config: dict[str, Any], kind: type[Exception], message: str, built: Build, tmp_path: Path
) -> None:
    refused(rewrite(built("mixtral"), tmp_path, lambda tensors: None, **config), kind, message)


@pytest.mark.parametrize("model_type", STRANGE)
def test_other_layouts_are_refused_with_the_list(model_type: str, tmp_path: Path) -> None:
    path = build(model_type, STRANGE[model_type], tmp_path)
    refused(path, UnsupportedModelError, f"'{model_type}' is not supported: .*Supported are deepseek_v2, .*qwen3_moe")


def test_unknown_to_transformers(built: Build, tmp_path: Path) -> None:
    path = rewrite(built("mixtral"), tmp_path, lambda tensors: None, model_type="no_such_model")
    refused(path, UnsupportedModelError, "the installed transformers does not know it")


@pytest.mark.parametrize(
    "config",
    [{"num_hidden_layers": 10**9}, {"hidden_size": "x"}, {"moe_intermediate_size": 40}],
)
def test_recognition_needs_agreement(config: dict[str, Any], built: Build, tmp_path: Path) -> None:
    path = rewrite(built("glm4_moe"), tmp_path, lambda tensors: None, **config)
    refused(path, UnsupportedModelError, "cannot be read as a model of type 'glm4_moe': ")


def test_names_that_were_not_unwrapped_are_reported(built: Build, tmp_path: Path) -> None:
    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    refused(
        rewrite(built("mixtral"), tmp_path, strip), UnsupportedModelError, "no layer with experts .*the nearest is "
    )

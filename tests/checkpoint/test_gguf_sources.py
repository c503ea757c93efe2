"""GGUF files as sources: tensors, configuration and tokenizer of all architectures and types, and damaged files."""

import json
import os
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from typer.testing import CliRunner

from gguf_support import converted, finish, quantized, write_gguf, write_merged_tokenizer
from moepack import Checkpoint, CheckpointError, UnsupportedModelError, compress
from moepack.checkpoint import describe
from moepack.checkpoint.gguf import checkpoint as reading
from moepack.checkpoint.gguf.header import read_gguf
from moepack.checkpoint.quantized import open_checkpoint
from moepack.checkpoint.resolve import configured, resolve_model
from moepack.cli import app
from moepack.format import PackedDirectory
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.methods.finequant import FineQuant

gguf = pytest.importorskip("gguf")

SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": 2, "rms_norm_eps": 1e-5,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "moe_intermediate_size": 96, "routed_scaling_factor": 1.5, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "n_group": 1, "topk_group": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
    "mscale": 0.7, "mscale_all_dim": 0.7,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 96, "head_dim": 32, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "num_key_value_heads": 4},
    "deepseek_v2": {**LATENT, "q_lora_rank": 32, "rope_parameters": YARN},
}


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def saved(architecture: str, folder: Path, **settings: Any) -> Path:
    """A tiny random model with all parameters at a usual scale."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(architecture, **SIZES | settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_((torch.randn(parameter.shape) * scale).bfloat16())
    model.save_pretrained(folder)
    write_merged_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: saved(name, tmp_path_factory.mktemp(name) / "source", **OWN[name]))


@pytest.mark.parametrize("architecture", OWN)
def test_a_file_is_the_model_that_it_was_made_of(
    architecture: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    original = source(architecture)
    file = write_gguf(original, tmp_path / "model.gguf")
    expected, found = Checkpoint.open(original), open_checkpoint(file)
    assert set(found.names()) == set(expected.names())
    for name in expected.names():
        assert torch.equal(found.tensor(name).float(), expected.tensor(name).float()), name
        assert found.info(name).shape == expected.info(name).shape, name
    assert describe(found).architecture == architecture
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        logits = [open_model(path, torch.float32)(input_ids=ids).logits for path in (original, file)]
    assert torch.allclose(*logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["qwen2_moe", "qwen3_moe"])
def test_transformers_reads_the_same_weights(architecture: str, source: Callable[[str], Path], tmp_path: Path) -> None:
    file = write_gguf(source(architecture), tmp_path / "model.gguf", quantized("Q8_0"))
    settings: Any = {"gguf_file": file.name, "config": transformers.AutoConfig.from_pretrained(source(architecture))}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **settings)
    ours = open_model(file, torch.float32).state_dict()
    for name, values in theirs.state_dict().items():
        assert torch.allclose(ours[name], values, rtol=2**-10, atol=1e-7), name


KINDS = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0"]
K_QUANTS = {"Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23}


def single(folder: Path, values: np.ndarray, kind: Any) -> Path:
    """A file of one norm and three stacked experts."""
    writer = gguf.GGUFWriter(folder / "model.gguf", "qwen3moe")
    writer.add_tensor("blk.0.ffn_up_exps.weight", values, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(256, np.float32))
    finish(writer)
    (folder / "config.json").write_text('{"model_type": "qwen3_moe", "num_hidden_layers": 1}')
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_types_that_the_gguf_package_writes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "VALUES_AT_ONCE", 700)  # two rows at a time
    number = gguf.GGMLQuantizationType[kind]
    random = np.random.default_rng(0)
    if kind == "NVFP4":  # which the package only decodes
        values = random.integers(0, 64, (3, 5, 4 * gguf.GGML_QUANT_SIZES[number][1]), np.uint8)
    else:
        values = gguf.quantize(random.normal(size=(3, 5, 256)).astype(np.float32), number)
    opened = open_checkpoint(single(tmp_path, values, number))
    expected = torch.from_numpy(gguf.dequantize(values, number)).view(3, 5, 256)
    for expert in range(3):
        name = f"model.layers.0.mlp.experts.{expert}.up_proj.weight"
        found = opened.tensor(name)
        assert torch.equal(found, expected[expert].to(found.dtype))
        assert torch.allclose(found.float(), expected[expert], rtol=2**-10, atol=1e-6)
        assert opened.stored_bytes(name) == values.nbytes // 3
        assert (opened.stored_bits([name]) is None) == (kind in ("F16", "BF16"))


@pytest.mark.parametrize("kind", K_QUANTS)
def test_types_that_ggml_writes(kind: str, tmp_path: Path) -> None:
    """ggml itself quantizes and decodes."""
    ggml = pytest.importorskip("benches.tools.ggml")
    try:
        library = ggml.load()
    except ImportError as error:
        pytest.skip(f"no ggml: {error}")
    matrices = np.random.default_rng(0).normal(size=(3, 5, 256)).astype(np.float32)
    blocks = [ggml.quantized(library, K_QUANTS[kind], each, np.ones(256, np.float32)) for each in matrices]
    values = np.stack([np.frombuffer(each, np.uint8).reshape(5, -1) for each in blocks])
    opened = open_checkpoint(single(tmp_path, values, gguf.GGMLQuantizationType[kind]))
    for expert, block in enumerate(blocks):
        found = opened.tensor(f"model.layers.0.mlp.experts.{expert}.up_proj.weight")
        expected = torch.from_numpy(np.asarray(ggml.dequantized(library, K_QUANTS[kind], block, 256)))
        assert torch.allclose(found.float(), expected.view(5, 256), rtol=2**-10, atol=1e-6)


def test_packing_a_file_equals_packing_its_values(source: Callable[[str], Path], tmp_path: Path) -> None:
    file = write_gguf(source("mixtral"), tmp_path / "model.gguf", quantized("Q8_0"))
    opened = open_checkpoint(file)
    decoded = tmp_path / "decoded"
    decoded.mkdir()
    save_file({name: opened.tensor(name).contiguous() for name in opened.names()}, decoded / "model.safetensors")
    (decoded / "config.json").write_text(json.dumps(opened.config))
    for name, path in (("a", file), ("b", decoded)):
        report = compress(path, tmp_path / name, method=FineQuant(bits=4, dense_bits=4))
        assert any("GGUF Q8_0" in note for note in report.notes) == (name == "a")
    first, second = (PackedDirectory.open(tmp_path / name) for name in "ab")
    assert all(bytes(first.tensor(name)) == bytes(second.tensor(name)) for name in first.manifest.packed())
    small = write_gguf(source("mixtral"), tmp_path / "small.gguf", quantized("Q4_0"))
    with pytest.raises(UnsupportedModelError, match=r"source has \S+ bits .*GGUF Q4_0.* request fewer bits"):
        compress(small, tmp_path / "c", method=FineQuant(bits=8))


def test_the_tokenizer_comes_from_the_file(tmp_path: Path, source: Callable[[str], Path]) -> None:
    original = source("qwen3_moe")
    file = write_gguf(original, tmp_path / "model.gguf")
    directory = resolve_model(file)
    assert resolve_model(file) == directory and resolve_model(tmp_path) == directory
    text = "The cat, 12 mats."
    assert open_tokenizer(directory).encode(text) == open_tokenizer(original).encode(text)


def test_a_file_of_another_name(tmp_path: Path, source: Callable[[str], Path]) -> None:
    """Programs that store models by digest give them no ending."""
    original = source("qwen3_moe")
    blob = write_gguf(original, tmp_path / "model.gguf").rename(tmp_path / "sha256-0123")
    directory = resolve_model(blob)
    opened, expected = open_checkpoint(directory), Checkpoint.open(original)
    assert set(opened.names()) == set(expected.names())
    assert open_tokenizer(directory).encode("The cat") == open_tokenizer(original).encode("The cat")
    (tmp_path / "notes").write_text("GGUX")
    with pytest.raises(CheckpointError, match="notes: is a file, but none of"):
        open_checkpoint(resolve_model(tmp_path / "notes"))


@pytest.mark.parametrize("given", ["folder", "second part"])
def test_split_files(given: str, source: Callable[[str], Path], tmp_path: Path) -> None:
    write_gguf(source("qwen2_moe"), tmp_path / "model.gguf", quantized("Q8_0"), split_max_tensors=9)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    whole = (
        write_gguf(source("qwen2_moe"), tmp_path / "whole" / "model.gguf", quantized("Q8_0"))
        if ((tmp_path / "whole").mkdir() is None)
        else tmp_path
    )
    split, single_ = open_checkpoint(tmp_path if given == "folder" else parts[1]), open_checkpoint(whole)
    assert set(split.names()) == set(single_.names()) and len(split.shards) == len(parts)
    assert all(torch.equal(split.tensor(name), single_.tensor(name)) for name in split.names())
    parts[-1].unlink()
    with pytest.raises(CheckpointError, match=rf"{parts[-1].name} does not exist"):
        open_checkpoint(parts[0])


def test_parts_of_another_model(source: Callable[[str], Path], tmp_path: Path) -> None:
    write_gguf(source("qwen2_moe"), tmp_path / "model.gguf", split_max_tensors=20)
    parts = sorted(tmp_path.glob("*.gguf"))
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"is part 0 of \d by its metadata, 1 of \d by its name"):
        open_checkpoint(parts[0])


@pytest.mark.parametrize("others", [0, 1])
def test_a_configuration_beside_the_file_comes_first(
    others: int, source: Callable[[str], Path], tmp_path: Path
) -> None:
    original = source("mixtral")
    file = write_gguf(original, tmp_path / "model.gguf")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((original / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"rope_parameters": {"rope_theta": 5e5}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for number in range(others):
        (tmp_path / f"other{number}.gguf").write_bytes(file.read_bytes())
    opened = open_checkpoint(file)
    assert opened.config["rope_parameters"] == {"rope_theta": 5e5}
    assert (opened.path == tmp_path) == (not others) and (opened.path / "tokenizer.json").exists()
    if others:
        with pytest.raises(CheckpointError, match=r"several GGUF models \(model\.gguf, other0\.gguf\)"):
            open_checkpoint(tmp_path)


def test_a_configuration_that_is_given(source: Callable[[str], Path], tmp_path: Path) -> None:
    """For architectures whose metadata do not suffice, and through the command line."""
    original = source("mixtral")
    file = write_gguf(original, tmp_path / "model.gguf")
    arguments = ["compress", str(file), str(tmp_path / "out"), "--method", "finequant", "--dry-run"]
    done = CliRunner().invoke(app, [*arguments, "--config", str(original)])
    assert done.exit_code == 0, done.output
    directory = configured(file, original)
    assert Path(directory) != resolve_model(file)
    config = json.loads((Path(directory) / "config.json").read_text())
    assert config == json.loads((original / "config.json").read_text())
    assert len(open_checkpoint(directory)) == len(open_checkpoint(file))
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        configured(file, tmp_path)
    with pytest.raises(ValueError, match="--config applies to files"):
        configured(original, original)


def test_experts_in_older_and_newer_layouts(tmp_path: Path) -> None:
    """One tensor for each expert (llama.cpp before 2024), and gate and up in one."""
    random = np.random.default_rng(0)
    gate, up = random.normal(size=(2, 3, 4, 8)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("blk.0.ffn_gate_up_exps.weight", np.concatenate((gate, up), 1))
    for expert in range(3):
        writer.add_tensor(f"blk.1.ffn_gate.{expert}.weight", gate[expert])
    finish(writer)
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "num_hidden_layers": 2}')
    opened = open_checkpoint(tmp_path)
    for expert in range(3):
        stem = f"block_sparse_moe.experts.{expert}"
        assert np.array_equal(opened.tensor(f"model.layers.0.{stem}.w1.weight").numpy(), gate[expert])
        assert np.array_equal(opened.tensor(f"model.layers.0.{stem}.w3.weight").numpy(), up[expert])
        assert np.array_equal(opened.tensor(f"model.layers.1.{stem}.w1.weight").numpy(), gate[expert])
        assert opened.stored_bytes(f"model.layers.0.{stem}.w3.weight") == 4 * 4 * 8


# ---- architectures that moepack does not export


def deepseek_v3(original: Path, file: Path) -> None:
    """DeepSeek-V3 as llama.cpp's converter writes it: that of V2 with sigmoids, a bias of the router, and groups."""
    settings = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps(settings | {"model_type": "deepseek_v2"}))
    tensors = {
        name.replace("ffn_gate_inp.e_score_correction_bias", "exp_probs_b.bias"): tensor
        for name, tensor in tensors_of(original)
    }
    (original / "config.json").write_text(json.dumps(settings))
    writer = gguf.GGUFWriter(file, "deepseek2")
    common(writer, settings)
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count_kv(1)
    writer.add_expert_shared_count(2)
    writer.add_expert_weights_scale(1.5)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(2)
    writer.add_expert_group_used_count(1)
    writer.add_leading_dense_block_count(1)
    writer.add_q_lora_rank(32)
    writer.add_kv_lora_rank(32)
    writer.add_key_length(48)
    writer.add_value_length(32)
    writer.add_key_length_mla(48)
    writer.add_value_length_mla(32)
    writer.add_rope_dimension_count(16)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.float().numpy())
    finish(writer)


def tensors_of(original: Path) -> list[tuple[str, torch.Tensor]]:
    """The tensors under llama.cpp's names; the bias of V3's router, which V2 does not have, keeps its name's end."""
    from safetensors.torch import load_file

    content = load_file(original / "model.safetensors")
    biases = {name: tensor for name, tensor in content.items() if name.endswith("e_score_correction_bias")}
    save_file({name: t for name, t in content.items() if name not in biases}, original / "model.safetensors")
    found = list(converted(original))
    save_file(content, original / "model.safetensors")
    for name, tensor in biases.items():
        found.append((f"blk.{name.split('.')[2]}.ffn_gate_inp.e_score_correction_bias", tensor))
    return found


def common(writer: Any, settings: dict[str, Any]) -> None:
    """The entries of every architecture."""
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_head_count(settings["num_attention_heads"])
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)


def gpt_oss(original: Path, file: Path) -> None:
    """gpt-oss as llama.cpp's converter writes it: even and odd rows of `gate_up_proj` apart, transposed."""
    from safetensors.torch import load_file

    settings = json.loads((original / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "gpt-oss")
    common(writer, settings)
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_expert_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count_kv(2)
    writer.add_key_length(settings["head_dim"])
    writer.add_value_length(settings["head_dim"])
    writer.add_sliding_window(settings["sliding_window"])
    for name, tensor in load_file(original / "model.safetensors").items():
        values, parts = tensor.float(), name.split(".")
        for found, layer in gpt_oss_names(parts, values).items():
            writer.add_tensor(found, layer.contiguous().numpy())
    finish(writer)


GPT_OSS = {
    "embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm", "q_proj": "attn_q",
    "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "router": "ffn_gate_inp",
}  # fmt: skip


def gpt_oss_names(parts: list[str], values: torch.Tensor) -> dict[str, torch.Tensor]:
    if "layers" not in parts:
        return {GPT_OSS.get(".".join(parts[1:]), "output.weight"): values}
    stem, last = f"blk.{parts[2]}", parts[-1]
    if last == "sinks":
        return {f"{stem}.attn_sinks.weight": values}
    if parts[-2] != "experts":
        return {f"{stem}.{GPT_OSS[parts[-2]]}.{last}": values}
    end = "bias" if last.endswith("_bias") else "weight"
    turned = values if end == "bias" else values.mT
    if last.startswith("down"):
        return {f"{stem}.ffn_down_exps.{end}": turned}
    return {f"{stem}.ffn_gate_exps.{end}": turned[:, ::2], f"{stem}.ffn_up_exps.{end}": turned[:, 1::2]}


OTHERS: dict[str, tuple[Callable[[Path, Path], None], dict[str, Any]]] = {
    "deepseek_v3": (deepseek_v3, {**LATENT, "q_lora_rank": 32, "n_group": 2, "topk_group": 1}),
    "gpt_oss": (gpt_oss, {"num_local_experts": 4, "head_dim": 32, "sliding_window": 16}),
}


@pytest.mark.parametrize("architecture", OTHERS)
def test_architectures_that_are_only_read(architecture: str, tmp_path: Path) -> None:
    convert, settings = OTHERS[architecture]
    if architecture == "gpt_oss":
        settings = {**settings, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    original = saved(architecture, tmp_path / "source", **settings)
    convert(original, tmp_path / "model.gguf")
    expected, found = Checkpoint.open(original), open_checkpoint(tmp_path / "model.gguf")
    assert set(found.names()) == set(expected.names())
    for name in expected.names():
        assert torch.equal(found.tensor(name).float(), expected.tensor(name).float()), name
        if ".experts.gate_up_proj" in name or ".experts.down_proj" in name:
            assert torch.equal(found.part(name, 2).float(), expected.part(name, 2).float())
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        paths = original, tmp_path / "model.gguf"
        logits = [open_model(path, torch.float32)(input_ids=ids).logits for path in paths]
    assert torch.allclose(*logits, rtol=1e-5, atol=1e-5)


# ---- faults


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def placed(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def raw(*, tensors: list[bytes], entries: list[bytes] = [], data: bytes = bytes(256), version: int = 3) -> bytes:  # noqa: B006
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join([*entries, *tensors])
    return head + bytes(-len(head) % 32) + data


GOOD = placed("a", (2, 8), 0, 0)
FAULTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated: 0 bytes"),
    "another file": (bytes(64), "is not a GGUF file"),
    "version 1": (raw(tensors=[], version=1), "version 1; 2 and 3 are read"),
    "big-endian": (raw(tensors=[], version=3 << 24), "big-endian"),
    "too many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(64), "truncated: the header claims"),
    "too many entries": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + bytes(64), "truncated: the header claims"),
    "long text": (raw(tensors=[], entries=[struct.pack("<Q", 1 << 60)]), "truncated"),
    "long list": (raw(tensors=[], entries=[entry("k", 9, struct.pack("<IQ", 4, 1 << 60))]), "truncated"),
    "long list of texts": (raw(tensors=[], entries=[entry("k", 9, struct.pack("<IQ", 8, 1 << 60))]), "truncated"),
    "list of lists": (raw(tensors=[], entries=[entry("k", 9, struct.pack("<IQ", 9, 1))]), "'k' is an array of"),
    "unknown metadata": (raw(tensors=[], entries=[entry("k", 99, b"")]), "'k' has the unknown type 99"),
    "metadata twice": (raw(tensors=[], entries=[entry("k", 0, b"1")] * 2), "'k' twice"),
    "alignment": (raw(tensors=[], entries=[entry("general.alignment", 4, bytes(4))]), "alignment is 0"),
    "tensor twice": (raw(tensors=[GOOD, GOOD]), "tensor 'a': is in the file twice"),
    "no axis": (raw(tensors=[placed("a", (), 0, 0)]), "tensor 'a': has 0 axes"),
    "five axes": (raw(tensors=[placed("a", (1,) * 5, 0, 0)]), "tensor 'a': has 5 axes"),
    "huge": (raw(tensors=[placed("a", (1 << 62, 1 << 62), 0, 0)]), "tensor 'a': the shape .* is too large"),
    "unknown type": (raw(tensors=[placed("a", (2, 8), 4, 0)]), "tensor 'a': has the type 4"),
    "part of a block": (raw(tensors=[placed("a", (2, 8), 8, 0)]), "rows of 8 values, Q8_0 stores blocks of 32"),
    "past the end": (raw(tensors=[placed("a", (2, 64), 0, 0)]), "tensor 'a': truncated: the tensor ends at byte"),
    "far offset": (raw(tensors=[placed("a", (2, 8), 0, 1 << 63)]), "tensor 'a': truncated"),
    "overlap": (raw(tensors=[GOOD, placed("b", (2, 8), 0, 32)]), "tensor 'b': overlaps"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_headers(fault: str, tmp_path: Path) -> None:
    content, message = FAULTS[fault]
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=rf"x\.gguf: (.*: )?{message}|{message}"):
        read_gguf(tmp_path / "x.gguf")


def test_every_truncation_and_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    """A damaged file is refused with a typed error that names it, or all its tensors stay inside the file."""
    file = tmp_path / "x.gguf"
    entries = [entry("general.architecture", 8, text("llama")), entry("k", 9, struct.pack("<IQ", 8, 1) + text("abc"))]
    whole = raw(tensors=[GOOD, placed("b", (4, 32), 8, 64)], entries=entries)
    cut = [whole[:keep] for keep in range(0, len(whole), 3)]
    changed = [whole[:at] + bytes([whole[at] ^ 0xA5]) + whole[at + 1 :] for at in range(0, len(whole) - 256)]
    for content in (*cut, *changed):
        file.write_bytes(content)
        try:
            header = read_gguf(file).header
        except (CheckpointError, UnsupportedModelError) as error:
            assert error.file == str(file)
            continue
        assert all(info.offset + info.nbytes <= len(content) for info in header.tensors.values())


def changed_model(tmp_path: Path, change: Callable[[Any], None], architecture: str = "qwen3moe") -> Path:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    common(writer, SIZES)
    writer.add_feed_forward_length(96)
    writer.add_tensor("token_embd.weight", np.ones((8, 64), np.float32))
    writer.add_tensor("blk.0.ffn_up_exps.weight", np.ones((4, 8, 64), np.float32))
    change(writer)
    finish(writer)
    return tmp_path / "model.gguf"


def add(name: str) -> Callable[[Any], None]:
    return lambda writer: writer.add_tensor(name, np.ones((4, 64), np.float32))


REFUSED: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "architecture": (lambda _: None, "bert", "are read, not of 'bert'"),
    "unknown tensor": (add("blk.0.made_up.weight"), "qwen3moe", "'blk.0.made_up.weight': a tensor of 'qwen3moe' that"),
    "unknown outer tensor": (add("made_up.weight"), "qwen3moe", "tensor 'made_up.weight': a tensor of"),
    "frequencies": (add("rope_freqs.weight"), "llama", r"rope_freqs\.weight.*config\.json .* beside the file"),
    "positions": (
        lambda writer: writer.add_string("qwen3moe.rope.scaling.type", "longrope"),
        *("qwen3moe", "positions of type 'longrope'; put config.json"),
    ),
    "entry of another type": (
        lambda writer: writer.add_string("qwen3moe.attention.key_length", "many"),
        *("qwen3moe", "'qwen3moe.attention.key_length' is no int"),
    ),
    "missing entry": (lambda _: None, "gpt-oss", r"no metadata 'gpt-oss\.attention\.sliding_window'; put config\.json"),
    "layers differ": (
        lambda writer: writer.add_array("qwen3moe.attention.head_count_kv", [2, 4]),
        *("qwen3moe", "not the same in all layers"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_are_refused(case: str, tmp_path: Path) -> None:
    change, architecture, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        open_checkpoint(changed_model(tmp_path, change, architecture))
    assert caught.value.file == str(tmp_path / "model.gguf")


@pytest.mark.parametrize("settings", [{}, {"num_hidden_layers": "two"}, {"num_hidden_layers": 0}])
def test_a_configuration_beside_the_file_without_sizes(settings: dict[str, Any], tmp_path: Path) -> None:
    changed_model(tmp_path, lambda _: None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **settings}))
    with pytest.raises(CheckpointError, match=r"model\.gguf: .* has no valid num_hidden_layers"):
        open_checkpoint(tmp_path)


def test_experts_of_gpt_oss_that_do_not_match(tmp_path: Path) -> None:
    changed_model(tmp_path, add("blk.0.ffn_gate_exps.weight"), "gpt-oss")
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss", "num_hidden_layers": 1}')
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj': gate, up and down .* do not match"):
        open_checkpoint(tmp_path)


def test_a_file_that_changes(source: Callable[[str], Path], tmp_path: Path) -> None:
    file = write_gguf(source("mixtral"), tmp_path / "model.gguf")
    opened = open_checkpoint(file)
    os.truncate(file, 2000)
    with pytest.raises(CheckpointError, match=r"model\.gguf: tensor '.*': the file was modified during the run"):
        opened.tensor("model.embed_tokens.weight")
    with pytest.raises(CheckpointError, match=r"model\.gguf: (tensor '.*': )?truncated"):
        open_checkpoint(file)

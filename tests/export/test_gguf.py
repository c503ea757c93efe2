"""GGUF files: content as read by gguf, agreement with llama.cpp if it is installed, and rejections."""

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, processors

import moepack
from gguf_support import write_merged_tokenizer
from moepack import UnsupportedModelError
from moepack.checkpoint import Checkpoint, describe
from moepack.export import export
from moepack.export.directory import dense_entries, entry_tensor, tensor_entry
from moepack.export.gguf import splits
from moepack.export.gguf.architectures import model_of
from moepack.export.gguf.experts import stacks
from moepack.export.gguf.pieces import scores
from moepack.export.gguf.vocabulary import Vocabulary
from moepack.format import PackedDirectory
from moepack.methods import create
from moepack.methods.finequant import FineQuant

gguf = pytest.importorskip("gguf")

SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 96, "head_dim": 32, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "num_key_value_heads": 4},
    "deepseek_v2": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "moe_intermediate_size": 96, "routed_scaling_factor": 1.5, "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    },
}  # fmt: skip
NAMES = {
    "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe", "deepseek_v2": "deepseek2"
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
    "mscale": 0.7, "mscale_all_dim": 0.7,
}  # fmt: skip

Make = Callable[..., Path]


def write_pieces(directory: Path) -> None:
    """Write a tokenizer of pieces: control tokens, all bytes, letters, and some joint pieces."""
    pieces = ["<unk>", "</s>", "<s>", *(f"<0x{value:02X}>" for value in range(256)), "\u2581", *"Taehlnst"]
    merges = [("h", "e"), ("t", "he"), ("\u2581", "the"), ("a", "s")]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "</s>", "<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", bos_token="<s>"
    )
    fast.save_pretrained(directory)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Packed directories of tiny models with changed settings."""

    def make(architecture: str, dense_bits: int | str = 8, unpacked: str = "", **settings: Any) -> Path:
        torch.manual_seed(3)
        config = transformers.AutoConfig.for_model(architecture, **SIZES | OWN[architecture] | settings)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                scale = 1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape) * scale)
        folder = tmp_path_factory.mktemp(architecture)
        model.save_pretrained(folder / "source")
        write_merged_tokenizer(folder / "source")
        method = FineQuant(bits=4, group_size=32, dense_bits=dense_bits)
        if unpacked:
            method = create("finequant", bits=f"4,{unpacked}=16", group_size=32, dense_bits=dense_bits)
        moepack.compress(folder / "source", folder / "packed", method=method)
        return folder / "packed"

    return make


@pytest.fixture(scope="module")
def files(packed: Make) -> Callable[[str], tuple[Path, Path]]:
    """A function from an architecture to its packed directory and GGUF file."""

    @cache
    def make(architecture: str) -> tuple[Path, Path]:
        directory = packed(architecture)
        export(directory, directory.with_name("model.gguf"), "gguf")
        return directory, directory.with_name("model.gguf")

    return make


@pytest.fixture(scope="module", params=OWN)
def exported(request: Any, files: Callable[[str], tuple[Path, Path]]) -> tuple[str, Path, Path]:
    return request.param, *files(request.param)


def test_every_tensor_has_llama_cpps_name_and_its_values(exported: tuple[str, Path, Path]) -> None:
    architecture, directory, file = exported
    reader = gguf.GGUFReader(file)
    assert reader.fields["general.architecture"].contents() == NAMES[architecture]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    known = gguf.MODEL_TENSORS[next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == NAMES[architecture])]
    patterns = {gguf.TENSOR_NAMES[kind] for kind in known}
    for name in tensors:
        stem = name.rsplit(".", 1)[0]
        assert stem in patterns or stem.replace(stem.split(".")[1], "{bid}", 1) in patterns, name
    source = PackedDirectory.open(directory)
    for projection in ("gate", "up", "down"):
        (name,) = [n for n, r in source.manifest.packed().items() if r.experts and ".1." in n and projection in n]
        tensor = tensors[f"blk.1.ffn_{projection}_exps.weight"]
        assert tensor.tensor_type.name == "Q4_0"
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(values, source.blob(name).dequantize())
    attention, values = "model.layers.0.self_attn", {}
    for name in [name for name in tensors if name.startswith("blk.0.attn_") and "norm" not in name]:
        values[name.split("_", 1)[1]] = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
    if architecture == "deepseek_v2":
        heads = source.blob(f"{attention}.kv_b_proj.weight").dequantize()[0].reshape(4, 64, 32)
        assert np.array_equal(values["k_b.weight"], heads[:, :32].swapaxes(1, 2))
        assert np.array_equal(values["v_b.weight"], heads[:, 32:])
    else:
        expected = source.blob(f"{attention}.q_proj.weight").dequantize()[0]
        if architecture == "mixtral":  # llama.cpp rotates neighbouring features
            expected = expected.reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64)
        assert np.array_equal(values["q.weight"], expected)
    assert tensors["output_norm.weight"].tensor_type.name == "F32" and "output.weight" in tensors


def test_the_tokenizer_is_in_the_file(exported: tuple[str, Path, Path]) -> None:
    _, directory, file = exported
    fields = gguf.GGUFReader(file).fields
    content = json.loads((directory / "tokenizer.json").read_text())
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == SIZES["vocab_size"]
    assert all(tokens[number] == token for token, number in content["model"]["vocab"].items())
    assert fields["tokenizer.ggml.model"].contents() == "gpt2" and fields["tokenizer.ggml.pre"].contents() == "gpt-2"


def answers_of_llama_cpp(file: Path, texts: Sequence[str]) -> Iterator[tuple[str, int, dict[int, float]]]:
    """Texts with llama.cpp's token counts and the log-probabilities of 100 next tokens.

    Where the likeliest is the end, llama.cpp tells none.
    """
    llama = pytest.importorskip("xllamacpp", reason="llama.cpp (xllamacpp) is not installed")
    settings = llama.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel, settings.warmup, settings.fit_params = 256, 1, False, False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    server = llama.Server(settings)
    for text in texts:
        asked = {"prompt": text, "n_predict": 1, "n_probs": 100, "temperature": 0.0, "cache_prompt": False}
        answer = server.handle_completions(asked)
        answer = answer if isinstance(answer, dict) else json.loads(answer)
        if told := answer["choices"][0]["logprobs"]:
            top = told["content"][0]["top_logprobs"]
            yield text, answer["usage"]["prompt_tokens"], {entry["id"]: entry["logprob"] for entry in top}


def assert_llama_cpp_agrees(directory: Path, file: Path) -> None:
    """Up to a mean difference of 0.05 in logarithms of probabilities: it rounds activations to 8 bits.

    That is for two layers; the errors of more add up as their root does.
    """
    texts = "There, then: the sea was calm, and she'd 12 ships. \u00e9t\u00e9", "The end\n\n of the  tale?"
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(directory), moepack.load(directory, torch.float32)
    moepack.set_compute_mode("exact", model)
    within = 0.05 * (model.config.num_hidden_layers / 2) ** 0.5
    answers = [*answers_of_llama_cpp(file, texts)]
    assert answers
    for text, tokens, found in answers:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            expected = model(input_ids=ids).logits[0, -1].log_softmax(-1)
        assert (tokens, len(found)) == (ids.shape[1], 100)
        assert sum(abs(found[token] - expected[token].item()) for token in found) / len(found) < within


def test_llama_cpp_agrees(exported: tuple[str, Path, Path]) -> None:
    assert_llama_cpp_agrees(*exported[1:])


@pytest.mark.parametrize(
    "settings",
    [{"rope_parameters": YARN, "dense_bits": "shared=8"}, {"q_lora_rank": None, "num_hidden_layers": 26}],
    ids=str,
)
def test_llama_cpp_agrees_about_latents(settings: dict[str, Any], packed: Make) -> None:
    """With scaled positions, unpacked attention, and queries without a latent."""
    pytest.importorskip("xllamacpp", reason="llama.cpp (xllamacpp) is not installed")
    directory = packed("deepseek_v2", **settings)
    export(directory, directory.with_name("model.gguf"), "gguf")
    assert_llama_cpp_agrees(directory, directory.with_name("model.gguf"))


@pytest.mark.parametrize("architecture", OWN)
def test_unpacked_experts_are_stacked_by_projection(architecture: str, packed: Make) -> None:
    layers = 3 if architecture == "deepseek_v2" else 2  # its first layer has no experts
    directory = packed(architecture, unpacked="layers.1.mlp.experts", num_hidden_layers=layers)
    file, opened = directory.with_name("model.gguf"), PackedDirectory.open(directory)
    held = {entry.name: entry_tensor(entry) for entries in dense_entries(opened) for entry in entries}
    export(directory, file, "gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    described = describe(Checkpoint.open(directory.with_name("source")))
    layer = next(layer for layer in described.layers if ".layers.1." in layer.name)
    for part in layer.projections:
        found = tensors[f"blk.1.ffn_{part.name.removesuffix('_proj')}_exps.weight"]
        assert found.tensor_type == gguf.GGMLQuantizationType.BF16
        values = torch.from_numpy(found.data.copy()).view(torch.bfloat16).view(part.shape)
        assert torch.equal(values, torch.stack([held[name] for name in part.sources]))
        packed_one = found.name.replace("blk.1", "blk.2" if layers == 3 else "blk.0")
        assert tensors[packed_one].tensor_type == gguf.GGMLQuantizationType.Q4_0
    if importlib.util.find_spec("xllamacpp"):
        assert_llama_cpp_agrees(directory, file)


def test_unpacked_experts_of_one_tensor() -> None:
    """Two projections in one tensor of all experts, as transformers' modules hold them."""
    values = torch.arange(2 * 6 * 4, dtype=torch.float32).view(2, 6, 4).bfloat16()
    down = values[:, :4, :3].contiguous()
    entries = [
        tensor_entry("model.layers.4.mlp.experts.gate_up_proj", values),
        tensor_entry("model.layers.4.mlp.experts.down_proj", down),
        tensor_entry("model.norm.weight", values[0, 0]),
    ]
    found, others = stacks("mixtral", entries)
    assert [entry.name for entry in others] == ["model.norm.weight"]
    expected = {"gate_proj": values[:, :3], "up_proj": values[:, 3:], "down_proj": down}
    for stack in found:
        own = torch.from_numpy(stack.data().copy()).view(torch.bfloat16).view(stack.shape)
        assert torch.equal(own, expected.pop(stack.projection)) and stack.dtype == "BF16"
    assert not expected


def test_pieces_of_sentences(files: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """A tokenizer like Mixtral's: spaces are characters, unknown characters fall back to bytes, and a space precedes
    the text."""
    directory = tmp_path / "packed"
    shutil.copytree(files("mixtral")[0], directory)
    write_pieces(directory)
    export(directory, tmp_path / "model.gguf", "gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert kinds.count(gguf.TokenType.BYTE) == 256 and kinds.count(gguf.TokenType.UNKNOWN) == 1
    assert_llama_cpp_agrees(directory, tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["deepseek-llm", "deepseek-coder"])
def test_rules_of_several_expressions(name: str, files: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    directory = tmp_path / "packed"
    shutil.copytree(files("deepseek_v2")[0], directory)
    content = json.loads((directory / "tokenizer.json").read_text())
    (*expressions, _), *_ = [parts for parts, known in splits._NAMES.items() if known == name]
    isolated = {"type": "Split", "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            *({**isolated, "pattern": {"Regex": expression}} for expression in expressions),
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))
    export(directory, tmp_path / "model.gguf", "gguf")
    assert gguf.GGUFReader(tmp_path / "model.gguf").fields["tokenizer.ggml.pre"].contents() == name
    assert_llama_cpp_agrees(directory, tmp_path / "model.gguf")


def test_merges_that_no_order_of_pieces_reproduces_have_no_scores() -> None:
    tokens, merges = ["a", "b", "c", "ab", "bc", "abc"], [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]
    assert scores(tokens, merges) == [-3.0, -3.0, -3.0, 0.0, -1.0, -2.0]
    assert scores(tokens, merges[:3]) is None  # llama.cpp would join a and bc too
    assert scores(tokens, [*merges[:2], merges[2], ("b", "c"), merges[3]]) is None


@pytest.mark.parametrize(
    ("architecture", "settings", "reason"),
    [
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob=False"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob=True"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmoe", {"num_key_value_heads": 2}, "num_key_value_heads=4"),
        ("mixtral", {"sliding_window": 64}, "sliding_window"),
        ("mixtral", {"rope_parameters": YARN}, "'yarn'"),
        ("deepseek_v2", {"rope_parameters": YARN | {"mscale": 1.0}}, "equal mscale and mscale_all_dim"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "topk_method='greedy'"),
        ("deepseek_v2", {"q_lora_rank": None}, "needs 26 or 27 layers, but this model has 2"),
    ],
)
def test_models_that_llama_cpp_computes_differently_are_rejected(
    architecture: str, settings: dict[str, Any], reason: str
) -> None:
    config = transformers.AutoConfig.for_model(architecture, **SIZES | OWN[architecture]).to_dict()
    model_of(config)
    with pytest.raises(UnsupportedModelError, match=reason):
        model_of(config | settings)


def test_other_architectures_and_tokenizers_are_refused(exported: tuple[str, Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="not 'jetmoe'"):
        model_of({"model_type": "jetmoe"})
    with pytest.raises(UnsupportedModelError, match="needs a tokenizer"):
        Vocabulary(tmp_path, 300)
    content = json.loads((exported[1] / "tokenizer.json").read_text())
    for change, reason in (
        ({"pre_tokenizer": {"type": "Whitespace"}}, "a pre-tokenizer"),
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"model": {**content["model"], "type": "Unigram"}}, "Unigram"),
        ({"model": {**content["model"], "merges": []}}, "no merges"),
        ({"model": {**content["model"], "ignore_merges": True}}, "ignore_merges"),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content | change))
        with pytest.raises(UnsupportedModelError, match=reason):
            Vocabulary(tmp_path, 300)

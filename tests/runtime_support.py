"""Tiny models of every supported architecture, and packed directories of them in a trivial format.

The format ("MOEPTEST": a header and float32 weights) replaces a real one in tests of loading and routing, so that a
codec fault cannot hide a runtime fault, and vice versa.
"""

import math
import string
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from moepack.methods import PackedBytes, PacksLinears, SimpleMethod, Solution
from moepack.pipeline import compress
from moepack.registry import register

MAGIC = b"MOEPTEST"
KIND = "test-dense"


class DenseMatrix:
    """Float32 weights after a header of eight 64-bit words: the magic, E, R, C, axes and zeros."""

    kind = format = KIND
    modes = ("exact",)

    def __init__(self, data):
        *self.shape, self.ndim = map(int, data[8:40].view(np.uint64))
        self.shape = tuple(self.shape)
        self.nbytes = data.nbytes
        count = math.prod(self.shape)
        if data.nbytes != 64 + -(-4 * count // 64) * 64:
            raise ValueError(f"{data.nbytes} bytes do not hold {self.shape}")
        self.weights = data[64 : 64 + 4 * count].view(np.float32).reshape(self.shape)

    def details(self):
        return {"width": 32}

    def verify(self):
        if not np.isfinite(self.weights).all():
            raise ValueError("test-dense: a weight is not finite")

    def dequantize(self, dtype="float32"):
        if dtype == "float32":
            return self.weights
        return torch.from_numpy(self.weights).bfloat16().view(torch.uint16).numpy()

    def matmul_grouped(self, x, offsets, mode=None):
        assert mode in (None, *self.modes)
        if x.dtype == np.uint16:
            x = (x.astype(np.uint32) << 16).view(np.float32)
        y = np.empty((len(x), self.shape[1]), np.float32)
        for expert in range(self.shape[0]):
            rows = slice(offsets[expert], offsets[expert + 1])
            y[rows] = x[rows] @ self.weights[expert].T
        return y


register(KIND, MAGIC, DenseMatrix)


def dense_blob(weights, ndim=3):
    """Pack float32 weights [E, R, C] with a number of visible axes into the test format."""
    header = np.zeros(64, np.uint8)
    header[:8] = np.frombuffer(MAGIC, np.uint8)
    header[8:40] = np.array([*weights.shape, ndim], np.uint64).view(np.uint8)
    body = np.ascontiguousarray(weights, np.float32).view(np.uint8).reshape(-1)
    return np.concatenate([header, body, np.zeros(-len(body) % 64, np.uint8)])


COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
SETTINGS = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 6, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 6, "head_dim": 8},
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "olmoe": {"num_experts": 6},
    "phimoe": {"num_local_experts": 4},
    "granitemoe": {"num_local_experts": 4},
    "switch_transformers": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "num_experts": 4,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.0,
    },
}
if not hasattr(transformers.models.granitemoe.modeling_granitemoe, "GraniteMoeExperts"):
    del SETTINGS["granitemoe"]  # older transformers have no experts module there
ARCHITECTURES = sorted(SETTINGS)
SWITCH = "switch_transformers"


def python(code, *arguments):
    """Run a script in a fresh interpreter."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def tiny_model(architecture, seed=0):
    """A random float32 model whose expert weights are large enough to matter."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(architecture, **{**COMMON, **SETTINGS[architecture]})
    seq2seq = architecture == SWITCH
    auto = transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5))
    return model


def letters():
    """A tokenizer of 64 characters without an end token."""
    alphabet = string.ascii_letters + string.digits + " ."
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def experts_modules(model):
    """(path, module) of every experts module of the model."""
    found = [(name, module) for name, module in model.named_modules() if name.endswith(".experts")]
    assert found
    return found


def expert_weights(module):
    """projection -> [E, R, C] of an experts module of transformers."""
    if isinstance(module, torch.nn.ModuleDict):
        names = ("wi", "wo")
        return {name: torch.stack([getattr(expert, name).weight for expert in module.values()]) for name in names}
    gate, up = module.gate_up_proj.chunk(2, dim=1)
    return {"gate_proj": gate, "up_proj": up, "down_proj": module.down_proj}


def inputs(model, tokens=20, batch=2, seed=1):
    """Token ids for the model's forward."""
    ids = torch.from_numpy(np.random.default_rng(seed).integers(3, 64, (batch, tokens)))
    return {"input_ids": ids, **({"labels": ids[:, :7].contiguous()} if model.config.is_encoder_decoder else {})}


def logits(model, **kwargs):
    with torch.inference_mode():
        return model(**inputs(model, **kwargs)).logits


class DenseMethod(PacksLinears, SimpleMethod):
    """A compression method for tests: float32 weights, of experts and of linear layers of `roles`."""

    name = "test-dense"
    settings: ClassVar = {}
    dense_roles = frozenset()

    def __init__(self, roles=()):
        self.dense_roles = frozenset(roles)

    def bound(self, shape, role="experts"):
        return 128 + 4 * math.prod(shape)

    def solve(self, stage):
        assert {weights.role for weights in stage.tensors.values()} <= self.dense_roles | {"experts"}
        ((name, weights),) = stage.tensors.items()
        values = torch.stack([weights.expert(expert).float() for expert in stage.experts])
        stage.advance(values.numel())
        return {name: Solution({"values": values})}

    def pack(self, weights, solution):
        return PackedBytes(KIND, dense_blob(solution.parts["values"].numpy(), weights.ndim))


def write_packed(model, directory, method=None):
    """Compress a model into a new packed directory; return its path."""
    directory = Path(directory)
    source = directory.with_name(directory.name + "-source")
    model.save_pretrained(source)
    compress(source, directory, method=method or DenseMethod())
    return directory

"""Write the golden packed directory and its content.

    python tests/golden/make_directory.py

creates tests/golden/directory-v1 (a one-layer Mixtral of a few KB) and directory-v1.json (the codes, levels and dense
bytes that a reader must find). Directories of released versions must stay readable: a new version adds a golden
directory and never changes this one.
"""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import moepack
from moepack.format import PackedDirectory
from moepack.methods.qmoe.ternary import Ternary

HERE = Path(__file__).parent
EXPERTS, HIDDEN, INNER, VOCABULARY = 2, 16, 24, 32

CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "head_dim": 8,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "model_type": "mixtral",
    "num_attention_heads": 2,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "num_local_experts": EXPERTS,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "vocab_size": VOCABULARY,
}


def weights() -> dict[str, torch.Tensor]:
    """Return the checkpoint: random, with a row of zeros, a row of one level and a row without a negative weight."""
    rng = np.random.default_rng(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).to(torch.bfloat16)

    layer = "model.layers.0"
    tensors = {"model.embed_tokens.weight": random(VOCABULARY, HIDDEN), "model.norm.weight": random(HIDDEN)}
    tensors |= {f"{layer}.{side}_layernorm.weight": random(HIDDEN) for side in ("input", "post_attention")}
    for name, rows in {"q": 16, "k": 8, "v": 8, "o": 16}.items():
        tensors[f"{layer}.self_attn.{name}_proj.weight"] = random(rows, HIDDEN)
    tensors[f"{layer}.block_sparse_moe.gate.weight"] = random(EXPERTS, HIDDEN)
    for expert in range(EXPERTS):
        for name, shape in {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}.items():
            matrix = random(*shape)
            matrix[1] = 0
            matrix[2] = 0.5
            matrix[3] = matrix[3].abs()
            tensors[f"{layer}.block_sparse_moe.experts.{expert}.{name}.weight"] = matrix
    return tensors


def expected(directory: PackedDirectory, tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    """Return what readers must find: rows of codes spelled with `-0+`, levels, and dense tensors in hex."""
    packed = {}
    for name in directory.tensors():
        codes, levels = directory.blob(name).decode(), directory.blob(name).parameters("levels")
        rows = ["".join("-0+"[code + 1] for code in row) for row in codes.reshape(-1, codes.shape[2])]
        packed[name] = {"shape": codes.shape, "rows": rows, "levels": [float(level) for level in levels.ravel()]}
    dense = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    return {"packed": packed, "dense": {name: t.view(torch.uint8).numpy().tobytes().hex() for name, t in dense.items()}}


def main() -> None:
    """Make the directory and the expectations."""
    out = HERE / "directory-v1"
    if out.exists():
        raise SystemExit(f"{out} exists: golden files are added, never changed")
    tensors = weights()
    with tempfile.TemporaryDirectory() as name:
        source = Path(name)
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        (source / "config.json").write_text(json.dumps(CONFIG, indent=2, sort_keys=True) + "\n")
        (source / "generation_config.json").write_text('{"eos_token_id": 1}\n')
        moepack.compress(source, out, method=Ternary())
    text = json.dumps(expected(PackedDirectory.open(out), tensors), indent=1)
    (HERE / "directory-v1.json").write_text(text + "\n")
    shutil.rmtree(HERE / "__pycache__", ignore_errors=True)


if __name__ == "__main__":
    main()

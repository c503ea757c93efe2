"""Measures the memory of compressing quantized checkpoints: fp8 with block scales (Qwen3) and mxfp4 (gpt-oss).

    python -m benches.cpu.sources [--experts 16] [--layers 2] [--out FILE]

The checkpoints are synthetic (hidden 1,024, inner 2,048, one shard per layer; 16 experts in 2 layers are 0.2 GB in fp8,
0.11 GB in mxfp4) and removed afterwards. Each is compressed by `finequant` at 4 bits in its own process, on one thread.
Prints its peak anonymous memory and the guaranteed bound: 1 GiB + 4 times the largest layer in bf16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from benches.tools import machine

HIDDEN, INNER, BLOCK = 1024, 2048, 128
WORK = (
    "import sys, moepack, json; from moepack.methods.finequant import FineQuant\n"
    "report = moepack.compress(sys.argv[1], sys.argv[2], method=FineQuant(bits=4, calibration=None), threads=1)\n"
    "print(json.dumps([report.peak_memory, report.expert_weights, report.seconds]))"
)
Tensors = dict[str, torch.Tensor]


def noise(*shape: int) -> torch.Tensor:
    """Random bytes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def fp8(name: str, shape: torch.Size) -> Tensors:
    """The matrices of all experts, each with its scales."""
    experts, rows, columns = shape
    stem, tensors = name.rpartition(".")[0], {}
    parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
    for expert in range(experts):
        for part in parts:
            matrix = (rows // len(parts), columns)
            weight = f"{stem}.{expert}.{part}.weight"
            tensors[weight] = (torch.rand(matrix) - 0.5).to(torch.float8_e4m3fn)
            tensors[f"{weight}_scale_inv"] = torch.rand(-(-matrix[0] // BLOCK), -(-columns // BLOCK)) / 16
    return tensors


def mxfp4(name: str, shape: torch.Size) -> Tensors:
    """The codes and exponents of all experts."""
    experts, columns, rows = shape
    scales = noise(experts, rows, columns // 32) % 4 + 118
    return {f"{name}_blocks": noise(experts, rows, columns // 32, 16), f"{name}_scales": scales}


SETTINGS = {
    "vocab_size": 1024, "hidden_size": HIDDEN, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
KINDS: dict[str, tuple[Callable[..., Tensors], Any, dict[str, Any], dict[str, Any]]] = {
    "fp8": (fp8, Qwen3MoeConfig, {"moe_intermediate_size": INNER}, {"weight_block_size": [BLOCK, BLOCK]}),
    "mxfp4": (mxfp4, GptOssConfig, {"intermediate_size": INNER}, {}),
}


def build(method: str, directory: Path, layers: int, experts: int) -> None:
    """Write a checkpoint, a shard for each layer and one for the rest."""
    quantize, kind, own, quantization = KINDS[method]
    config = kind(**SETTINGS, **own, num_hidden_layers=layers, num_experts=experts, num_local_experts=experts)
    with torch.device("meta"):
        names = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    shards: dict[str, list[str]] = {}
    for name in names:
        shards.setdefault(name.split(".mlp.")[0] if ".experts." in name else "rest", []).append(name)
    index: dict[str, str] = {}
    for number, members in enumerate(shards.values(), 1):
        tensors: Tensors = {}
        for name in members:
            stacked = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
            plain = {name: torch.randn(names[name]).to(torch.bfloat16) / 32}
            tensors |= quantize(name, names[name]) if stacked else plain
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, directory / file)
        index |= dict.fromkeys(tensors, file)
    settings = config.to_dict() | {"quantization_config": {"quant_method": method, **quantization}}
    (directory / "config.json").write_text(json.dumps(settings))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def measure(method: str, layers: int, experts: int) -> dict[str, Any]:
    """Compress a synthetic checkpoint in another process."""
    with tempfile.TemporaryDirectory(prefix="moepack-sources-") as folder:
        source = Path(folder) / "source"
        source.mkdir()
        build(method, source, layers, experts)
        stored = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        command = [sys.executable, "-W", "ignore", "-c", WORK, str(source), f"{folder}/out"]
        peak, weights, seconds = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    promised = (1 << 30) + 4 * 2 * weights // layers
    return {
        "source": method,
        "stored": stored,
        "peak": peak,
        "promised": promised,
        "weights": weights,
        "seconds": seconds,
    }


def main() -> None:
    """Measure both kinds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    figures = [measure(method, options.layers, options.experts) for method in KINDS]
    for each in figures:
        stored, peak, promised = (f"{each[name] / 1e6:,.0f} MB" for name in ("stored", "peak", "promised"))
        weights = f"{each['weights'] / 1e6:.0f} * 10^6 weights in {each['seconds']:.0f} s"
        print(f"{each['source']:6} {stored} stored, peak {peak} of {promised}, {weights}")
    if options.out is not None:
        machine.save(options.out, 1, figures)


if __name__ == "__main__":
    main()

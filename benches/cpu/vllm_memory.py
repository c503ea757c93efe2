"""Measures the memory of a process of vLLM's CPU build beside the bytes of a packed model.

    python -m benches.cpu.vllm_memory [--layers 12] [--bits 4] [--directory DIR] [--results FILE]

Python is that of `make vllm`. Two random models of Qwen3-MoE's kind, packed by `finequant`, differ in their layers
only: one layer, and as many as `--layers`. Each runs in a process of its own and reads prompts that use all experts.
What the larger process uses more, without keys and values, is compared with what its packed directory has more.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benches.gpu.vllm import in_process
from benches.tools import machine

SHAPES = {
    "vocab_size": 4096, "hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 4,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip

RUNS = ("--sequences", "8", "--prompt", "96", "--new", "8", "--rounds", "1", "--eager")


def packed(layers: int, bits: int, place: Path) -> Path:
    """Write a random model and pack it."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import moepack
    from moepack.methods.finequant import FineQuant

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=layers, **SHAPES))
    model.bfloat16().save_pretrained(place / f"model-{layers}")
    method = FineQuant(bits=bits, dense_bits=8, calibration=None)
    moepack.compress(place / f"model-{layers}", place / f"packed-{layers}", method=method)
    return place / f"packed-{layers}"


def compare(layers: int, bits: int, place: Path) -> dict[str, Any]:
    """The growth of the process and of the packed bytes, in bytes."""
    found = {
        count: in_process(str(packed(count, bits, place)), (*RUNS, "--dtype", "bfloat16"), "cpu")
        for count in (1, layers)
    }
    small, large = (found[count] for count in (1, layers))
    more = {name: large["memory"][name] - small["memory"][name] for name in ("loaded", "anonymous")}
    files = large["bytes of the files"] - small["bytes of the files"]
    return {
        "layers": layers,
        "bits": bits,
        "packed bytes": files,
        "process": more["loaded"],
        "anonymous": more["anonymous"],
        "process / packed": round(more["loaded"] / files, 4),
        "engines": [small, large],
    }


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        figures = compare(options.layers, options.bits, Path(place))
    print(json.dumps(figures, indent=1))
    if options.results:
        machine.save(options.results, int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)), figures)


if __name__ == "__main__":
    main()

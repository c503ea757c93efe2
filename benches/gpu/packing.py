"""Times compression on a GPU, by method, of a made-up checkpoint of Qwen3-30B-A3B's or DeepSeek-V3's layers.

    python -m benches.gpu.packing [--shapes qwen3-30b] [--layers 1 3] [--part 1] [--methods auto qmoe finequant]
        [--samples 128] [--bits 3] [--devices cuda cpu] [--threads 8] [--stacks] [--kernels] [--results FILE]

Each method packs a checkpoint of each number of layers, in a process of its own. The difference of their times over the
difference of their layers is the time of a layer, which is independent of the embedding, the head and start-up; with
one number of layers, the time of a layer includes those. It is extrapolated to the layers of the model. The speeds of
formats on the GPU, which `auto` asks for, are measured before. Processor seconds count all threads, which sleep while
they are idle. `--part 4` leaves out three of four experts and three of four choices of a token, so that an expert has
as many tokens. `--stacks` also gives seconds by function, from samples, and `--kernels` seconds by kernel. Weights are
normal, the router is random, and the vocabulary has 4,096 tokens. This measures no quality.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # As in the command line; read when torch is imported.

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedTokenizerFast, Qwen3MoeConfig

import moepack
from benches.tools import machine
from benches.tools.stacks import Stacks
from moepack.backends.speeds import speeds_here
from moepack.methods import create

VOCABULARY = 4096
LAYERS = {"qwen3-30b": 48, "deepseek-v3": 58}
"""Layers of experts of the whole model."""


def config(shapes: str, layers: int, part: int) -> Any:
    """The configuration of the model with a number of layers, all of them with experts: one of `part` experts."""
    common = {"vocab_size": VOCABULARY, "num_hidden_layers": layers, "tie_word_embeddings": False}
    common["num_experts_per_tok"] = 8 // part
    if shapes == "qwen3-30b":
        return Qwen3MoeConfig(
            hidden_size=2048, moe_intermediate_size=768, num_experts=128 // part, norm_topk_prob=True,
            num_attention_heads=32, num_key_value_heads=4, head_dim=128, architectures=["Qwen3MoeForCausalLM"],
            **common,
        )  # fmt: skip
    return DeepseekV3Config(
        n_routed_experts=256 // part, first_k_dense_replace=0, architectures=["DeepseekV3ForCausalLM"], **common
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(["</s>", *alphabet])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


def build(directory: Path, shapes: str, layers: int, part: int) -> None:
    """Write the checkpoint, one shard per layer and one for the rest."""
    settings = config(shapes, layers, part)
    settings.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(settings).state_dict()
    groups: dict[str, dict[str, torch.Tensor]] = {}
    size = 1 << 26
    for name, tensor in unfused(tensors):
        size = max(size, tensor.numel() + 1)
        groups.setdefault(".".join(name.split(".")[:3]) if ".layers." in name else "rest", {})[name] = tensor
    pool, places = torch.randn(size, generator=torch.Generator().manual_seed(0)), {}
    for number, group in enumerate(groups.values()):
        file = f"model-{number:05}.safetensors"
        save_file({name: weights(tensor, name, pool) for name, tensor in group.items()}, directory / file)
        places |= dict.fromkeys(group, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def unfused(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and shapes of a checkpoint, which has each expert's matrices by themselves."""
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stem, _, projection = name.rpartition(".")
            for expert, matrix in enumerate(tensor):
                if projection == "down_proj":
                    yield f"{stem}.{expert}.down_proj.weight", matrix
                else:
                    yield f"{stem}.{expert}.gate_proj.weight", matrix[: len(matrix) // 2]
                    yield f"{stem}.{expert}.up_proj.weight", matrix[len(matrix) // 2 :]
        else:
            yield name, tensor


def weights(like: torch.Tensor, name: str, pool: torch.Tensor) -> torch.Tensor:
    """Values of a tensor: ones for norms, otherwise a window of the pool that depends on the name."""
    if "norm" in name:
        return torch.ones(like.shape, dtype=torch.bfloat16)
    count = like.numel()
    start = sum((place + 1) * 1_000_003 * ord(letter) for place, letter in enumerate(name)) % (len(pool) - count)
    return (pool[start : start + count].view(like.shape) * like.shape[-1] ** -0.5).bfloat16()


def work(options: argparse.Namespace) -> None:
    """The measured process: compress, print seconds and peak memory."""
    torch.set_num_threads(options.threads)
    asked: dict[str, Any] = {"calibration": "built-in", "samples": options.samples, "device": options.devices[0]}
    if options.work == "auto":
        asked |= {"bits_per_weight": options.bits, "prefer": "quality"}
    elif options.work == "rate":
        asked |= {"bits_per_weight": options.bits}
    elif options.work == "finequant":
        asked |= {"bits": round(options.bits)}
    stacks = Stacks("moepack") if options.stacks else None
    start = time.perf_counter()
    method = create(options.work, **asked)
    source, out = options.directory / f"model-{options.layers[0]}", options.directory / "packed"
    kernels = profile(activities=[ProfilerActivity.CUDA]) if options.kernels else None
    with stacks or nullcontext(), kernels or nullcontext():
        report = moepack.compress(source, out, method=method, threads=options.threads, check=False)
    figures: dict[str, Any] = {"seconds": time.perf_counter() - start, "bits": report.bits_per_weight}
    if stacks:
        figures["stacks"] = stacks.seconds(60)
    if kernels:
        spent = {event.key: event.self_device_time_total / 1e6 for event in kernels.key_averages()}
        figures["kernels"] = {
            name[:100]: round(spent[name], 2) for name in sorted(spent, key=spent.__getitem__)[:-31:-1]
        }
        figures["kernels"]["all"] = round(sum(spent.values()), 2)
    used = resource.getrusage(resource.RUSAGE_SELF)
    figures |= {"memory": used.ru_maxrss * 1024, "processor_seconds": used.ru_utime + used.ru_stime}
    if torch.cuda.is_available():
        figures["device_memory"] = torch.cuda.max_memory_allocated()
    print(json.dumps(figures))


def measure(method: str, device: str, layers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of a process that packs a number of layers."""
    command = [sys.executable, "-m", __spec__.name, "--work", method, "--layers", str(layers), "--devices", device]
    for name in ("directory", "samples", "bits", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    command += [f"--{name}" for name in ("stacks", "kernels") if getattr(options, name)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    shutil.rmtree(options.directory / "packed")
    figures: dict[str, Any] = json.loads(printed.splitlines()[-1])
    print(f"{method} on {device}, layers: {layers}, {figures}", file=sys.stderr, flush=True)
    return figures


def main() -> None:
    """Build the checkpoints, and measure every method on every device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=list(LAYERS), default="qwen3-30b")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 3], help="two numbers of layers, or one")
    parser.add_argument("--part", type=int, default=1, choices=[1, 2, 4], help="one of this many experts, for profiles")
    parser.add_argument("--methods", nargs="+", default=["auto", "qmoe", "finequant"])
    parser.add_argument("--samples", type=int, default=128, help="calibration samples of 512 tokens")
    parser.add_argument("--bits", type=float, default=3.0, help="bits per weight, for `auto`, `rate` and `finequant`")
    parser.add_argument("--devices", nargs="+", default=["cuda"])
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--directory", type=Path, help="folder for the checkpoints; default: a temporary directory")
    parser.add_argument("--stacks", action="store_true", help="sample stacks")
    parser.add_argument("--kernels", action="store_true", help="profile kernels")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        options.directory = Path(directory)
        for layers in options.layers:
            build(options.directory / f"model-{layers}", options.shapes, layers, options.part)
        for device in {*options.devices} - {"cpu"} if "auto" in options.methods else ():
            start = time.perf_counter()
            speeds_here(device)
            print(f"speeds on {device}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        for method, device in ((method, device) for method in options.methods for device in options.devices):
            taken = [measure(method, device, layers, options) for layers in options.layers]
            layer = taken[0]["seconds"] / options.layers[0]
            if len(taken) > 1:
                layer = (taken[1]["seconds"] - taken[0]["seconds"]) / (options.layers[1] - options.layers[0])
            row = {"shapes": options.shapes, "method": method, "on": device, "seconds_per_layer": round(layer, 2)}
            row["minutes"] = round(layer * LAYERS[options.shapes] / 60, 1)
            rows.append({**row, **dict(zip(("few", "many"), taken, strict=False))})
            print(json.dumps(rows[-1]), flush=True)
            if options.results:
                what = {"layers": options.layers, "samples": options.samples, "bits": options.bits}
                what["part"] = options.part
                machine.save(options.results, options.threads, {**what, "rows": rows}, options.devices[0])


if __name__ == "__main__":
    main()

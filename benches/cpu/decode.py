"""Compares the decoding speed of packed models with bf16 in torch: tokens per second, one prompt, all in one run.

    python -m benches.cpu.decode MODEL [MODEL ...] [--calibration TEXT] [--threads N] [--rounds 7] [--tokens 32]

Each model is packed by the method `ternary` and, with a calibration text, by `qmoe` with ternary and two-bit experts.
One more model is synthetic (Mixtral's layout, random weights); its experts, packed or not, exceed the last-level cache.
The baseline is the same checkpoint in bf16 with the fastest of transformers' CPU implementations of experts. All decode
greedily from the same prompt with transformers' `generate` and the same number of threads. They alternate round by
round, so that drifts of the machine's speed affect all of them. Prints medians over the rounds, after one warm-up
round.

    python -m benches.cpu.decode --steps deepseek_v3 gpt_oss qwen3_next --no-large

creates a small random model of each architecture, packs it to four bits (experts and linear layers), and compares its
decoding steps in the core with those of transformers with the same packed layers.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.utils.logging import disable_progress_bar

import moepack
from benches.tools import machine
from moepack.backends.threads import set_threads
from moepack.decoding.decoder import MODES, set_decoding
from moepack.methods import Method, Qmoe, create
from moepack.methods.qmoe.ternary import Ternary
from moepack.pipeline import compress

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
PROMPT = 16
#: The synthetic model: 6 layers of 8 experts of 3 x 1024 x 3584 weights are 1.06 GB in bf16 and 60 MB packed.
LARGE = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 6, "num_local_experts": 8}

#: Sizes of synthetic models under each architecture's names: 80 to 160 million weights.
SIZES = {
    "hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1024,
    "num_local_experts": 16, "num_experts": 16, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "shared_expert_intermediate_size": 512, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
#: Additional or different settings of an architecture.
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 16, "q_lora_rank": 384, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64, "n_group": 4, "topk_group": 2,
    },
    "qwen3_next": {"linear_num_value_heads": 16, "linear_num_key_heads": 8, "linear_key_head_dim": 64,
                   "linear_value_head_dim": 64},
}  # fmt: skip


def build_large(directory: Path) -> Path:
    """Write the synthetic model; its experts are windows of one sequence of Gaussian numbers."""
    settings = MixtralConfig(
        **LARGE, vocab_size=1024, num_attention_heads=16, num_key_value_heads=4, num_experts_per_tok=2, dtype="bfloat16"
    )
    with torch.device("meta"):
        model = MixtralForCausalLM(settings).bfloat16()
    model.to_empty(device="cpu")
    # Cut at 2.7 sigma, 82% of the weights are zero on the grid of minimum and maximum, as after calibration.
    pool = torch.randn(1 << 25, generator=torch.Generator().manual_seed(0)).clamp_(-2.7, 2.7).mul_(0.02).bfloat16()
    for position, (name, parameter) in enumerate(model.named_parameters()):
        if "norm" in name:
            parameter.data.fill_(1)
            continue
        for number, matrix in enumerate(parameter.data if parameter.dim() == 3 else [parameter.data]):
            start = ((position * 64 + number) * 1_000_003) % (len(pool) - matrix.numel())
            matrix.copy_(pool[start : start + matrix.numel()].view_as(matrix))
    model.save_pretrained(directory)
    return directory


def methods(calibration: str | None) -> Iterator[tuple[str, Method]]:
    """The methods that pack a model."""
    yield "ternary", Ternary()
    if calibration is not None:
        yield "qmoe ternary", Qmoe(calibration, samples=16)
        yield "qmoe 2 bit", Qmoe(calibration, samples=16, bits="2")


def peers(model: Path, work: Path, calibration: str | None) -> dict[str, Any]:
    """The models to compare, by name, loaded in bf16."""
    loaded: dict[str, Any] = {}
    for name, method in methods(calibration):
        path = work / f"{model.name}-{name}".replace(" ", "-")
        bits = compress(model, path, method=method).bits_per_weight
        loaded[f"{name} ({bits:.2f} bits)"] = moepack.load(path, dtype=torch.bfloat16)
    for implementation in IMPLEMENTATIONS:
        loaded[f"bf16 {implementation}"] = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, experts_implementation=implementation
        ).eval()
    return loaded


def decode(model: Any, prompt: torch.Tensor, tokens: int) -> float:
    """Seconds for each of `tokens` tokens after a prompt, without reading the prompt."""
    times: list[float] = []

    class Clock:
        def put(self, value: torch.Tensor) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            pass

    with torch.inference_mode():
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens + 1, min_new_tokens=tokens + 1,
            do_sample=False, streamer=Clock(), pad_token_id=0,
        )  # fmt: skip
    # The prompt comes first, then its next token.
    return (times[-1] - times[1]) / tokens


def compare(model: Path, options: argparse.Namespace, calibration: str | None, work: Path) -> dict[str, float]:
    """Tokens per second of all peers by name; prints the table."""
    loaded = peers(model, work, calibration)
    vocabulary = next(iter(loaded.values())).config.vocab_size
    prompt = torch.arange(PROMPT)[None] * 31 % (vocabulary - 3) + 3
    times: dict[str, list[float]] = {name: [] for name in loaded}
    for turn in range(options.rounds + 1):
        order = list(loaded) if turn % 2 else list(reversed(loaded))
        for name in order:
            seconds = decode(loaded[name], prompt, options.tokens)
            if turn:
                times[name].append(seconds)
    speeds = {name: 1 / statistics.median(values) for name, values in times.items()}
    best = max(speed for name, speed in speeds.items() if name.startswith("bf16"))
    print(f"\n{model.name}\n")
    for name, speed in speeds.items():
        print(f"  {name:28} {speed:8.1f} tokens/s   {speed / best:5.2f} x the fastest bf16", flush=True)
    loaded.clear()
    gc.collect()
    return speeds


def build_small(architecture: str, directory: Path) -> Path:
    """Write a synthetic model of an architecture with Gaussian weights."""
    torch.manual_seed(0)
    settings = AutoConfig.for_model(architecture, **SIZES | OWN.get(architecture, {}), dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return directory


def compare_steps(architecture: str, options: argparse.Namespace, work: Path) -> dict[str, float]:
    """Tokens per second of a synthetic model, decoded by the core and by transformers; prints the table."""
    source, packed = build_small(architecture, work / architecture), work / f"{architecture}-packed"
    compress(source, packed, method=create("finequant", bits=4, dense_bits=4, calibration="none"))
    model = moepack.load(packed, dtype=torch.bfloat16)
    prompt = torch.arange(PROMPT)[None] * 31 % (model.config.vocab_size - 3) + 3
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for turn in range(options.rounds + 1):
        for mode in MODES if turn % 2 else reversed(MODES):
            set_decoding(mode)
            seconds = decode(model, prompt, options.tokens)
            if turn:
                times[mode].append(seconds)
    set_decoding(None)
    speeds = {mode: 1 / statistics.median(values) for mode, values in times.items()}
    assert model.model.forward.steps, "the core has taken no step"
    print(f"\n{architecture}, made up\n")
    for mode, speed in speeds.items():
        print(f"  {mode:28} {speed:8.1f} tokens/s   {speed / speeds['transformers']:5.2f} x transformers", flush=True)
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--calibration", help="text; adds the method qmoe")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", nargs="+", default=[], help="architectures of synthetic models")
    parser.add_argument("--no-large", dest="large", action="store_false", help="omit the synthetic model")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    set_threads(options.threads)
    disable_progress_bar()
    print(json.dumps(machine.describe(options.threads)))
    figures = {}
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        for model in options.models:
            figures[model.name] = compare(model, options, options.calibration, work)
        for architecture in options.steps:
            figures[f"steps of {architecture}"] = compare_steps(architecture, options, work)
        if options.large:
            figures["large"] = compare(build_large(work / "large"), options, None, work)
    if options.out:
        machine.save(options.out, options.threads, figures)


if __name__ == "__main__":
    main()

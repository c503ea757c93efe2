"""Times decoding steps by batch size, and first tokens by prompt length, of a made-up model of Qwen3-30B-A3B's shapes,
or of those of gpt-oss-20b.

"separate" launches operation by operation, as transformers does. Speeds behind long texts are of one sequence, with
keys and values in bfloat16 and in 8 bits. With `--gpus`, layers are split over several GPUs; "same tokens as one GPU"
counts equal tokens of the same model on one GPU.

    PYTHONPATH=python python -m benches.gpu.steps "int4 group 64 symmetric" [--layers 48] [--results FILE]
    PYTHONPATH=python python -m benches.gpu.steps "int4 group 64 symmetric" --architecture gpt_oss --layers 24
    PYTHONPATH=python python -m benches.gpu.steps "int4 group 64 symmetric" --gpus 2
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benches.gpu import models
from benches.gpu.cases import device_name
from moepack.decoding.decoder import DecoderForward
from moepack.decoding.layers import Replacements
from moepack.decoding.prefix import new_cache, set_kv_bits

BATCHES, PROMPTS, CONTEXTS = (1, 8, 32), (512, 2048), (1_000, 8_000, 32_000)
PROMPT, STEPS, WARM = 64, 80, 10


@torch.inference_mode()
def tokens_per_second(model: Any, batch: int) -> tuple[float, list[int]]:
    """Tokens per second of all sequences, and the tokens of the first."""
    model.model.forward = DecoderForward(model.model)
    ids = torch.randint(3, 4000, (batch, PROMPT), generator=torch.Generator().manual_seed(1)).cuda()
    state, found, start = model(ids, use_cache=True), [], 0.0
    for step in range(STEPS):
        token = state.logits[:, -1].argmax(-1, keepdim=True)
        found.append(token[0])
        if step == WARM:
            models.wait()
            start = time.perf_counter()
        state = model(token, past_key_values=state.past_key_values, use_cache=True)
    models.wait()
    return batch * (STEPS - WARM) / (time.perf_counter() - start), torch.cat(found).tolist()


@torch.inference_mode()
def behind(model: Any, context: int, bits: int | None) -> dict[str, float]:
    """Tokens per second behind a text, and bytes of a token's keys and values."""
    model.model.forward = DecoderForward(model.model)
    set_kv_bits(model, bits)
    ids, cache = (
        torch.randint(3, 4000, (1, context), generator=torch.Generator().manual_seed(4)).cuda(),
        new_cache(model),
    )
    start = 0.0
    for step in range(STEPS):
        if step == WARM:
            models.wait()
            start = time.perf_counter()
        ids = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    models.wait()
    rate = (STEPS - WARM) / (time.perf_counter() - start)
    held = sum(
        part[:, :, 0].numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values)
    )
    set_kv_bits(model, None)
    return {"tokens/s": round(rate, 1), "bytes of a token": held, "replayed": model.model.forward.steps}


@torch.inference_mode()
def distinct_experts(model: Any, batch: int) -> float:
    """Mean number of experts per layer that a decoding step of random tokens uses."""
    chosen: list[int] = []
    hooks = [
        getattr(layer.mlp, "router", getattr(layer.mlp, "gate", None)).register_forward_hook(
            lambda _, __, output: chosen.append(output[2].unique().numel())
        )
        for layer in model.model.layers
    ]
    ids = torch.randint(3, 4000, (batch, PROMPT), generator=torch.Generator().manual_seed(3)).cuda()
    try:
        with models.decoding("transformers"):
            state = model(ids, use_cache=True, logits_to_keep=1)
            chosen.clear()
            model(ids[:, :1].flip(0), past_key_values=state.past_key_values, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    return sum(chosen) / len(chosen)


@torch.inference_mode()
def first_token(model: Any, tokens: int) -> float:
    """Median milliseconds of a prompt."""
    model.model.forward = DecoderForward(model.model)
    ids, times = torch.randint(3, 4000, (1, tokens), generator=torch.Generator().manual_seed(2)).cuda(), []
    for _ in range(8):
        models.wait()
        start = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        models.wait()
        times.append(1000 * (time.perf_counter() - start))
    return sorted(times[2:])[3]


@contextmanager
def separate() -> Iterator[None]:
    """Run without the kernels that replace several operations."""
    own = Replacements.active
    Replacements.active = nullcontext  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Replacements.active = own  # type: ignore[method-assign]


def main() -> None:
    """Run the measurements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("specifications", nargs="+")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--architecture", choices=("qwen3_moe", "gpt_oss"), default="qwen3_moe")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    models.LARGE["layers"] = options.layers
    rows = []
    for name in options.specifications:
        alone: dict[int, list[int]] = {}
        if options.gpus > 1:
            model = models.large("cuda:0", name, options.architecture)
            alone = {batch: tokens_per_second(model, batch)[1] for batch in BATCHES}
            del model
            torch.cuda.empty_cache()
        model = models.large("cuda:0", name, options.architecture, options.gpus)
        row: dict[str, Any] = {
            "specification": name, "architecture": options.architecture, "layers": options.layers, "gpus": options.gpus
        }  # fmt: skip
        for batch in BATCHES:
            rate, tokens = tokens_per_second(model, batch)
            with separate():
                before, others = tokens_per_second(model, batch)
            same = sum(one == other for one, other in zip(tokens, others, strict=True))
            row[f"tokens/s of {batch}"] = {
                "fused": round(rate, 1), "separate": round(before, 1), "same tokens": same,
                "distinct experts": round(distinct_experts(model, batch), 1), "replayed": model.model.forward.steps,
            }  # fmt: skip
            if batch in alone:
                same = sum(one == other for one, other in zip(tokens, alone[batch], strict=True))
                row[f"tokens/s of {batch}"]["same tokens as one GPU"] = same
        for tokens in PROMPTS:
            fused = first_token(model, tokens)
            with separate():
                times = {"fused": round(fused, 1), "separate": round(first_token(model, tokens), 1)}
            row[f"ms to first token after {tokens}"] = times
        for context in CONTEXTS:
            row[f"behind {context} tokens"] = {
                name: behind(model, context, bits) for name, bits in (("bfloat16", None), ("8 bits", 8))
            }
        print(row, flush=True)
        rows.append(row)
        del model
        torch.cuda.empty_cache()
    if options.results:
        options.results.write_text(json.dumps({**device_name(), "lines": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

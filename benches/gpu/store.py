"""Measures decoding with too little memory on a GPU: tokens per second of a synthetic model, and bytes over the bus per
token.

    PYTHONPATH=python python -m benches.gpu.store [--layers 4] [--only NAME ...] [--results FILE]
    PYTHONPATH=python python -m benches.gpu.store --packed DIR --text FILE [--chars 12000]

The model has Mixtral-8x7B's shapes and few layers; weights repeat and tokens are drawn, so every expert is as likely as
any other, and every channel: the worst case of what is kept on the device. "all" has everything on the GPU, the others
as many bytes of it as a quarter of the experts of 4 bits. "launched" decodes operation by operation, without graphs.
"CPU" computes everything on the processor. One sequence at a time, eight in all, and two before them; the first steps
of each are left out. What becomes of missing experts ("misses ...") is compared in turns, sequence by sequence.

The second form needs no GPU: of a real model of `floe`, the share of the channels that a text's tokens want that are
among the first of each expert, which is what a device that keeps these hits.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers.cache_utils import DynamicCache

import moepack
from benches.gpu import floe, groupwise
from benches.gpu.cases import device_name
from benches.gpu.models import allocated, decoding
from moepack import _core
from moepack.backends import backend_for
from moepack.decoding.decoder import install
from moepack.integrations.loading import open_tokenizer
from moepack.modules.experts import PackedExperts, SparseExperts
from moepack.stores.mapped import MappedStore
from moepack.stores.streaming import Statistics, statistics_of
from moepack.stores.streaming.experts import expert_layers
from moepack.stores.tiers import Gpu, Misses, keep_on
from moepack.stores.uploaded import DeviceStore

WIDTH, INNER, EXPERTS, TOP_K, VOCABULARY = 4096, 14336, 8, 2, 4096
PROMPT, WARM, STEPS = 8, 8, 48
LENGTH = PROMPT + WARM + STEPS
WARM_SEEDS, SEEDS = (1, 2), tuple(range(3, 11))

Tensors = dict[str, NDArray[np.uint8]]


def settings(layers: int) -> Any:
    """The configuration."""
    from transformers import MixtralConfig

    return MixtralConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K,
        num_hidden_layers=layers, vocab_size=VOCABULARY, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=4096, sliding_window=None,
    )  # fmt: skip


@cache
def integers(bits: int) -> Tensors:
    """All projections of a layer in groups of 64."""
    make = partial(groupwise.make, EXPERTS, seed=0, bits=bits, group=64, symmetric=bits > 2, dtype=torch.bfloat16)
    gate, down = make(INNER, WIDTH), make(WIDTH, INNER)
    return {"gate_proj": gate, "up_proj": gate, "down_proj": down}


@cache
def sparse(bits: int, sparsity: float) -> Tensors:
    """A 2-bit up projection and records of the given bits; inputs of norm `WIDTH ** 0.5` skip a share of the
    channels."""
    up = integers(2)["up_proj"]
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).numpy()
    threshold = float(np.quantile(np.abs(_core.PackedTensor(up).matmul(x, 0)), sparsity))
    one = floe.records(1, INNER, WIDTH, 0, bits, threshold)
    start = _core.PackedTensor(one).sections()["records"][0]
    head = one[:start].copy()
    head[16:24] = np.array([EXPERTS], np.uint64).view(np.uint8)
    head[128 : 128 + 4 * EXPERTS] = np.full(EXPERTS, threshold, np.float32).view(np.uint8)
    return {"up_proj": up, "channels": np.concatenate([head, np.tile(one[start:], EXPERTS)])}


def model_of(tensors: Tensors, layers: int, device: str = "cpu") -> Any:
    """A model with these experts in every layer."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings(layers), dtype=torch.bfloat16)
    store = MappedStore() if device == "cpu" else DeviceStore(torch.device(device))
    kind = SparseExperts if "channels" in tensors else PackedExperts
    for layer in model.model.layers:
        shapes = {name: _core.PackedTensor(data).shape for name, data in tensors.items()}
        layer.mlp.experts = kind(shapes, functional.silu)
        for name, data in tensors.items():
            store.put(layer.mlp.experts, name, data, tensor=name)
    generator = torch.Generator().manual_seed(2)
    piece = torch.randn(1 << 22, generator=generator).bfloat16()
    for path, module in model.named_modules():
        for name, tensor in [(name, tensor) for name, tensor in module._parameters.items() if tensor is not None]:
            values = piece.repeat(-(-tensor.numel() // len(piece)))[: tensor.numel()].view(tensor.shape)
            values = values * (0 if "norm" in path else tensor.shape[-1] ** -0.5) + ("norm" in path)
            module._parameters[name] = torch.nn.Parameter(values.to(device), requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    install(model)
    return model.eval()


def tiered(tensors: Tensors, layers: int, share: float = 0.25, misses: Misses = "auto") -> Any:
    """A model with GPU memory for a share of all 4-bit experts, in addition to the weights that every token needs."""
    model = model_of(tensors, layers)
    packed = sum(buffer.nbytes for layer in expert_layers(model) for buffer in layer.buffers())
    always = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) - packed
    whole = layers * sum(data.nbytes for data in integers(4).values())
    keep_on(model, Gpu(torch.device("cuda")), always + int(share * whole) + (1 << 20), misses=misses)
    return model


@torch.inference_mode()
def decode(model: Any, seed: int) -> float:
    """Milliseconds per step, for random tokens of a seed."""
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator).to(device)
    past, start = DynamicCache(config=model.config), 0.0
    model(tokens[None, :PROMPT], past_key_values=past, use_cache=True)
    for step in range(WARM + STEPS):
        if step == WARM:
            wait()
            start = time.perf_counter()
        place = PROMPT + step
        model(tokens[None, place : place + 1], past_key_values=past, use_cache=True)
    wait()
    return 1000 * (time.perf_counter() - start) / STEPS


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Case(NamedTuple):
    """A case: the model's constructor and the decoder."""

    make: Callable[[], Any]
    mode: str = "native"


def measure(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """Tokens per second of models, alternating by sequence, and bytes moved to the GPU per step."""
    models, sizes = dict[str, Any](), dict[str, float]()
    for name, case in cases.items():
        size = allocated()
        models[name] = case.make()
        sizes[name] = allocated() - size
    for seed in WARM_SEEDS:  # the first step of each cache length is slow; also fills the cache of experts
        in_turns(cases, models, seed)
    before = {name: replace(statistics_of(model) or Statistics()) for name, model in models.items()}
    took = [in_turns(cases, models, seed) for seed in SEEDS]
    rows = dict[str, dict[str, Any]]()
    for name, model in models.items():
        ms = sum(times[name] for times in took) / len(SEEDS)
        rows[name] = {"tokens/s": round(1000 / ms, 1), "ms": round(ms, 3)}
        rows[name] |= {"replayed": getattr(model.model.forward, "steps", 0), "GPU GB": round(sizes[name], 2)}
        rows[name] |= moved(statistics_of(model), before[name])
    return rows


def in_turns(cases: dict[str, Case], models: dict[str, Any], seed: int) -> dict[str, float]:
    """Milliseconds per step of each model, alternating, so that disturbances affect all of them."""
    times = dict[str, float]()
    for name, case in cases.items():
        with decoding(case.mode):
            times[name] = decode(models[name], seed)
    return times


def moved(after: Statistics | None, before: Statistics) -> dict[str, float]:
    """Bytes that a step moved to the GPU, if a store counts them."""
    if after is None:
        return {}
    tokens, hits, misses = len(SEEDS) * LENGTH, after.hits - before.hits, after.misses - before.misses
    return {
        "hits": round(hits / max(hits + misses, 1), 3),
        "of misses computed": round((after.computed - before.computed) / max(misses, 1), 3),
        "MB a token": round((after.bytes_read - before.bytes_read) / tokens / 1e6, 1),
        "stalled ms": round(1000 * (after.waited - before.waited) / tokens, 3),
    }


def groups(layers: int) -> list[dict[str, Case]]:
    """The cases by name; the cases of a group alternate."""
    all_there = partial(model_of, layers=layers, device="cuda")
    quarter = partial(tiered, layers=layers)
    half = partial(quarter, share=0.5)
    found = [
        {"int2 all": Case(lambda: all_there(integers(2)))},
        {"int2 all, launched": Case(lambda: all_there(integers(2)), "transformers")},
        {"int4 all": Case(lambda: all_there(integers(4)))},
        {
            "int4 whole experts": Case(lambda: quarter(integers(4))),
            "int4 whole experts, misses moved": Case(lambda: quarter(integers(4), misses="moved")),
            "int4 whole experts, misses computed": Case(lambda: quarter(integers(4), misses="computed")),
            "int4 CPU": Case(lambda: model_of(integers(4), layers)),
        },
        {"int4 whole experts, launched": Case(lambda: quarter(integers(4)), "transformers")},
        {
            "int4 whole experts, half": Case(lambda: half(integers(4))),
            "int4 whole experts, half, misses moved": Case(lambda: half(integers(4), misses="moved")),
        },
    ]
    for bits, sparsity in ((4, 0.8), (4, 0.9), (8, 0.8), (8, 0.9)):
        make = lambda bits=bits, sparsity=sparsity: quarter(sparse(bits, sparsity))  # noqa: E731
        found.append({f"channels of {bits} bits, {sparsity:.0%}": Case(make)})
    return found


@torch.inference_mode()
def first_channels(directory: Path, text: str) -> dict[str, float]:
    """The share of requested channels among the first of each expert, by the number kept."""
    model, tokenizer = moepack.load(directory, dtype="float32"), open_tokenizer(directory)
    layers = expert_layers(model)
    wanted = torch.zeros(layers[0].shapes["channels"][1], dtype=torch.int64)

    def note(layer: Any, given: tuple[torch.Tensor, ...]) -> None:
        matrices = layer.store.fetch(layer, None, given[0].device)
        ups = backend_for(given[0].device).wanted_channels(matrices, given[0], given[1], None)
        wanted.add_((ups != 0).sum((0, 1)))

    for layer in layers[1:]:  # the first skips nothing
        layer.register_forward_pre_hook(note)
    for window in torch.tensor(tokenizer(text).input_ids).split(256):
        model(window[None], use_cache=False)
    shares = (0.1, 0.25, 0.5)
    return {
        f"{share:.0%}": round(float(wanted[: int(share * len(wanted))].sum() / wanted.sum()), 3) for share in shares
    }


def main() -> None:
    """Run the requested measurements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--packed", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--chars", type=int, default=12_000)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    if given.packed is not None:
        print(given.packed.name, first_channels(given.packed, given.text.read_text()[: given.chars]))
        return
    found: dict[str, Any] = device_name() if torch.cuda.is_available() else {}
    found |= {"layers": given.layers, "threads": torch.get_num_threads(), "cases": {}}
    for group in groups(given.layers):
        start = time.perf_counter()
        if not (asked := {name: case for name, case in group.items() if not given.only or name in given.only}):
            continue
        found["cases"] |= (rows := measure(asked))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        for name, row in rows.items():
            print(name, row, flush=True)
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
        if given.results:
            given.results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

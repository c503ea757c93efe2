"""Compares whole models on a GPU with the CPU (loss, text) and with bfloat16 (tokens per second, memory).

    PYTHONPATH=python python -m benches.gpu.models --packed DIR ... --source DIR --text FILE [--large] [--results FILE]

Losses are those of float32 models: of windows as long as the decoding kernels take, and of long ones, whose weights are
decoded to bfloat16. Decoding is greedy, one sequence, without waiting for a token before the next is launched; "graphs"
replays recorded steps (`moepack.decoding.graphs`), "transformers" launches operation by operation. `--large` adds a
made-up model of Qwen3-30B-A3B's shapes with fewer layers, in bfloat16 and with packed random experts, whose speed and
memory count and nothing else.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import moepack
from benches.gpu.cases import device_name, specifications
from moepack.decoding.decoder import DecoderForward, set_decoding
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.modules.experts import PackedExperts, PackedOwnExperts
from moepack.stores.uploaded import DeviceStore

SHORT, LONG = 48, 512
"""Tokens of a window: fewer than the kernels take, and a prompt."""

PROMPT, STEPS = 32, 200
LARGE = {"layers": 8, "experts": 128, "top_k": 8, "hidden": 2048, "inner": 768}


@torch.inference_mode()
def loss(model: Any, ids: torch.Tensor, width: int) -> float:
    """Mean loss of separate windows of a given length."""
    windows = ids[: len(ids) // width * width].view(-1, width).to(model.device)
    total = sum(
        functional.cross_entropy(model(window[None], use_cache=False).logits[0, :-1].float(), window[1:])
        for window in windows
    )
    return float(total) / len(windows)


@torch.inference_mode()
def decode(model: Any, ids: torch.Tensor, steps: int) -> tuple[list[int], float]:
    """Tokens after a prompt, and tokens per second without the first ten."""
    state = model(ids[None].to(model.device), use_cache=True)
    token, found, start = state.logits[:, -1].argmax(-1, keepdim=True), [], 0.0
    for step in range(steps):
        if step == 10:
            wait()
            start = time.perf_counter()
        found.append(token)
        state = model(token, past_key_values=state.past_key_values, use_cache=True)
        token = state.logits[:, -1].argmax(-1, keepdim=True)
    wait()
    return torch.cat(found)[:, 0].tolist(), (steps - 10) / (time.perf_counter() - start)


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def decoding(mode: str) -> Iterator[None]:
    """Choose the decoder."""
    set_decoding(mode)
    try:
        yield
    finally:
        set_decoding(None)


def allocated() -> float:
    """Gigabytes of the GPU that tensors take."""
    return torch.cuda.memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


def speeds(model: Any, ids: torch.Tensor, steps: int = STEPS) -> dict[str, Any]:
    """Tokens per second with and without graphs, and whether both give the same tokens."""
    graph_tokens, graphs = decode(model, ids, steps)
    with decoding("transformers"):
        decode(model, ids, steps)  # the first step of each cache length is slow
        tokens, plain = decode(model, ids, steps)
    same = next((place for place, pair in enumerate(zip(tokens, graph_tokens, strict=True)) if len({*pair}) > 1), steps)
    replayed = getattr(model.model.forward, "steps", 0)
    return {"graphs tokens/s": graphs, "transformers tokens/s": plain, "replayed": replayed, "same tokens": same}


def packed_model(directory: Path, device: str, ids: torch.Tensor) -> dict[str, Any]:
    """Losses on both devices, and speed on the GPU in bfloat16."""
    cpu = moepack.load(directory, dtype="float32")
    gpu = moepack.load(directory, dtype="float32", device=device)
    row: dict[str, Any] = {}
    for name, width in (("short", SHORT), ("long", LONG)):
        row[f"{name} loss"] = loss(gpu, ids, width)
        row[f"{name} difference"] = row[f"{name} loss"] - loss(cpu, ids, width)
    del cpu, gpu
    before = allocated()
    model = moepack.load(directory, dtype="bfloat16", device=device)
    return row | {"GB": allocated() - before} | speeds(model, ids[:PROMPT])


def plain_model(model: Any, ids: torch.Tensor, steps: int = STEPS) -> dict[str, Any]:
    """Speed of a model in bfloat16, with recorded steps if possible."""
    model.model.forward = DecoderForward(model.model)
    return speeds(model, ids, steps)


def _settings(architecture: str) -> Any:
    """The configuration of a made-up model: the shapes of Qwen3-30B-A3B, or of gpt-oss-20b."""
    from transformers import GptOssConfig, Qwen3MoeConfig

    if architecture == "gpt_oss":
        return GptOssConfig(
            hidden_size=2880, intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4,
            num_hidden_layers=LARGE["layers"], vocab_size=201_088, num_attention_heads=64, num_key_value_heads=8,
            head_dim=64, sliding_window=128,
        )  # fmt: skip
    return Qwen3MoeConfig(
        hidden_size=LARGE["hidden"], moe_intermediate_size=LARGE["inner"], num_experts=LARGE["experts"],
        num_experts_per_tok=LARGE["top_k"], num_hidden_layers=LARGE["layers"], vocab_size=151_936,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, norm_topk_prob=True, tie_word_embeddings=True,
    )  # fmt: skip


def large(device: str, family: str, architecture: str = "qwen3_moe", gpus: int = 1) -> Any:
    """A model of random weights on a device, with experts in bfloat16 or in a packed format.

    With several GPUs, layers are split evenly, in order; weights are those of the model on one.
    """
    from transformers import AutoModelForCausalLM

    settings = _settings(architecture)
    hidden, inner = settings.hidden_size, getattr(settings, "moe_intermediate_size", settings.intermediate_size)
    experts = settings.num_experts if architecture == "qwen3_moe" else settings.num_local_experts
    shapes = zip(PackedExperts.projections, [(inner, hidden), (inner, hidden), (hidden, inner)], strict=True)
    forms = {name: (experts, *shape) for name, shape in shapes}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    count = len(model.model.layers)
    places = [torch.device(device)] if gpus == 1 else [torch.device("cuda", number) for number in range(gpus)]
    stores = [] if family == "bf16" else [DeviceStore(place) for place in places]
    made = {}
    for number, layer in enumerate(model.model.layers):
        if not stores:
            continue
        store, own = stores[number * gpus // count], architecture != "qwen3_moe"
        module = PackedOwnExperts(forms, layer.mlp.experts) if own else PackedExperts(forms, functional.silu)
        # Gate and up differ: silu(x) * x is mostly positive, which would send all tokens to the same experts.
        for seed, (projection, (_, rows, columns)) in enumerate(module.shapes.items()):
            if projection not in made:
                made[projection] = specifications(["groupwise", "ternary", "codebook"])[family](
                    experts, rows, columns, seed
                )
            store.put(module, projection, made[projection], tensor=projection)
        layer.mlp.experts = module
    generator = torch.Generator(places[0]).manual_seed(0)
    for path, module in model.named_modules():
        place = places[int(path.split(".")[2]) * gpus // count] if path.startswith("model.layers.") else places[0]
        tensors = [(name, tensor) for name, tensor in module._parameters.items() if tensor is not None]
        for name, tensor in tensors:
            values = torch.randn(tensor.shape, generator=generator, device=places[0], dtype=tensor.dtype)
            values = (values * tensor.shape[-1] ** -0.5 + ("norm" in path)).to(place)
            module._parameters[name] = torch.nn.Parameter(values, requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(settings).to(places[0])
    model.tie_weights()
    if gpus > 1:
        _place(model, [places[number * gpus // count] for number in range(count)])
    return model.eval()


def _place(model: Any, places: list[torch.device]) -> None:
    """Let accelerate copy the inputs of each layer to its device, and all other inputs to the first device."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for path, module in model.named_modules():
        place = places[int(path.split(".")[2])] if path.startswith("model.layers.") else places[0]
        if path not in ("", "model", "model.layers"):
            add_hook_to_module(module, AlignDevicesHook(execution_device=place))


def main() -> None:
    """Run the requested measurements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--packed", nargs="*", type=Path, default=[])
    parser.add_argument("--source", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--chars", type=int, default=20_000)
    parser.add_argument("--large", nargs="*", default=[], help="bf16, or names of specifications, such as int3-g64")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}

    def note(name: str, row: dict[str, Any]) -> None:
        rows[name] = row
        print(
            name,
            {key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()},
            flush=True,
        )
        if given.results is not None:
            old = json.loads(given.results.read_text())["models"] if given.results.exists() else {}
            found = {"machine": device_name(), "models": old | rows}
            given.results.write_text(json.dumps(found, indent=1) + "\n")

    if given.text is not None:
        tokenizer = open_tokenizer(given.source)
        ids = torch.tensor(tokenizer(given.text.read_text()[: given.chars]).input_ids)
        model = open_model(given.source, dtype="bfloat16", device=given.device)
        note("bf16", {"short loss": loss(model, ids, SHORT)} | plain_model(model, ids[:PROMPT]))
        for directory in given.packed:
            note(directory.name, packed_model(directory, given.device, ids))
    ids = torch.arange(3, 3 + PROMPT)
    for name in given.large:
        before = allocated()
        model = large(given.device, name)
        size = {"GB": allocated() - before}
        note(f"large {name}", size | plain_model(model, ids))
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

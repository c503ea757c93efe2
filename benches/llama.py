"""A packed model beside llama.cpp: tokens a second when decoding and when reading a prompt, and peak memory.

    python benches/llama.py [--threads 2] [--types Q4_0 IQ4_NL] [--tokens 64] [--prompt 256] [--directory DIR]

Both run a made-up model of Qwen3-MoE's shapes (7 layers of 64 experts of 3 x 768 x 2048, 8 a token: 2.2 * 10^9 weights)
with random weights: moepack with a codebook of 16 centroids a row for every linear layer but the router and the head,
llama.cpp (`llama-cpp-python` and `gguf` from PyPI) with Q4_0 or IQ4_NL for the same tensors. Nothing about quality can
be learned from it. Embeddings, which are the head too, have 16 bits in both. moepack runs twice: with weights mapped
from files that the page cache holds, and with resident ones.

Each side runs in a process of its own; sides take turns, and the medians over rounds count. Decoding is greedy behind a
prompt of 16 tokens; reading is one pass over a prompt. Memory is the peak of the process's resident set: mapped weights
are in it once they have been touched.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import machine

HIDDEN, INNER, EXPERTS, TOP_K, LAYERS, VOCABULARY = 2048, 768, 64, 8, 7, 4096
HEADS, GROUPS, WIDTH = 32, 4, 128
SHORT = 16


def source(directory: Path) -> None:
    """Write the checkpoint: a shard a layer, experts being windows of one run of numbers."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    settings = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, intermediate_size=INNER, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, num_hidden_layers=LAYERS, vocab_size=VOCABULARY, num_attention_heads=HEADS,
        num_key_value_heads=GROUPS, head_dim=WIDTH, norm_topk_prob=True, tie_word_embeddings=True,
        dtype="bfloat16", architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    settings.save_pretrained(directory)
    pool = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul_(HIDDEN**-0.5).bfloat16()
    with torch.device("meta"):
        names = {name: tuple(t.shape) for name, t in AutoModelForCausalLM.from_config(settings).state_dict().items()}
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in names.items():
        file = ".".join(name.split(".")[:3]) if ".layers." in name else "dense"
        if name == "lm_head.weight":
            continue
        for key, size in _unfused(name, shape):
            start = (len(files) * 7919 + len(files.get(file, {})) * 1_000_003) % ((1 << 24) - int(np.prod(size)))
            value = pool[start : start + int(np.prod(size))].view(size).clone()
            files.setdefault(file, {})[key] = torch.ones_like(value) if "norm" in key else value
    index = {key: f"model-{i:05}-of-{len(files):05}.safetensors" for i, f in enumerate(files.values(), 1) for key in f}
    for tensors in files.values():
        save_file(tensors, directory / index[next(iter(tensors))], {"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _unfused(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A tensor of the model as checkpoints have it: experts one by one, gate and up apart."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield name, shape
        return
    stem = name.rsplit(".", 1)[0]
    parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
    size = (INNER, HIDDEN) if len(parts) == 2 else (HIDDEN, INNER)
    for expert in range(EXPERTS):
        for part in parts:
            yield f"{stem}.{expert}.{part}.weight", size


def random_method() -> Any:
    """A method that packs random codes into sorted random codebooks, with activations of 8 bits."""
    from moepack import _core
    from moepack.methods import Method, PackedTensor, Shape, Solution, Stage, Weights

    class Random(Method):
        name = "codequant"
        settings: Mapping[str, Any] = {"random": True}
        dense_roles = frozenset({"attention", "shared", "mlp"})

        def bound(self, shape: Shape, role: str = "experts") -> int:
            return 1 << 20 | shape[0] * (shape[1] + 16) * (shape[2] + 64)

        def solve(self, stage: Stage) -> dict[str, Solution]:
            return {name: Solution({}) for name in stage.tensors}

        def pack(self, weights: Weights, solution: Solution) -> PackedTensor:
            random = np.random.default_rng(sum(map(ord, weights.name)))
            books = (*weights.shape[:2], 1, 16)
            codes = random.integers(0, 16, weights.shape, np.uint8)
            # Activations of 8 bits: centroids of one byte.
            centroids = np.sort(random.integers(-127, 128, books), -1).astype(np.int16) * 256
            scales = np.full(books[:3], 2 / 32639 / weights.shape[2] ** 0.5, np.float32)
            blob = _core.encode_codebook(
                codes, centroids, scales, bits=4, block=1 << 16, ndim=weights.ndim, activation_bits=8
            )
            details = {"bits": 4, "block_size": _core.PackedTensor(blob).details()["block_size"], "activation_bits": 8}
            return PackedTensor("codebook", blob, details)

    return Random()


def gguf_file(path: Path, kind: str) -> None:
    """Write the model for llama.cpp, blocks of 32 weights of random codes with one scale."""
    import gguf

    dtype, random = gguf.GGMLQuantizationType[kind], np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for name, value in {
        "block_count": LAYERS, "context_length": 2048, "embedding_length": HIDDEN, "feed_forward_length": INNER,
        "head_count": HEADS, "head_count_kv": GROUPS, "key_length": WIDTH, "value_length": WIDTH,
        "expert_count": EXPERTS, "expert_used_count": TOP_K, "expert_feed_forward_length": INNER,
        "vocab_size": VOCABULARY,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("none")

    def packed(name: str, *shape: int) -> None:
        # A block is a half-precision scale and 32 codes of 4 bits.
        blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // 32, 18), np.uint8)
        scale = np.array([0.2 / shape[-1] ** 0.5 / (8 if kind == "Q4_0" else 127)], np.float16).view(np.uint8)
        blocks[..., :2] = scale
        writer.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=dtype)

    def dense(name: str, *shape: int, dtype: Any = np.float32) -> None:
        values = np.ones(shape) if "norm" in name else random.standard_normal(shape) * HIDDEN**-0.5
        writer.add_tensor(name, values.astype(dtype))

    dense("token_embd.weight", VOCABULARY, HIDDEN, dtype=np.float16)
    dense("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        stem = f"blk.{layer}."
        for name, width in (
            ("attn_norm", HIDDEN),
            ("ffn_norm", HIDDEN),
            ("attn_q_norm", WIDTH),
            ("attn_k_norm", WIDTH),
        ):
            dense(f"{stem}{name}.weight", width)
        packed(f"{stem}attn_q.weight", HEADS * WIDTH, HIDDEN)
        packed(f"{stem}attn_k.weight", GROUPS * WIDTH, HIDDEN)
        packed(f"{stem}attn_v.weight", GROUPS * WIDTH, HIDDEN)
        packed(f"{stem}attn_output.weight", HIDDEN, HEADS * WIDTH)
        dense(f"{stem}ffn_gate_inp.weight", EXPERTS, HIDDEN)
        packed(f"{stem}ffn_gate_exps.weight", EXPERTS, INNER, HIDDEN)
        packed(f"{stem}ffn_up_exps.weight", EXPERTS, INNER, HIDDEN)
        packed(f"{stem}ffn_down_exps.weight", EXPERTS, HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Packed:
    """The model in moepack."""

    def __init__(self, path: Path, threads: int, **options: Any) -> None:
        import torch

        import moepack
        from moepack.runtime.threads import set_threads

        set_threads(threads)
        self.torch, self.model = torch, moepack.load(path, dtype=torch.bfloat16, **options)

    def read(self, tokens: list[int]) -> None:
        """One pass over a prompt, from which the next token's logits come."""
        with self.torch.inference_mode():
            self.state = self.model(self.torch.tensor([tokens]), use_cache=True, logits_to_keep=1)

    def decode(self, count: int) -> None:
        """Greedy tokens behind what has been read."""
        with self.torch.inference_mode():
            for _ in range(count):
                token = self.state.logits[:, -1:].argmax(-1)
                cache = self.state.past_key_values
                self.state = self.model(token, past_key_values=cache, use_cache=True)


class Llama:
    """The model in llama.cpp."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp

        self.api, log = llama_cpp, llama_cpp.llama_log_callback(lambda *_: None)
        self.log = log
        llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp does not load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = 1024, 512, 512
        settings.n_threads = settings.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, settings)

    def _run(self, tokens: list[int]) -> None:
        array = (self.api.llama_token * len(tokens))(*tokens)
        if self.api.llama_decode(self.context, self.api.llama_batch_get_one(array, len(tokens))):
            raise SystemExit("llama.cpp fails")
        logits = self.api.llama_get_logits_ith(self.context, -1)
        self.next = int(np.ctypeslib.as_array(logits, (VOCABULARY,)).argmax())

    def read(self, tokens: list[int]) -> None:
        """As `Packed.read`."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        self._run(tokens)

    def decode(self, count: int) -> None:
        """As `Packed.decode`."""
        for _ in range(count):
            self._run([self.next])


def serve(options: argparse.Namespace) -> None:
    """A side's process: a round for each line of its input."""
    if options.side.is_dir():
        side: Packed | Llama = Packed(options.side, options.threads, resident=options.resident)
    else:
        side = Llama(options.side, options.threads)
    random = np.random.default_rng(0)
    for _ in sys.stdin:
        side.read(random.integers(0, VOCABULARY, SHORT).tolist())
        side.decode(2)
        start = time.perf_counter()
        side.decode(options.tokens)
        decoded = time.perf_counter() - start
        prompt = random.integers(0, VOCABULARY, options.prompt).tolist()
        start = time.perf_counter()
        side.read(prompt)
        read = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        figures = {"decode": options.tokens / decoded, "prefill": options.prompt / read, "peak_bytes": peak}
        print(json.dumps(figures), flush=True)


def build(directory: Path, kinds: list[str]) -> dict[str, Path]:
    """Whatever of the models is not there yet; the sides by name."""
    sides = {"moepack codebook4": directory / "packed", "moepack codebook4 resident": directory / "packed"}
    sides |= {f"llama.cpp {kind}": directory / f"{kind}.gguf" for kind in kinds}
    if not (directory / "packed").exists():
        from moepack.pipeline import compress

        with tempfile.TemporaryDirectory(dir=directory) as model:
            source(Path(model))
            compress(model, directory / "packed", method=random_method())
    for kind in kinds:
        if not sides[f"llama.cpp {kind}"].exists():
            gguf_file(sides[f"llama.cpp {kind}"], kind)
    return sides


def contest(sides: Mapping[str, Path], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of each side's rounds, after one to warm up."""
    processes = {}
    for name, path in sides.items():
        command = [sys.executable, __file__, "--side", str(path)]
        for setting in ("threads", "tokens", "prompt"):
            command += [f"--{setting}", str(getattr(options, setting))]
        command += ["--resident"] if name.endswith("resident") else []
        processes[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(options.rounds + 1):
        for name, process in processes.items():
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            figures = json.loads(process.stdout.readline())
            rounds[name] += [figures] if turn else []
    for process in processes.values():
        process.communicate()
    return {name: {key: statistics.median(r[key] for r in found) for key in found[0]} for name, found in rounds.items()}


def main() -> None:
    """Build, measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", nargs="*", default=["Q4_0", "IQ4_NL"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path("build/llama"))
    parser.add_argument("--only-build", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/llama.json"))
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resident", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return serve(options)
    options.directory.mkdir(parents=True, exist_ok=True)
    sides = build(options.directory, options.types)
    if options.only_build:
        return None
    print(machine.describe(options.threads))
    figures = contest(sides, options)
    for name, found in figures.items():
        speeds = ", ".join(f"{key} {found[key]:.1f} tokens/s" for key in ("decode", "prefill"))
        print(f"{name}: {speeds}, peak {found['peak_bytes'] / 1e9:.2f} GB", flush=True)
    machine.save(options.out, options.threads, figures)
    return None


if __name__ == "__main__":
    main()

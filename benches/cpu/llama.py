"""Compares a packed model with llama.cpp: tokens per second for decoding and for a prompt, and peak memory.

    python -m benches.cpu.llama [--threads 2] [--types Q4_0 IQ4_NL] [--tokens 64] [--prompt 256] [--directory DIR]
    python -m benches.cpu.llama --formats IQ2_XS IQ3_XXS IQ4_XS [--losses FILE ...]

Both run a synthetic model of Qwen3-MoE's shapes (7 layers of 64 experts of 3 x 768 x 2048, 8 per token: 2.2 * 10^9
weights) with random weights: llama.cpp (the library of xllamacpp or llama-cpp-python, and `gguf`, from PyPI) with one
type for every linear layer except the router. This measures no quality.

`--types` compares with moepack's codebooks of 16 centroids per row for the same tensors. Embeddings, which are also the
head, have 16 bits in both. moepack runs twice: with weights mapped from files in the page cache, and with resident
ones.

`--formats` compares with coded integers of the method `rate`; both pack embeddings and use 8-bit activations. All
tensors have the same bits, as in llama.cpp: those at which `rate` with a text has the loss of the type with an
importance matrix, in the rows that `benches/quality/frontier.py` wrote to `--losses`, by default those of
`benches/results` (losses interpolated log-linearly, averaged over models and texts); `--bits` overrides them.

Each side runs in its own process; sides alternate, and medians over rounds count: by the clock, but with one thread by
processor time, which other load disturbs less. Decoding is greedy after a prompt of 16 tokens; a prompt is read in one
pass. Memory is the peak resident set of the process, which includes mapped weights once they have been touched.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_uint32, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benches.tools import ggml, machine

HIDDEN, INNER, EXPERTS, TOP_K, LAYERS, VOCABULARY = 2048, 768, 64, 8, 7, 4096
HEADS, GROUPS, WIDTH = 32, 4, 128
SHORT = 16


def source(directory: Path) -> None:
    """Write the checkpoint with one shard per layer; experts are windows of one random sequence."""
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
    count = max(1 << 24, 2 * INNER * HIDDEN)
    pool = torch.randn(count, generator=torch.Generator().manual_seed(0)).mul_(HIDDEN**-0.5).bfloat16()
    with torch.device("meta"):
        names = {name: tuple(t.shape) for name, t in AutoModelForCausalLM.from_config(settings).state_dict().items()}
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in names.items():
        file = ".".join(name.split(".")[:3]) if ".layers." in name else "dense"
        if name == "lm_head.weight":
            continue
        for key, size in _unfused(name, shape):
            start = (len(files) * 7919 + len(files.get(file, {})) * 1_000_003) % (count - int(np.prod(size)))
            value = pool[start : start + int(np.prod(size))].view(size).clone()
            files.setdefault(file, {})[key] = torch.ones_like(value) if "norm" in key else value
    index = {key: f"model-{i:05}-of-{len(files):05}.safetensors" for i, f in enumerate(files.values(), 1) for key in f}
    for tensors in files.values():
        save_file(tensors, directory / index[next(iter(tensors))], {"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _unfused(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A tensor of the model as in checkpoints: single experts, gate and up separately."""
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
    from moepack.methods import PackedBytes, PacksLinears, Shape, SimpleMethod, Solution, Stage, Weights

    class Random(PacksLinears, SimpleMethod):
        name = "codequant"
        settings: Mapping[str, Any] = {"random": True}
        dense_roles = frozenset({"attention", "shared", "mlp"})

        def bound(self, shape: Shape, role: str = "experts") -> int:
            return 1 << 20 | shape[0] * (shape[1] + 16) * (shape[2] + 64)

        def solve(self, stage: Stage) -> dict[str, Solution]:
            return {name: Solution({}) for name in stage.tensors}

        def pack(self, weights: Weights, solution: Solution) -> PackedBytes:
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
            return PackedBytes("codebook", blob, details)

    return Random()


def even_method(bits: float) -> Any:
    """The method `rate` with equal importance of all tensors: random weights then have equal bits everywhere."""
    from moepack.methods.rate import Rate
    from moepack.methods.rate.coder import Coder
    from moepack.methods.rate.sample import take_sample
    from moepack.solvers.priced import largest_at

    class Even(Rate):
        def coder(self, checkpoint: Any, model: Any, *_: Any) -> Coder:
            take = partial(take_sample, checkpoint, model, self.dense_roles, largest=largest_at(bits))
            return Coder.of(self, take(importance=dict.fromkeys(take().widths, 1.0)))

    return Even(bits_per_weight=bits, calibration=None)


class Blocks:
    """Quantized random rows of a ggml type, repeated in matrices, because some types take minutes for all weights."""

    def __init__(self, kind: str) -> None:
        import gguf

        self.type, self.library = gguf.GGMLQuantizationType[kind], ggml.load()
        self.random, self.samples = np.random.default_rng(0), dict[int, Any]()

    def matrix(self, *shape: int) -> Any:
        """Blocks of a matrix, uint8 [..., R, bytes]."""
        columns = shape[-1]
        if columns not in self.samples:
            values = self.random.standard_normal((ggml.SAMPLE, columns), np.float32) * columns**-0.5
            self.samples[columns] = ggml.quantized(self.library, self.type, values, np.ones(columns, np.float32))
        return self.samples[columns][self.random.integers(0, ggml.SAMPLE, shape[:-1])]


def gguf_file(path: Path, kind: str, embedding: bool = False) -> None:
    """Write the model for llama.cpp in a ggml type; `embedding`: whether the embedding has this type, too."""
    import gguf

    blocks = Blocks(kind)
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
        writer.add_tensor(name, blocks.matrix(*shape), raw_dtype=blocks.type)

    def dense(name: str, *shape: int, dtype: Any = np.float32) -> None:
        values = np.ones(shape) if "norm" in name else blocks.random.standard_normal(shape) * HIDDEN**-0.5
        writer.add_tensor(name, values.astype(dtype))

    if embedding:
        packed("token_embd.weight", VOCABULARY, HIDDEN)
    else:
        dense("token_embd.weight", VOCABULARY, HIDDEN, dtype=np.float16)
    dense("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        stem = f"blk.{layer}."
        norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN, "attn_q_norm": WIDTH, "attn_k_norm": WIDTH}
        for name, width in norms.items():
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
        from moepack.backends.threads import set_threads

        set_threads(threads)
        self.torch, self.model = torch, moepack.load(path, dtype=torch.bfloat16, **options)

    def read(self, tokens: list[int]) -> None:
        """Run one pass over a prompt and return the next token's logits."""
        with self.torch.inference_mode():
            self.state = self.model(self.torch.tensor([tokens]), use_cache=True, logits_to_keep=1)

    def decode(self, count: int) -> None:
        """Decode greedily after the text read so far."""
        with self.torch.inference_mode():
            for _ in range(count):
                token = self.state.logits[:, -1:].argmax(-1)
                cache = self.state.past_key_values
                self.state = self.model(token, past_key_values=cache, use_cache=True)


class Settings(ctypes.Structure):
    """The beginning of `llama_context_params`; the rest and all other structures are passed back unchanged."""

    _fields_ = [("n_ctx", c_uint32), ("rest", c_uint32 * 255)]


LLAMA = {"llama_cpp": "lib/libllama.so", "xllamacpp": "xllamacpp.abi3.so"}
"""Packages that contain llama.cpp, and its path in them."""
FUNCTIONS: Mapping[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_model_default_params": (Settings, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, Settings]),
    "llama_context_default_params": (Settings, []),
    "llama_init_from_model": (c_void_p, [c_void_p, Settings]),
    "llama_set_n_threads": (None, [c_void_p, c_int32, c_int32]),
    "llama_batch_get_one": (Settings, [c_void_p, c_int32]),
    "llama_decode": (c_int32, [c_void_p, Settings]),
    "llama_get_logits_ith": (POINTER(c_float), [c_void_p, c_int32]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_memory_clear": (None, [c_void_p, c_bool]),
}
"""Return types and arguments of functions. Structures only occur as last arguments, so they may be too long."""


class Llama:
    """The model in llama.cpp."""

    def __init__(self, path: Path, threads: int) -> None:
        self.api = api = ggml.opened(LLAMA)
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(api, name)
            function.restype, function.argtypes = result, arguments
        api.llama_log_set(ggml.SILENT, None)
        api.llama_backend_init()
        model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        if not model:
            raise SystemExit(f"llama.cpp does not load {path}")
        settings = api.llama_context_default_params()
        settings.n_ctx = 1024
        self.context = api.llama_init_from_model(model, settings)
        api.llama_set_n_threads(self.context, threads, threads)

    def _run(self, tokens: list[int]) -> None:
        array = (c_int32 * len(tokens))(*tokens)
        if self.api.llama_decode(self.context, self.api.llama_batch_get_one(array, len(tokens))):
            raise SystemExit("llama.cpp fails")
        logits = self.api.llama_get_logits_ith(self.context, -1)
        self.next = int(np.ctypeslib.as_array(logits, (VOCABULARY,)).argmax())

    def read(self, tokens: list[int]) -> None:
        """Like `Packed.read`."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        self._run(tokens)

    def decode(self, count: int) -> None:
        """Like `Packed.decode`."""
        for _ in range(count):
            self._run([self.next])


def peak_memory() -> int:
    """The peak memory of this process in bytes; `getrusage` would include its parent's at the start."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def serve(options: argparse.Namespace) -> None:
    """The process of one side: one round per line of input."""
    if options.side.is_dir():
        how = {"resident": options.resident, "mode": options.mode}
        side: Packed | Llama = Packed(options.side, options.threads, **how)
    else:
        side = Llama(options.side, options.threads)
    random, clock = np.random.default_rng(0), time.process_time if options.threads == 1 else time.perf_counter
    for _ in sys.stdin:
        side.read(random.integers(0, VOCABULARY, SHORT).tolist())
        side.decode(2)
        start = clock()
        side.decode(options.tokens)
        decoded = clock() - start
        prompt = random.integers(0, VOCABULARY, options.prompt).tolist()
        start = clock()
        side.read(prompt)
        read = clock() - start
        figures = {"decode": options.tokens / decoded, "prefill": options.prompt / read, "peak_bytes": peak_memory()}
        print(json.dumps(figures), flush=True)


def build(directory: Path, kinds: list[str]) -> dict[str, Path]:
    """Build the missing models; return the sides by name."""
    sides = {"moepack codebook4": directory / "packed", "moepack codebook4 resident": directory / "packed"}
    sides |= {f"llama.cpp {kind}": directory / f"{kind}.gguf" for kind in kinds}
    pack({directory / "packed": random_method()})
    for kind in kinds:
        if not sides[f"llama.cpp {kind}"].exists():
            gguf_file(sides[f"llama.cpp {kind}"], kind)
    return sides


def pack(methods: Mapping[Path, Any]) -> None:
    """Pack the model with each method, unless its directory exists."""
    from moepack.pipeline import compress

    missing = {directory: method for directory, method in methods.items() if not directory.exists()}
    if missing:
        with tempfile.TemporaryDirectory(dir=next(iter(missing)).parent) as model:
            source(Path(model))
            for directory, method in missing.items():
                compress(model, directory, method=method)


def build_formats(directory: Path, bits: Mapping[str, float]) -> dict[str, dict[str, Path]]:
    """Both sides of each ggml type by name, with coded integers of the given bits; built if missing."""
    coded = {kind: directory / f"coded-{asked:.2f}" for kind, asked in bits.items()}
    pack({coded[kind]: even_method(round(asked, 2)) for kind, asked in bits.items()})
    sides = {}
    for kind in bits:
        peer = directory / f"{kind}-packed-embedding.gguf"
        if not peer.exists():
            gguf_file(peer, kind, embedding=True)
        sides[kind] = {"moepack coded": coded[kind], f"llama.cpp {kind}": peer}
    return sides


def matching_bits(options: argparse.Namespace) -> dict[str, float]:
    """The bits of coded integers to compare with each ggml type."""
    if options.bits:
        return dict(zip(options.formats, options.bits, strict=True))
    from benches.quality.frontier import matching

    rows = [row for file in options.losses for row in json.loads(file.read_text())["figures"]["rows"]]
    return {kind: matching(rows, kind) for kind in options.formats}


def stored_bytes(side: Path) -> int:
    """The size of a model."""
    files = side.glob("*.safetensors") if side.is_dir() else [side]
    return sum(file.stat().st_size for file in files)


def contest(sides: Mapping[str, Path], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of each side's rounds after one warm-up, and the size of its model."""
    processes = {}
    for name, path in sides.items():
        command = [sys.executable, "-m", __spec__.name, "--side", str(path)]
        for setting in ("threads", "tokens", "prompt"):
            command += [f"--{setting}", str(getattr(options, setting))]
        command += ["--resident"] if name.endswith("resident") else []
        command += ["--mode", "int8"] if name.endswith("coded") else []
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
    medians = {
        name: {key: statistics.median(r[key] for r in found) for key in found[0]} for name, found in rounds.items()
    }
    for name, found in medians.items():
        found["model_bytes"] = stored_bytes(sides[name])
        speeds = ", ".join(f"{key} {found[key]:.1f} tokens/s" for key in ("decode", "prefill"))
        sizes = ", ".join(f"{key} {found[f'{key}_bytes'] / 1e9:.2f} GB" for key in ("peak", "model"))
        print(f"{name}: {speeds}, {sizes}", flush=True)
    return medians


def contest_formats(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of both sides for each ggml type, and their ratios."""
    bits, figures = matching_bits(options), dict[str, Any]()
    sides = build_formats(options.directory, bits)
    for kind in () if options.only_build else options.formats:
        print(f"{kind}: {bits[kind]:.2f} bits of coded integers", flush=True)
        ours, theirs = contest(sides[kind], options).values()
        ratios = {key: round(ours[key] / theirs[key], 3) for key in ours}
        print(f"{kind}: ours over theirs {ratios}", flush=True)
        figures[kind] = {"bits": bits[kind], "moepack": ours, "llama.cpp": theirs, "ratios": ratios}
    return figures


def main() -> None:
    """Build, measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--types", nargs="*", default=["Q4_0", "IQ4_NL"])
    parser.add_argument("--formats", nargs="*", default=[], help="types to compare coded integers with")
    parser.add_argument("--losses", type=Path, nargs="+", default=sorted(Path("benches/results").glob("ggml-*.json")))
    parser.add_argument("--bits", type=float, nargs="*", help="bits of coded integers, instead of those of equal loss")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers; fewer for a trial")
    parser.add_argument("--directory", type=Path, default=Path("build/llama"))
    parser.add_argument("--only-build", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/llama.json"))
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resident", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return serve(options)
    globals().update(LAYERS=options.layers)
    options.directory.mkdir(parents=True, exist_ok=True)
    print(machine.describe(options.threads))
    if options.formats:
        figures: dict[str, Any] = contest_formats(options)
    else:
        sides = build(options.directory, options.types)
        figures = {} if options.only_build else contest(sides, options)
    if figures:
        machine.save(options.out, options.threads, figures)
    return None


if __name__ == "__main__":
    main()

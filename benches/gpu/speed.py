"""Times every kernel, bfloat16 and torch's int4 on a GPU: medians of replayed graphs with cold weights.

Weights rotate among copies of 600 MB in all and more, so that none is in the cache; everything of one line runs in one
process, one after the other. "decoded" is the path of prompts: weights to bfloat16, then cuBLAS.

    PYTHONPATH=python python -m benches.gpu.speed [--families groupwise] [--only NAME] [--shapes NAME] [--results FILE]
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benches.gpu import baselines
from benches.gpu.cases import FAMILIES, Make, copies, device_name, on_device, routing, specifications
from moepack.backends.gpu import prompt
from moepack.backends.gpu.backend import GpuBackend
from moepack.backends.gpu.families import kernels_of
from moepack.backends.gpu.matrix import DeviceMatrix

COLD = 600 << 20
"""Bytes of weights that a graph reads before it returns to the first."""

LINEAR = {"Mixtral down": (4096, 14336), "Mixtral gate": (14336, 4096), "c4-large wo": (2080, 6144), "wi": (6144, 2080)}
"""Rows and columns of linear layers."""

TOKENS = (1, 16, 32, 64)


class Sparse(NamedTuple):
    """The experts of a layer: number, experts per token, width of the model, width of an expert."""

    experts: int
    top_k: int
    outer: int
    inner: int


LAYERS = {
    "Mixtral-8x7B": Sparse(8, 2, 4096, 14336),
    "Qwen3-30B-A3B": Sparse(128, 8, 2048, 768),
    "DeepSeek-V2-Lite": Sparse(64, 6, 2048, 1408),
}
LAYER_TOKENS = (1, 16, 64)
PROMPT_TOKENS = (128, 256, 1024, 4096)


def microseconds(launches: list[Callable[[], Any]], replays: int = 15) -> float:
    """The median time of a launch in a replayed graph of all launches."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(launches))
    return float(torch.tensor(times[2:]).median())


def rotated(nbytes: int) -> int:
    """The number of copies of the given bytes that exceed the cache."""
    return max(2, -(-COLD // nbytes))


class Baselines:
    """Times of bfloat16 and of other projects' kernels, measured once per shape."""

    def __init__(self) -> None:
        self.times: dict[Any, dict[str, float]] = {}

    def linear(self, rows: int, columns: int, tokens: int) -> dict[str, float]:
        """cuBLAS, torch's int4 and the peers."""
        key = rows, columns, tokens
        if key not in self.times:
            x = torch.randn(tokens, columns, device="cuda").bfloat16()
            found = {}
            for name, (nbytes, make) in baselines.linear(rows, columns).items():
                try:
                    products = [make() for _ in range(rotated(nbytes))]
                    for product in products:
                        product(x)
                    found[name] = microseconds([lambda product=product: product(x) for product in products])
                except (RuntimeError, ValueError, TypeError, AssertionError) as error:
                    print(f"{name} of {rows} x {columns}, {tokens} tokens: {str(error)[:200]}")
            self.times[key] = found
        return self.times[key]

    def experts(self, layer: Sparse) -> dict[str, float]:
        """Gate and up projections of a token's experts, as one matrix of all rows and as single matrices."""
        if layer not in self.times:
            shape = 2 * layer.top_k, layer.inner, layer.outer
            x = torch.randn(1, layer.outer, device="cuda").bfloat16()
            weights = [torch.randn(shape, device="cuda").bfloat16() for _ in range(rotated(2 * math.prod(shape)))]
            whole = [partial(functional.linear, x, weight.flatten(0, 1)) for weight in weights]
            parts = [partial(functional.linear, x, matrix) for weight in weights for matrix in weight]
            self.times[layer] = {"bf16": microseconds(whole), "bf16 one by one": microseconds(parts) * shape[0]}
        return self.times[layer]

    def layer(self, layer: Sparse, tokens: int) -> dict[str, float]:
        """The layer in bfloat16 with torch's grouped products."""
        key = layer, tokens
        if key not in self.times:
            weights = baselines.experts(layer.experts, layer.outer, layer.inner)
            launches = []
            for x, index, scales in inputs(layer, tokens, 16):
                launches.append(lambda a=(x, index, scales): baselines.grouped_layer(*weights, *a))
            self.times[key] = {"bf16 grouped_mm": microseconds(launches)}
        return self.times[key]


def inputs(layer: Sparse, tokens: int, count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens with different routings, equal for all peers."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        yield (
            torch.randn(tokens, layer.outer, generator=generator).cuda().bfloat16(),
            *routing(tokens, layer.top_k, layer.experts, generator),
        )


def time_linear(make: Make, rows: int, columns: int) -> Iterator[tuple[int, float, int, dict[str, float]]]:
    """For each number of tokens: microseconds of a linear layer, its bytes, microseconds with decoded weights."""
    matrix = on_device(make(1, rows, columns, 1))
    kernels, nbytes = kernels_of(matrix.kind), matrix.data.numel()
    matrices = copies(matrix, rotated(nbytes))
    for tokens in TOKENS:
        x = torch.randn(tokens, columns, device="cuda").bfloat16()
        out = torch.empty(tokens, rows, device="cuda")
        took = microseconds([partial(kernels.linear, m, x, out) for m in matrices])
        decoded = {"decoded": microseconds([partial(prompt.linear, m, x) for m in matrices])} if tokens > 1 else {}
        yield tokens, took, nbytes, decoded


def run_layer(
    matrices: tuple[DeviceMatrix, ...], x: Tensor, index: Tensor, scales: Tensor, hidden: Tensor, out: Tensor
) -> None:
    """The launches of a layer."""
    gate, up, down = matrices
    kernels_of(gate.kind).gated(gate, up, x, index, hidden)
    kernels_of(down.kind).combine(down, hidden, index, scales, out)


def run_prompt(
    matrices: tuple[DeviceMatrix, ...], x: Tensor, index: Tensor, scales: Tensor, hidden: Tensor, out: Tensor
) -> None:
    """A layer of more tokens than the launches of `run_layer` take."""
    GpuBackend().experts(matrices, x, index, scales, functional.silu, None)


def time_layer(
    make: Make, layer: Sparse, all_tokens: Sequence[int], run: Callable[..., None]
) -> dict[int, tuple[float, int]]:
    """Microseconds of a layer for each number of tokens, and the bytes of the chosen experts."""
    shapes = [(layer.inner, layer.outer)] * 2 + [(layer.outer, layer.inner)]
    matrices = [on_device(make(layer.experts, *shape, i)) for i, shape in enumerate(shapes)]
    nbytes = sum(matrix.data.numel() for matrix in matrices)
    sets = list(zip(*(copies(matrix, rotated(nbytes)) for matrix in matrices), strict=True))
    times = {}
    for tokens in all_tokens:
        hidden = torch.empty(tokens * layer.top_k, layer.inner, device="cuda")
        out = torch.empty(tokens, layer.outer, device="cuda")
        launches, used = [], 0
        for i, (x, index, scales) in enumerate(inputs(layer, tokens, 16)):
            launches.append(partial(run, sets[i % len(sets)], x, index, scales, hidden, out))
            used += len(index.unique())
        times[tokens] = microseconds(launches), nbytes * used // (16 * layer.experts)
    return times


def time_experts(make: Make, layer: Sparse) -> tuple[float, int]:
    """Microseconds of one launch, gate and up projections of a token's experts, and their bytes."""
    matrices = [on_device(make(layer.top_k, layer.inner, layer.outer, seed)) for seed in range(2)]
    nbytes = sum(matrix.data.numel() for matrix in matrices)
    x = torch.randn(1, layer.outer, device="cuda").bfloat16()
    index = torch.arange(layer.top_k, device="cuda").view(1, -1)
    hidden = torch.empty(layer.top_k, layer.inner, device="cuda")
    pairs = zip(*(copies(matrix, rotated(nbytes)) for matrix in matrices), strict=True)
    gated = kernels_of(matrices[0].kind).gated
    return microseconds([partial(gated, gate, up, x, index, hidden) for gate, up in pairs]), nbytes


def line(name: str, what: str, tokens: int, took: float, nbytes: int, others: dict[str, float]) -> dict[str, Any]:
    """Print a row of the results."""
    ratios = {peer: round(other / took, 2) for peer, other in others.items()}
    rate = nbytes / took / 1e6
    print(f"{name:28} {what:18} {tokens:3} tokens {took:8.1f} us {rate:5.2f} TB/s ", ratios, flush=True)
    return {
        "specification": name, "what": what, "tokens": tokens, "us": round(took, 2), "bytes": nbytes,
        "tb_per_s": round(rate, 3), "ratios": ratios,
        "others_us": {peer: round(other, 2) for peer, other in others.items()},
    }  # fmt: skip


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of the table, as they are measured."""
    known = Baselines()
    for name, make in specifications(options.families).items():
        if not any(part in name for part in options.only):
            continue
        if options.experts:
            took, nbytes = time_experts(make, LAYERS["Qwen3-30B-A3B"])
            yield line(name, "8 of Qwen3-30B-A3B", 1, took, nbytes, known.experts(LAYERS["Qwen3-30B-A3B"]))
        for what, shape in LINEAR.items() if options.linear else ():
            if not any(part in what for part in options.shapes):
                continue
            for tokens, took, nbytes, decoded in time_linear(make, *shape):
                yield line(name, what, tokens, took, nbytes, known.linear(*shape, tokens) | decoded)
        for what, layer in LAYERS.items() if options.layers else ():
            if not any(part in what for part in options.shapes):
                continue
            measured = {} if options.prompts_only else time_layer(make, layer, LAYER_TOKENS, run_layer)
            if options.prompts or options.prompts_only:
                measured |= time_layer(make, layer, PROMPT_TOKENS, run_prompt)
            for tokens, (took, nbytes) in measured.items():
                yield line(name, what, tokens, took, nbytes, known.layer(layer, tokens))
            torch.cuda.empty_cache()


def add(file: Path, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Add lines to a file of results; they replace those of the same specification, shape and tokens."""
    old = json.loads(file.read_text())["lines"] if file.exists() else []
    lines = {(row["specification"], row["what"], row["tokens"]): row for row in old + rows}
    file.write_text(json.dumps({**about, "lines": list(lines.values())}, indent=1) + "\n")


def main() -> None:
    """Run the requested timings, and write each result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--only", nargs="*", default=[""], help="substrings of the names of specifications")
    parser.add_argument("--shapes", nargs="*", default=[""], help="substrings of the names of shapes")
    parser.add_argument("--no-linear", dest="linear", action="store_false")
    parser.add_argument("--no-experts", dest="experts", action="store_false", help="omit the launch of 8 experts")
    parser.add_argument("--prompts", action="store_true", help="also time layers of 128 to 4096 tokens")
    parser.add_argument("--prompts-only", action="store_true", help="time no other layers")
    parser.add_argument("--no-layers", dest="layers", action="store_false")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    one = torch.empty(1, device="cuda")
    found: dict[str, Any] = {**device_name(), "smallest_launch_us": round(microseconds([lambda: one.fill_(1)] * 8), 2)}
    for row in run(options):
        if options.results:
            add(options.results, found, [row])


if __name__ == "__main__":
    main()

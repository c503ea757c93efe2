"""Times products of group-wise integers, and a whole layer of experts, against other packages from PyPI.

    python -m benches.cpu.groupwise [--threads 2] [--seconds 1.5] [--parts one many layer]
        [--shapes 14336x4096 4096x14336]
        [--isas avx512 avx2 scalar] [--peers torch onnxruntime auto-round-lib llama-cpp-python] [--weights 4:64 3:64]
        [--out build/groupwise.json]

One token: 14336x4096 and 4096x14336; each peer uses at least 1 GB of weights per round, so that no cache holds them.
The machine's plain reading bandwidth is measured before every peer. Many tokens: 16, 64 and 256 on 14336x4096. The
layer is Qwen3-30B-A3B's: 128 experts of 768 x 2048, 8 per token, int4 in groups of 64, over several layers' weights.
Prints medians over rounds. Peers run one after the other, because each has its own thread pool that keeps spinning for
a while; moepack runs first and last."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benches.tools import machine
from benches.tools.ggml import ggml_peers
from benches.tools.peers import (
    PACKAGES,
    Absent,
    Peer,
    aligned,
    encode,
    linear_peers,
    moepack_peer,
    onnx_session,
    onnx_tensor,
    versions,
)
from moepack import _core
from moepack.backends.speeds import read_bandwidth

COLD = 1 << 30
WARM = 200 << 20
"""With many tokens arithmetic dominates, so weights need not be cold, and rounds are short."""
INT4, INT4_WIDE = (4, 64), (4, 128)
WEIGHTS = (INT4, INT4_WIDE, (3, 64), (2, 64), (8, 64))
"""Bits and group sizes of moepack's formats."""
EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768


def median_round(run: Callable[[], object], seconds: float) -> float:
    """The median time of a round in seconds, over at least three after one warm-up."""
    run()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < deadline and len(times) < 1000):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Report:
    """Collects and prints the figures of a run."""

    def __init__(self, seconds: float, threads: int, out: Path) -> None:
        self.seconds, self.threads, self.out = seconds, threads, out
        self.figures: list[dict[str, Any]] = []
        self.bandwidth = 0.0

    def probe(self) -> None:
        """Measure the bandwidth to compare the next figures with."""
        gc.collect()
        self.bandwidth = read_bandwidth(1 << 29, 5) / 1e9

    def save(self) -> None:
        """Write the figures so far."""
        machine.save(self.out, self.threads, {"peers": versions(), "rows": self.figures})

    def add(self, part: str, tokens: int, name: str, seconds: float, nbytes: int, operations: int) -> None:
        """Record a figure."""
        row = {
            "part": part, "tokens": tokens, "name": name, "us": round(seconds * 1e6, 1), "mb": round(nbytes / 1e6, 2),
            "gb_s": round(nbytes / seconds / 1e9, 2), "read_gb_s": round(self.bandwidth, 2),
            "gop_s": round(operations / seconds / 1e9, 1),
        }  # fmt: skip
        self.figures.append(row)
        share = f"{row['gb_s']:6.1f} of {row['read_gb_s']:.1f} GB/s, {row['gop_s']:.0f} GOP/s"
        print(f"{part:<11} {tokens:>3} tokens  {name:<46} {row['us']:>10.1f} us  {share}", flush=True)
        self.save()

    def absent(self, part: str, peer: Absent) -> None:
        """Record an absent peer."""
        self.figures.append({"part": part, "name": peer.name, "absent": peer.reason})
        print(f"{part:<11} absent: {peer.name}: {peer.reason[:90]}", flush=True)

    def peer(
        self, part: str, make: Callable[[], Peer | Absent], columns: int, operations: int, tokens: list[int]
    ) -> None:
        """Create a peer, time it with each number of tokens, and drop it."""
        self.probe()
        peer = make()
        if isinstance(peer, Absent):
            return self.absent(part, peer)
        for count in tokens:
            x = torch.randn(count, columns, generator=torch.Generator().manual_seed(count))
            seconds = median_round(peer.round_of(x), self.seconds) / peer.copies
            self.add(part, count, peer.name, seconds, peer.nbytes, count * operations)


def products(report: Report, shape: tuple[int, ...], tokens: list[int], cold: int, options: argparse.Namespace) -> None:
    """One matrix: moepack's formats, modes and instruction sets, and the peers."""
    (rows, columns), isas = shape, options.isas
    part = f"{rows}x{columns}"
    wanted = [(isa, "int8", *weights) for isa in isas for weights in WEIGHTS if isa == isas[0] or weights == INT4]
    wanted += [
        (isa, "exact", *weights) for isa in isas for weights in WEIGHTS if isa == isas[0] and weights != INT4_WIDE
    ]
    wanted += [(isas[0], "bf16", *weights) for weights in WEIGHTS if max(tokens) > 1]
    ours = [
        partial(moepack_peer, rows, columns, bits, group, mode, isa, cold)
        for isa, mode, bits, group in wanted
        if f"{bits}:{group}" in options.weights
    ]
    sizes = (rows, columns, report.threads, cold)
    others = [make for package in options.peers for make in linear_peers(package, *sizes)]
    others += ggml_peers(*sizes) if "llama-cpp-python" in options.peers else []
    others += [partial(moepack_peer, rows, columns, 4, 64, "int8", isas[0], cold)] if others else []
    for make in [*ours, *others]:
        report.peer(part, make, columns, 2 * rows * columns, tokens)
        gc.collect()


def routing(tokens: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Different experts for each token, and weights that add up to 1."""
    generator = np.random.default_rng(1000 * layer + tokens)
    experts = np.stack([generator.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]).astype(np.int64)
    return experts, np.full((tokens, TOP_K), 1 / TOP_K, np.float32)


def our_layers(count: int) -> list[list[_core.PackedTensor]]:
    """Gate, up and down projections of several layers."""
    shapes = ((EXPERTS, INNER, HIDDEN), (EXPERTS, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    sources = [encode(shape, 4, 64, seed) for seed, shape in enumerate(shapes)]
    return [[_core.PackedTensor(aligned(source)) for source in sources] for _ in range(count)]


def layer_rounds(tokens: list[int], isas: list[str]) -> Iterator[tuple[str, int, int, Callable[[], object], int]]:
    """Rounds of moepack: name, tokens, layers per round, the round, bytes read per layer."""
    layers = our_layers(3)
    size = sum(blob.nbytes for blob in layers[0])
    for isa in isas:
        for mode in ("int8", "exact", "bf16"):
            for count in tokens:
                x = np.random.default_rng(count).standard_normal((count, HIDDEN)).astype(np.float32)
                choices = [routing(count, i) for i in range(24 if count == 1 else 3)]

                def run(choices: Any = choices, x: Any = x, mode: str = mode, isa: str = isa) -> None:
                    for i, (experts, weights) in enumerate(choices):
                        _core.gated_experts(*layers[i % 3], x, experts, weights, (mode,) * 3, isa)

                used = statistics.mean(len(np.unique(experts)) for experts, _ in choices)
                yield f"moepack int4 group 64 {mode} {isa}", count, len(choices), run, int(size * used / EXPERTS)


def bf16_rounds(tokens: list[int]) -> Iterator[tuple[str, int, int, Callable[[], object], int]]:
    """Rounds of a loop over experts in torch, like transformers' eager implementation."""
    gate_up = torch.empty(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.bfloat16).uniform_(-0.05, 0.05)
    down = torch.empty(EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16).uniform_(-0.05, 0.05)
    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu

    def layer(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for expert in experts.unique().tolist():
            token, place = torch.where(experts == expert)
            gate, up = linear(x[token], gate_up[expert]).chunk(2, dim=-1)
            y.index_add_(0, token, linear(silu(gate) * up, down[expert]) * weights[token, place, None])
        return y

    for count in tokens:
        x = torch.randn(count, HIDDEN).bfloat16()
        choices = [routing(count, i) for i in range(12 if count == 1 else 2)]
        given = [(torch.from_numpy(experts), torch.from_numpy(weights).bfloat16()) for experts, weights in choices]
        used = statistics.mean(len(np.unique(experts)) for experts, _ in choices)

        def run(given: Any = given, x: torch.Tensor = x) -> None:
            for experts, weights in given:
                layer(x, experts, weights)

        yield "torch bf16, a loop over experts", count, len(given), run, int(used * 6 * INNER * HIDDEN)


def onnx_rounds(tokens: list[int], threads: int) -> Iterator[tuple[str, int, int, Callable[[], object], int]]:
    """Rounds of onnxruntime's QMoE, int4 in blocks of 64 with int8 activations."""
    from onnx import TensorProto, helper

    generator = np.random.default_rng(0)
    parts: dict[str, np.ndarray] = {}
    for name, rows, columns in (("fc1", 2 * INNER, HIDDEN), ("fc2", HIDDEN, INNER)):
        parts[f"{name}_w"] = generator.integers(0, 256, (EXPERTS, rows, columns // 2), dtype=np.uint8)
        parts[f"{name}_s"] = generator.uniform(0.001, 0.002, (EXPERTS, rows, columns // 64)).astype(np.float32)
    settings = {
        "k": TOP_K, "activation_type": "swiglu", "swiglu_fusion": 1, "expert_weight_bits": 4, "block_size": 64,
        "normalize_routing_weights": 1, "activation_alpha": 1.0, "activation_beta": 0.0, "accuracy_level": 4,
    }  # fmt: skip
    names = ["x", "router", "fc1_w", "fc1_s", "", "fc2_w", "fc2_s"]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["tokens", HIDDEN]),
        helper.make_tensor_value_info("router", TensorProto.FLOAT, ["tokens", EXPERTS]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["tokens", HIDDEN])]
    tensors = [onnx_tensor(name, values) for name, values in parts.items()]

    def session_of(**settings: Any) -> Any:
        node = helper.make_node("QMoE", names, ["y"], domain="com.microsoft", **settings)
        return onnx_session([node], inputs, outputs, tensors, threads)

    try:
        session = session_of(**settings)
    except Exception as error:
        # Before 1.31 there is no such attribute.
        if "accuracy_level" not in str(error):
            raise
        session = session_of(**{key: value for key, value in settings.items() if key != "accuracy_level"})
    size = sum(values.nbytes for values in parts.values())
    for count in tokens:
        x = np.random.default_rng(count).standard_normal((count, HIDDEN)).astype(np.float32)
        choices = [routing(count, i)[0] for i in range(24 if count == 1 else 3)]
        feeds = []
        for experts in choices:
            router = np.full((count, EXPERTS), -20, np.float32)
            np.put_along_axis(router, experts, 1.0, axis=1)
            feeds.append({"x": x, "router": router})

        def run(feeds: Any = feeds) -> None:
            for feed in feeds:
                session.run(None, feed)

        used = statistics.mean(len(np.unique(experts)) for experts in choices)
        yield "onnxruntime QMoE int4 group 64", count, len(feeds), run, int(size * used / EXPERTS)


def layers(report: Report, isas: list[str]) -> None:
    """The layer of experts."""
    tokens = [1, 16, 256]
    for source in (partial(layer_rounds, tokens, isas), partial(bf16_rounds, tokens),
                   partial(onnx_rounds, tokens, report.threads)):  # fmt: skip
        report.probe()
        try:
            for name, count, calls, run, nbytes in source():
                seconds = median_round(run, report.seconds) / calls
                report.add("layer", count, name, seconds, nbytes, count * TOP_K * 6 * INNER * HIDDEN)
        except Exception as error:
            report.absent("layer", Absent(source.func.__name__, str(error).splitlines()[0]))
        gc.collect()


def main() -> None:
    """Run the parts and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds per figure, at least three rounds")
    parser.add_argument("--parts", nargs="*", default=["one", "many", "layer"], choices=["one", "many", "layer"])
    parser.add_argument(
        "--shapes", nargs="*", default=["14336x4096", "4096x14336"], help="shapes; many tokens use the first"
    )
    parser.add_argument("--isas", nargs="*", default=[_core.isa()], help="the first is measured in all formats")
    parser.add_argument(
        "--peers", nargs="*", default=PACKAGES, choices=PACKAGES, help="packages to compare with; none: only moepack"
    )
    names = [f"{bits}:{group}" for bits, group in WEIGHTS]
    parser.add_argument("--weights", nargs="*", default=names, choices=names, help="bits:group of moepack's products")
    parser.add_argument("--cold", type=int, default=COLD, help="bytes of weights per round of one token")
    parser.add_argument("--out", type=Path, default=Path("build/groupwise.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    _core.set_threads(options.threads)
    print(machine.describe(options.threads), versions(), _core.kernels()["groupwise"], flush=True)
    report = Report(options.seconds, options.threads, options.out)
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    with torch.inference_mode():
        for part in options.parts:
            if part == "one":
                for shape in shapes:
                    products(report, shape, [1], options.cold, options)
            elif part == "many":
                products(report, shapes[0], [16, 64, 256], min(WARM, options.cold), options)
            else:
                layers(report, options.isas)
        report.save()


if __name__ == "__main__":
    # The C library allocates in huge pages for all peers; it reads the setting when a process starts.
    if "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    main()

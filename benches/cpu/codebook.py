"""Times products with codebook weights, torch bf16 and int8, and, if installed, 4 bits of onnxruntime and bitsandbytes.

    python -m benches.cpu.codebook --threads 2 --tokens 1 4 16 64 256 --out build/codebook.json

Every peer cycles through copies of its weights that together exceed every cache, so weights come from memory. Peers
alternate in one run, and the median of their calls counts, or with `--fastest` the minimum: on a loaded machine, one
thread's fastest call is the undisturbed one. `read` is the time of a plain sum over the same number of bytes, a lower
bound for one token. Prints microseconds and the speed-up over torch bf16. `--layer` adds a layer of experts of
Qwen3-30B-A3B (128 of 3 x 768 x 2048, 8 per token), onnxruntime's QMoE, and a loop over experts in torch.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benches.cpu import groupwise
from benches.tools import machine
from moepack import _core

SHAPES = ((14336, 4096), (768, 2048))
MODES = ("exact", "int16", "int8")


class Peer:
    """One way to multiply, over a rotation of copies of its weights."""

    def __init__(self, name: str, multiply: Callable[[int], object], copies: int) -> None:
        self.name, self.multiply, self.copies = name, multiply, copies
        self.times: list[float] = []
        self.calls = 0

    def step(self) -> None:
        """Time one call on the next copy."""
        start = time.perf_counter()
        self.multiply(self.calls % self.copies)
        self.times.append(time.perf_counter() - start)
        self.calls += 1


def spread(contest: list[Peer]) -> None:
    """Let every peer start at different copies; the cache may hold a copy that another peer has just read."""
    for number, peer in enumerate(contest):
        peer.calls = number * peer.copies // len(contest)


def packed(rows: int, columns: int, bits: int, activation_bits: int, experts: int = 1) -> np.ndarray:
    """A random tensor with one codebook per row, and one-byte centroids if activations are rounded."""
    rng = np.random.default_rng(rows + bits)
    codes = rng.integers(0, 1 << bits, (experts, rows, columns), np.uint8)
    top, unit = (127, 256) if activation_bits else (32639, 1)
    centroids = np.sort(rng.integers(-top, top + 1, (experts, rows, 1, 1 << bits)), axis=-1).astype(np.int16) * unit
    scales = rng.uniform(1e-6, 2e-6, (experts, rows, 1)).astype(np.float32)
    return _core.encode_codebook(
        codes, centroids.astype(np.int16), scales, bits=bits, block=1 << 16, ndim=3 if experts > 1 else 2,
        activation_bits=activation_bits,
    )  # fmt: skip


def rotation(source: np.ndarray, cold: int) -> list[np.ndarray]:
    """Page-aligned copies of a tensor, at least `cold` bytes in total."""
    stride = -(-source.nbytes // 4096) * 4096
    arena = np.empty((1 + cold // stride, stride), np.uint8)
    for copy in arena:
        copy[: source.nbytes] = source
    return [copy[: source.nbytes] for copy in arena]


def own(rows: int, columns: int, x: np.ndarray, args: argparse.Namespace) -> list[Peer]:
    """moepack, by bits, mode and instruction set. The mode int8 uses tensors with activation bits."""

    def multiply(blobs: list[Any], mode: str, isa: str, copy: int) -> object:
        return blobs[copy].matmul(x, mode=mode, isa=isa)

    found = []
    for bits, activation_bits in itertools.product(args.bits, (0, 8)):
        modes = [mode for mode in args.modes if (mode == "int8") == bool(activation_bits)]
        if not modes:
            continue
        copies = rotation(packed(rows, columns, bits, activation_bits), args.cold)
        blobs = [_core.PackedTensor(copy) for copy in copies]
        for isa, mode in itertools.product(args.isa, modes):
            found.append(Peer(f"codebook{bits} {mode} {isa}", partial(multiply, blobs, mode, isa), len(blobs)))
        if not activation_bits and "int8" in args.modes:
            continue
        words = [copy[: copy.size // 8 * 8].view(np.int64) for copy in copies]
        sums = [torch.from_numpy(copy) for copy in words]
        found.append(Peer(f"read {bits} bits", lambda i, sums=sums: sums[i].sum(), len(sums)))
    return found


def onnxruntime_peer(rows: int, columns: int, x: np.ndarray, threads: int, cold: int) -> Peer | None:
    """Com.microsoft.MatMulNBits, 4 bits, groups of 128, accuracy level 4 (int8 activations)."""
    try:
        import onnx
        import onnxruntime
        from onnx import TensorProto, helper
    except ImportError:
        return None
    rng = np.random.default_rng(0)
    groups, sessions = columns // 128, []
    size = rows * columns // 2 + rows * groups * 4
    for _ in range(1 + cold // size):
        # Unique bytes: onnxruntime shares identical initialisers.
        weights = rng.integers(0, 256, (rows, groups, 64), np.uint8)
        scales = rng.uniform(0.001, 0.002, rows * groups).astype(np.float32)
        node = helper.make_node(
            "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft",
            K=columns, N=rows, bits=4, block_size=128, accuracy_level=4,
        )  # fmt: skip
        graph = helper.make_graph(
            [node],
            "product",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, columns])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, rows])],
            [onnx.numpy_helper.from_array(weights, "w"), onnx.numpy_helper.from_array(scales, "s")],
        )
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=imports)
        model.ir_version = 8
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        sessions.append(onnxruntime.InferenceSession(model.SerializeToString(), options))
    return Peer("onnxruntime MatMulNBits 4 bit", lambda i: sessions[i].run(None, {"x": x}), len(sessions))


def bitsandbytes_peer(rows: int, columns: int, x: torch.Tensor, cold: int) -> Peer | None:
    """Linear4bit, nf4 in groups of 64, bf16 activations."""
    try:
        import bitsandbytes
    except ImportError:
        return None
    layer = bitsandbytes.nn.Linear4bit(columns, rows, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16)
    weight = torch.randn(rows, columns).bfloat16()
    layer.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    layer = layer.to("cpu").eval()
    with torch.inference_mode():
        layer(x)  # some versions rearrange the weights in the first call
    layers = [deepcopy(layer) for _ in range(1 + cold // (rows * columns // 2))]
    return Peer("bitsandbytes nf4", lambda i: layers[i](x), len(layers))


def int8_peer(rows: int, columns: int, x: torch.Tensor, cold: int) -> Peer | None:
    """torch's dynamically quantized linear layer: int8 weights with a scale per row, in oneDNN's layout."""
    try:
        torch.backends.quantized.engine = "onednn"
        codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
        scales, zeros = torch.full((rows,), 0.01, dtype=torch.float64), torch.zeros(rows, dtype=torch.int64)
        weight = torch._make_per_channel_quantized_tensor(codes, scales, zeros, 0)
        packed = [torch.ops.quantized.linear_prepack(weight, None) for _ in range(1 + cold // (rows * columns))]
    except (RuntimeError, AttributeError):
        return None
    return Peer("torch int8 dynamic", lambda i: torch.ops.quantized.linear_dynamic(x, packed[i]), len(packed))


@torch.inference_mode()
def measure(rows: int, columns: int, tokens: int, args: argparse.Namespace) -> dict[str, float]:
    """Microseconds of each peer: the median of alternating calls, or the fastest call."""
    x = np.random.default_rng(tokens).standard_normal((tokens, columns)).astype(np.float32)
    x16 = torch.from_numpy(x).bfloat16()
    one = torch.randn(rows, columns).bfloat16()
    dense = [one.clone() for _ in range(1 + args.cold // (2 * rows * columns))]
    contest = [Peer("torch bf16", lambda i: torch.nn.functional.linear(x16, dense[i]), len(dense))]
    contest += own(rows, columns, x, args)
    if (peer := onnxruntime_peer(rows, columns, x, args.threads, args.cold)) is not None:
        contest.append(peer)
    if (peer := bitsandbytes_peer(rows, columns, x16, args.cold)) is not None:
        contest.append(peer)
    if (peer := int8_peer(rows, columns, torch.from_numpy(x), args.cold)) is not None:
        contest.append(peer)
    for peer in contest:
        peer.multiply(0)
    spread(contest)
    deadline = time.perf_counter() + args.seconds * len(contest)
    while time.perf_counter() < deadline or len(contest[0].times) < 5:
        for peer in contest:
            peer.step()
    summary = min if args.fastest else statistics.median
    return {peer.name: summary(peer.times) * 1e6 for peer in contest}


def layer_rounds(tokens: list[int], modes: list[str]) -> Iterator[tuple[str, int, int, Callable[[], object], int]]:
    """Rounds of moepack over three layers' weights, like `groupwise.layer_rounds`."""
    shapes = ((768, 2048), (768, 2048), (2048, 768))
    for mode in modes:
        activation_bits = 8 if mode == "int8" else 0
        sources = [packed(rows, columns, 4, activation_bits, groupwise.EXPERTS) for rows, columns in shapes]
        layers = [[_core.PackedTensor(rotation(source, 0)[0]) for source in sources] for _ in range(3)]
        size = sum(source.nbytes for source in sources)
        for count in tokens:
            x = np.random.default_rng(count).standard_normal((count, 2048)).astype(np.float32)
            choices = [groupwise.routing(count, i) for i in range(24 if count == 1 else 3)]

            def run(choices: Any = choices, x: Any = x, mode: str = mode, layers: Any = layers) -> None:
                for i, (experts, weights) in enumerate(choices):
                    _core.gated_experts(*layers[i % 3], x, experts, weights, (mode,) * 3)

            used = statistics.mean(len(np.unique(experts)) for experts, _ in choices)
            yield f"codebook4 {mode}", count, len(choices), run, int(size * used / groupwise.EXPERTS)


def layer(tokens: list[int], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Microseconds of a layer, by number of tokens and peer."""
    found: dict[str, dict[str, float]] = {f"layer tokens {count}": {} for count in tokens}
    sources = [partial(layer_rounds, tokens, args.modes), partial(groupwise.bf16_rounds, tokens)]
    for source in [*sources, partial(groupwise.onnx_rounds, tokens, args.threads)]:
        try:
            for name, count, calls, run, _ in source():
                seconds = groupwise.median_round(run, args.seconds) / calls
                found[f"layer tokens {count}"][name] = seconds * 1e6
                print(f"layer, {count} tokens: {name} {seconds * 1e6:.0f} us", flush=True)
        except ImportError as error:
            print(f"left out: {error}")
    return found


def main() -> None:
    """Measure every shape and number of tokens; print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds per measurement and peer")
    parser.add_argument("--fastest", action="store_true", help="report the fastest call of single products")
    parser.add_argument("--bits", nargs="*", type=int, default=[4])
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument("--isa", nargs="*", default=[_core.isa()])
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 4, 16, 64, 256])
    parser.add_argument("--shapes", nargs="*", default=[f"{rows}x{columns}" for rows, columns in SHAPES])
    parser.add_argument("--layer", nargs="*", type=int, default=[], help="numbers of tokens for the layer of experts")
    parser.add_argument("--cold", type=int, default=1_000_000_000, help="minimum bytes of a peer's weights")
    parser.add_argument("--out", type=Path, default=Path("build/codebook.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _core.set_threads(args.threads)
    print(machine.describe(args.threads))
    figures: dict[str, Any] = {}
    for shape in args.shapes:
        rows, columns = map(int, shape.split("x"))
        for tokens in args.tokens:
            times = figures[f"{shape} tokens {tokens}"] = measure(rows, columns, tokens, args)
            base = times["torch bf16"]
            row = "  ".join(f"{name} {value:.0f} ({base / value:.2f}x)" for name, value in times.items())
            print(f"{shape}, {tokens} tokens, us: {row}", flush=True)
            machine.save(args.out, args.threads, figures)
    if args.layer:
        figures |= layer(args.layer, args)
        machine.save(args.out, args.threads, figures)


if __name__ == "__main__":
    main()

"""Checks and times FloE's kernels on a GPU: products of chosen channels against float64, and the compact transfer.

PYTHONPATH=python python -m benches.gpu.floe check [--seed N]
PYTHONPATH=python python -m benches.gpu.floe speed [--results FILE]
PYTHONPATH=python python -m benches.gpu.floe transfers
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from benches.gpu import groupwise
from benches.gpu.cases import copies, device_name, on_device, routing
from benches.gpu.check import EXACT, ROUNDED, error, poisoned
from benches.gpu.speed import microseconds
from moepack import _core
from moepack.backends.gpu.channels import KERNELS, gather
from moepack.backends.gpu.families import kernels_of
from moepack.backends.gpu.layer import LayerKernels
from moepack.backends.gpu.matrix import DeviceMatrix

MIXTRAL = 4096, 14336
"""The model's width and the channels of an expert of Mixtral-8x7B."""

SPARSITIES = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
COPIES = 6
"""Alternating experts: at 90 % skipped channels, their bytes are three times the cache."""

TRANSFERS = {"23 MB": 0.1, "47 MB": 0.2, "94 MB": 0.4}
"""Shares of the records of an expert in bfloat16."""

SLEEP = 4_000_000
"""Cycles for which a stream is busy while a transfer is queued: about 2 ms."""


class Layer(NamedTuple):
    """Experts of FloE on a GPU, and the values of their records."""

    up: DeviceMatrix
    channels: DeviceMatrix
    values: Tensor


def records(experts: int, channels: int, columns: int, seed: int, bits: int, threshold: float) -> NDArray[np.uint8]:
    """Packed records of random values of about `columns ** -0.5`; above 2^24, channels repeat."""
    random, count = np.random.default_rng(seed), min(channels, max(1, (1 << 24) // columns))
    shape, scale = (experts, count, 2 * columns), columns**-0.5
    repeated = partial(np.take, indices=np.arange(channels) % count, axis=1)
    thresholds = np.full(experts, threshold, np.float32)
    if bits == 16:
        values = torch.from_numpy(random.standard_normal(shape, np.float32) * scale).bfloat16()
        return _core.encode_channels(repeated(values.view(torch.uint16).numpy()), thresholds, bits=16)
    codes = random.integers(0, 1 << bits, shape, np.uint8)
    scales = torch.rand(experts, count, 2 * -(-columns // 64)).add_(0.5).mul_(scale * 2.0 ** (2 - bits))
    scales = scales.bfloat16().float().numpy()
    return _core.encode_channels((repeated(codes), repeated(scales)), thresholds, bits=bits)


def layer(experts: int, channels: int, columns: int, seed: int, bits: int, threshold: float, *, host: bool) -> Layer:
    """Make a layer; `host`: its records stay in pinned memory of the host."""
    up = on_device(
        groupwise.make(experts, channels, columns, seed, bits=2, group=64, symmetric=False, dtype=torch.bfloat16)
    )
    data = records(experts, channels, columns, seed, bits, threshold)
    packed = _core.PackedTensor(data)
    bytes_ = torch.from_numpy(data).pin_memory() if host else torch.from_numpy(data).cuda()
    matrix = DeviceMatrix(bytes_, packed.shape, packed.kind, packed.format, packed.details(), packed.sections())
    KERNELS.prepare(matrix)
    values = torch.empty(0)
    if experts * channels * columns < 1 << 24:
        values = torch.from_numpy(packed.dequantize()).cuda()
    return Layer(up, matrix, values)


def expected(made: Layer, x: Tensor, index: Tensor, weights: Tensor, threshold: float) -> tuple[Tensor, int]:
    """The equation in float64 from the kernels' up projection outputs, and the number of computed channels."""
    experts, rows, _ = made.up.shape
    ups = torch.zeros(index.numel(), rows, device="cuda")
    kernels = kernels_of(made.up.kind)
    assert isinstance(kernels, LayerKernels)
    kernels.project(made.up, x, index, ups)
    out, computed = torch.zeros(x.shape, dtype=torch.float64, device="cuda"), 0
    for slot, expert in enumerate(index.flatten().tolist()):
        if 0 <= expert < experts:
            token, up = x[slot // index.shape[1]].double(), ups[slot].double()
            gate, down = made.values[expert].double().chunk(2, -1)
            wanted = up.abs() >= threshold
            inner = functional.silu(gate @ token) * up * wanted
            out[slot // index.shape[1]] += weights.flatten()[slot].double() * (inner @ down)
            computed += int(wanted.sum())
    return out, computed


def check_layer(made: Layer, threshold: float, tokens: int, dtype: torch.dtype, generator: torch.Generator) -> float:
    """The error of a layer that runs twice and then in a graph with another routing; asserts counts and bits."""
    experts, _, columns = made.up.shape
    top_k = min(2, experts)
    index, weights = routing(tokens, top_k, experts, generator)
    if tokens == 3:
        index[0, 0], index[-1, -1] = experts, -1
    x, out, again = torch.randn(tokens, columns, device="cuda").to(dtype), *(poisoned(tokens, columns) for _ in "12")
    before = int(made.channels.tables["computed"][0])
    run = partial(KERNELS.sparse, made.up, made.channels, x, index, weights)
    run(out), run(again)
    want, computed = expected(made, x, index, weights, threshold)
    assert torch.equal(out, again), "not deterministic"
    assert int(made.channels.tables["computed"][0]) - before == 2 * computed
    worst = error(out, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(again)
    other, scales = routing(tokens, top_k, experts, generator)
    index.copy_(other), weights.copy_(scales), again.fill_(float("nan"))
    graph.replay()
    return max(worst, error(again, expected(made, x, index, weights, threshold)[0]))


def check_refined(bits: int, tokens: int, dtype: torch.dtype, generator: torch.Generator) -> float:
    """The error of coarse copies with residuals beside the equations in float64, by the kernels' coarse products.

    They run twice, then in a graph with another routing. What rounding the activations of the coarse down projection
    makes of the last bits of values is a part of the error.
    """
    experts, channels, columns, threshold = 5, 200, 72, 0.2
    make = partial(groupwise.make, experts, bits=2, group=64, symmetric=False, dtype=torch.bfloat16)
    shapes = (channels, columns), (channels, columns), (columns, channels)
    gate, up, down = (on_device(make(*shape, seed)) for seed, shape in enumerate(shapes))
    made = layer(experts, channels, columns, 3, bits, threshold, host=False)
    kernels, x = kernels_of("groupwise"), torch.randn(tokens, columns, device="cuda").to(dtype)
    index, weights = routing(tokens, 2, experts, generator)
    index[-1, -1] = experts
    out, again, coarse = (poisoned(tokens, columns) for _ in "123")
    gates, ups = (torch.zeros(2 * tokens, channels, device="cuda") for _ in "12")

    def wanted() -> Tensor:
        kernels.project(gate, x, index, gates), kernels.project(up, x, index, ups)
        inner, added = (
            functional.silu(gates.double()) * ups.double(),
            torch.zeros(tokens, columns, device="cuda").double(),
        )
        for slot, (expert, weight) in enumerate(zip(index.flatten().tolist(), weights.flatten().double(), strict=True)):
            if expert < experts:
                rows, downs = made.values[expert].double().chunk(2, -1)
                refined = (inner[slot] * weight).abs() >= threshold
                fine = functional.silu(gates[slot].double() + rows @ x[slot // 2].double()) * ups[slot].double()
                inner[slot] = torch.where(refined, fine, inner[slot])
                added[slot // 2] += weight * ((fine * refined) @ downs)
        kernels.combine(down, inner.float(), index, weights, coarse)
        return coarse.double() + added

    run = partial(KERNELS.refined, gate, up, down, made.channels, x, index, weights)
    run(out), run(again)
    assert torch.equal(out, again), "not deterministic"
    worst = error(out, wanted())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(again)
    other, scales = routing(tokens, 2, experts, generator)
    index.copy_(other), weights.copy_(scales), again.fill_(float("nan"))
    graph.replay()
    return max(worst, error(again, wanted()))


def check(options: argparse.Namespace) -> None:
    """Check every width, odd shapes, batches, thresholds and records on the host; exit with 1 above the bound."""
    generator, failed = torch.Generator().manual_seed(options.seed), False
    torch.manual_seed(options.seed)
    for bits in (16, 8, 4):
        worst = 0.0
        for experts, channels, columns in ((1, 7, 33), (5, 200, 72), (8, 1000, 384), (3, 3000, 520)):
            for threshold in (0.0, 0.8, float("inf")):
                made = layer(experts, channels, columns, options.seed, bits, threshold, host=channels == 1000)
                for tokens, dtype in ((1, torch.bfloat16), (3, torch.float16), (64, torch.float32)):
                    worst = max(worst, check_layer(made, threshold, tokens, dtype, generator))
            if not made.channels.data.is_cpu:
                out = torch.empty(made.values.shape, device="cuda")
                KERNELS.dequantize(made.channels, 0, out)
                worst = max(worst, error(out, made.values))
        failed = failed or not worst <= EXACT
        print(f"channels of {bits:2} bits: {worst:.1e}", "" if worst <= EXACT else "WRONG")
        batches = (1, torch.bfloat16), (3, torch.float16), (64, torch.float32)
        worst = max(check_refined(bits, tokens, dtype, generator) for tokens, dtype in batches)
        failed = failed or not worst <= ROUNDED
        print(f"residuals of {bits:2} bits: {worst:.1e}", "" if worst <= ROUNDED else "WRONG")
    source = torch.randint(0, 256, (5000, 272), dtype=torch.uint8).pin_memory()
    chosen = torch.randperm(5000, dtype=torch.int32)[:1777].cuda()
    out = torch.zeros(1777, 272, dtype=torch.uint8, device="cuda")
    gather(source, chosen, torch.tensor([1777], dtype=torch.int32, device="cuda"), out)
    failed = failed or not torch.equal(out.cpu(), source[chosen.cpu().long()])
    print("gather", "WRONG" if failed else "right")
    sys.exit(failed)


def time_expert(bits: int, *, host: bool) -> Iterator[dict[str, Any]]:
    """A token through one expert of Mixtral-8x7B: microseconds and bytes at each sparsity."""
    columns, channels = MIXTRAL
    first = layer(1, channels, columns, 1, bits, 0.0, host=host)
    ups = copies(first.up, COPIES)
    stacks = [first.channels] if host else copies(first.channels, COPIES)
    x, index = torch.randn(1, columns, device="cuda").bfloat16(), torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    weights, out, values = (
        torch.ones(1, 1, device="cuda"),
        poisoned(1, columns),
        torch.empty(1, channels, device="cuda"),
    )
    kernels = kernels_of("groupwise")
    assert isinstance(kernels, LayerKernels)
    kernels.project(first.up, x, index, values)
    up_us = microseconds([partial(kernels.project, up, x, index, values) for up in ups])
    size = first.channels.sections["records"][1] // channels
    for sparsity in SPARSITIES:
        threshold = values.abs().flatten().quantile(sparsity)
        for stack in stacks:
            stack.tables["thresholds"].copy_(threshold)
        launches = [
            partial(KERNELS.sparse, up, stacks[i % len(stacks)], x, index, weights, out) for i, up in enumerate(ups)
        ]
        took, read = microseconds(launches), size * int((values.abs() >= threshold).sum())
        place = "host" if host else "gpu"
        print(f"{bits:2} bits on the {place:4} {sparsity:.0%}: {took:7.1f} us, up alone {up_us:.1f}", flush=True)
        yield {
            "records": f"{bits} bits", "place": place, "sparsity": sparsity, "us": round(took, 2),
            "up_us": round(up_us, 2), "up_bytes": first.up.data.numel(), "record_bytes": read,
        }  # fmt: skip


def time_dense() -> float:
    """Microseconds of the expert in bfloat16 through cuBLAS."""
    columns, channels = MIXTRAL
    x = torch.randn(1, columns, device="cuda").bfloat16()
    shapes = ((channels, columns), (channels, columns), (columns, channels))
    sets = [[torch.randn(shape, device="cuda").bfloat16() for shape in shapes] for _ in range(3)]

    def run(gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        inner = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
        return functional.linear(inner, down)

    return microseconds([partial(run, *matrices) for matrices in sets])


def gigabytes(size: int, call: Callable[[], Any], *, behind: bool = False) -> float:
    """10^9 bytes per second of a transfer on its own stream, the median of eleven; `behind`: queued after other
    work, so that the launch from Python is not included."""
    stream, times = torch.cuda.Stream(), []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            if behind:
                torch.cuda._sleep(SLEEP)
            start.record()
            call()
            end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return round(size / statistics.median(times[1:]) / 1e6, 2)


def time_transfers() -> Iterator[dict[str, Any]]:
    """Rates of each way to transfer chosen records to the GPU."""
    columns, channels = MIXTRAL
    source = torch.randint(0, 256, (channels, 4 * columns), dtype=torch.uint8).pin_memory()
    pageable = source.clone()
    for name, share in TRANSFERS.items():
        count = int(share * channels)
        chosen = torch.randperm(channels)[:count]
        listed, number = chosen.int().cuda(), torch.tensor([count], dtype=torch.int32, device="cuda")
        out, size = torch.empty(count, 4 * columns, dtype=torch.uint8, device="cuda"), count * 4 * columns
        ways: dict[str, Callable[[], Any]] = {
            "contiguous pinned copy": partial(out.copy_, source[:count], non_blocking=True),
            "W[idx], then a copy": lambda out=out, chosen=chosen: out.copy_(pageable[chosen]),  # type: ignore[misc]
        }
        for blocks in (16, 32, 64):
            ways[f"gather by {blocks} blocks"] = partial(gather, source, listed, number, out, blocks)
        rates = {way: gigabytes(size, call) for way, call in ways.items()}
        rates |= {
            f"{way}, queued": gigabytes(size, call, behind=True) for way, call in ways.items() if "W[idx]" not in way
        }
        assert torch.equal(out.cpu(), source[chosen])
        print(name, rates, flush=True)
        yield {"records": count, "bytes": size, "gb_per_s": rates}


def speed(options: argparse.Namespace) -> None:
    """Time everything."""
    found: dict[str, Any] = device_name() | {
        "transfers": list(time_transfers()),
        "bf16_dense_us": round(time_dense(), 1),
    }
    print("bf16 through cuBLAS", found["bf16_dense_us"], "us")
    found["lines"] = []
    for bits, host in ((16, False), (8, False), (4, False), (16, True), (8, True)):
        found["lines"] += time_expert(bits, host=host)
        torch.cuda.empty_cache()
        if options.results:
            options.results.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Check or time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("check", "speed", "transfers"))
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    runs = {"check": check, "speed": speed, "transfers": lambda _: print(*time_transfers(), sep="\n")}
    runs[options.what](options)


if __name__ == "__main__":
    main()

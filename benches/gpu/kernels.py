"""Lists the kernels of decoding steps and prompts of a made-up model of Qwen3-30B-A3B's shapes, with their times.

Prints the kernels of one layer in launch order, and all kernels by total time. `steps.py` times whole steps.

    PYTHONPATH=python python -m benches.gpu.kernels "int4 group 64 symmetric" [--layers 48] [--folder DIR]
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benches.gpu import models
from moepack.decoding.decoder import DecoderForward

BATCHES, PROMPTS = (1, 8, 32), (512, 2048)
CONTEXT, WARM, STEPS = 512, 6, 4


class Kernel(NamedTuple):
    """A kernel or copy on the device; times in microseconds."""

    name: str
    start: float
    time: float


def profiled(function: Callable[[], Any]) -> list[Kernel]:
    """The kernels of a function in the order of their starts."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    found = [Kernel(event.name, event.time_range.start, event.time_range.elapsed_us()) for event in events]
    return sorted(found, key=lambda kernel: kernel.start)


@torch.inference_mode()
def steps(model: Any, batch: int, context: int = CONTEXT) -> tuple[list[Kernel], float]:
    """The kernels of one replayed step, and its microseconds without a profiler."""
    model.model.forward = DecoderForward(model.model)
    ids = torch.randint(3, 4000, (batch, context), generator=torch.Generator().manual_seed(1)).cuda()
    state = model(ids, use_cache=True, logits_to_keep=1)

    def run(count: int) -> None:
        nonlocal state
        for _ in range(count):
            token = state.logits[:, -1].argmax(-1, keepdim=True)
            state = model(token, past_key_values=state.past_key_values, use_cache=True)

    run(WARM)
    models.wait()
    start = time.perf_counter()
    run(20)
    models.wait()
    elapsed = (time.perf_counter() - start) / 20
    run(1)
    models.wait()
    return profiled(lambda: run(1)), 1e6 * elapsed


@torch.inference_mode()
def prompt(model: Any, tokens: int) -> tuple[list[Kernel], float]:
    """The kernels of a prompt, and its microseconds without a profiler."""
    ids = torch.randint(3, 4000, (1, tokens), generator=torch.Generator().manual_seed(2)).cuda()
    elapsed = 0.0
    for _ in range(3):
        models.wait()
        start = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        models.wait()
        elapsed = time.perf_counter() - start
    return profiled(lambda: model(ids, use_cache=True, logits_to_keep=1)), 1e6 * elapsed


def table(title: str, kernels: list[Kernel], elapsed: float, layers: int) -> str:
    """Totals by name, and the kernels of a layer in the middle."""
    busy, span = sum(kernel.time for kernel in kernels), kernels[-1].start + kernels[-1].time - kernels[0].start
    lines = [f"## {title}: {elapsed:.0f} us; {len(kernels)} kernels busy {busy:.0f} us within {span:.0f} us"]
    totals: dict[str, list[float]] = {}
    for kernel in kernels:
        totals.setdefault(kernel.name, []).append(kernel.time)
    for name, times in sorted(totals.items(), key=lambda item: -sum(item[1])):
        lines.append(f"{sum(times):9.1f} us {len(times):5} x {sum(times) / len(times):8.2f}  {_short(name)}")
    per_layer = -(-len(kernels) // max(layers, 1))
    middle = kernels[len(kernels) // 2 : len(kernels) // 2 + per_layer]
    lines.append("in order, about one layer: start, time")
    lines += [f"{k.start - middle[0].start:9.1f} {k.time:7.1f}  {_short(k.name)}" for k in middle]
    return "\n".join(lines)


def _short(name: str) -> str:
    """A kernel's name without most of its template arguments."""
    return name.replace("at::native::", "").replace("(anonymous namespace)::", "").removeprefix("void ")[:150]


def main() -> None:
    """Run the measurements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("specification")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--prompts", type=int, nargs="*", default=PROMPTS)
    parser.add_argument("--folder", type=Path, help="where to write the tables; they are printed otherwise")
    options = parser.parse_args()
    models.LARGE["layers"] = options.layers
    model = models.large("cuda", options.specification)
    for title, measure, size in [
        *((f"step of {batch}", steps, batch) for batch in options.batches),
        *((f"prompt of {tokens}", prompt, tokens) for tokens in options.prompts),
    ]:
        kernels, elapsed = measure(model, size)
        found = table(title, kernels, elapsed, options.layers)
        print(found.partition("\n")[0] if options.folder else found, flush=True)
        if options.folder:
            options.folder.mkdir(parents=True, exist_ok=True)
            (options.folder / f"{title.replace(' ', '-')}.txt").write_text(found + "\n")


if __name__ == "__main__":
    main()

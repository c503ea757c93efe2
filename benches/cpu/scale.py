"""Compresses a checkpoint of Switch-base-128's shapes: seconds per 10^9 weights, peak memory, and a c2048 estimate.

    python -m benches.cpu.scale [--layers 12] [--experts 128] [--methods finequant rate] [--samples 64] [--threads N]
                            [--device cuda] [--directory DIR] [--workers 1 2 4]

The checkpoint is synthetic (shapes of google/switch-base-128: d_model 768, d_ff 3072, 128 experts, a sparse layer after
each dense one), in shards, and removed afterwards: 12 layers are 7.2 * 10^9 expert weights, 14.5 GB. Its experts are
overlapping windows of one sequence of Gaussian numbers, which is fast to generate and does not affect the time to
compress; its router is random, so tokens spread over the experts. This measures no quality. Fewer experts with
proportionally fewer samples take the same time per weight and less memory.

`rate` uses 3 bits, without a text and, unless `--codes` is given, plain codes. Each method runs in its own process,
which this one monitors: memory is sampled every 20 ms. Processor seconds are printed besides wall seconds, because they
are meaningful on a loaded machine.

With `--workers`, each method first runs alone in one thread, then shared by the given numbers of workers of one thread
each, on a Ray cluster of this machine. Start-up cost is excluded: the job is the second one of its cluster. The
efficiency is the local run's processor time over that of all processes of the cluster, including the driver and Ray's
own; wall time would be as meaningful only if each worker had a core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerFast, SwitchTransformersConfig

from benches.tools import machine

D_MODEL, D_FF, EXPERTS, VOCABULARY, SENTINELS = 768, 3072, 128, 32128, 100
#: google/switch-c-2048: d_model, d_ff, experts, sparse layers; 1.57 * 10^12 expert weights.
C2048 = (2080, 6144, 2048, 30)
READY, CLOCK = "ready", os.sysconf("SC_CLK_TCK")
#: Words of the synthetic calibration text; its content does not matter.
WORDS = ("river", "stone", "light", "under", "walked", "slowly", "and", "then", "nobody", "knew", "where", "it", "was")


def config(layers: int, experts: int) -> SwitchTransformersConfig:
    """Half of the sparse layers are in the encoder and half in the decoder, each after a dense one."""
    return SwitchTransformersConfig(
        vocab_size=VOCABULARY, d_model=D_MODEL, d_kv=64, d_ff=D_FF, num_heads=12, num_experts=experts,
        num_layers=layers, num_sparse_encoder_layers=layers // 2,
        num_decoder_layers=layers, num_sparse_decoder_layers=layers // 2,
        expert_capacity=1 << 30, router_jitter_noise=0.0, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    """Single bytes with T5's special tokens."""
    special = ["<pad>", "</s>", *(f"<extra_id_{i}>" for i in range(SENTINELS))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*special, *alphabet])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>")


def build(directory: Path, layers: int, experts: int) -> None:
    """Write the checkpoint, a shard for each sparse layer and one for the rest."""
    settings = config(layers, experts)
    settings.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    with torch.device("meta"):
        names = {
            name: tensor.shape for name, tensor in AutoModelForSeq2SeqLM.from_config(settings).state_dict().items()
        }
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(1 << 25, generator=generator)
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, shape in names.items():
        shards.setdefault(name.split(".experts.")[0] if ".experts." in name else "dense", {})[name] = shape
    weight_map = {}
    for number, group in enumerate(shards.values(), 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(dict(_tensors(group, pool)), directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(group, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    text = " ".join(WORDS[(i * i + i // 7) % len(WORDS)] for i in range(1 << 18))
    (directory.parent / "calibration.txt").write_text(text)
    os.sync()  # the measurement must not wait for the build's writes


def _tensors(group: dict[str, torch.Size], pool: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for position, (name, shape) in enumerate(group.items()):
        if "layer_norm" in name:
            yield name, torch.ones(shape, dtype=torch.bfloat16)
            continue
        start = (position * 1_000_003) % (len(pool) - shape.numel())
        yield name, (pool[start : start + shape.numel()].view(shape) * shape[-1] ** -0.5).bfloat16()


def work(options: argparse.Namespace) -> None:
    """The measured process: compress and print time and memory."""
    from moepack.methods import Qmoe, create
    from moepack.pipeline import compress

    torch.set_num_threads(options.threads)
    if options.cluster:
        import ray

        ray.init(address="local", num_cpus=options.cluster, include_dashboard=False, log_to_driver=False)
    address = "local" if options.cluster else None
    settings = {"calibration": str(options.directory / "calibration.txt"), "samples": options.samples}
    calibrated = Qmoe(**settings, group=options.group, device=options.device)
    others = {"bits_per_weight": 3.0, "codes": options.codes} if options.work == "rate" else {}
    method = calibrated if options.work == "qmoe" else create(options.work, calibration="none", **others)
    if options.workers:
        compress(
            options.directory / "few", options.directory / "none", method="finequant", calibration="none", ray=address
        )
        print(READY, flush=True)
    report = compress(
        options.directory / "model", options.directory / "packed", method=method, threads=options.threads, ray=address
    )
    usage = resource.getrusage(resource.RUSAGE_SELF)
    figures = {"weights": report.expert_weights, "bits": report.bits_per_weight, "seconds": report.seconds}
    if options.device != "cpu":
        figures["device_memory"] = torch.cuda.max_memory_allocated()
    print(json.dumps({**figures, "cpu": usage.ru_utime + usage.ru_stime}))


def measure_shared(method: str, workers: int, options: argparse.Namespace) -> dict[str, float]:
    """Wall and processor seconds of a job on a number of workers, or on one thread without workers."""
    command = [sys.executable, "-m", __spec__.name, "--work", method, "--directory", str(options.directory)]
    command += ["--threads", "1"]
    command += ["--samples", str(options.samples), "--group", str(options.group), "--codes", options.codes]
    command += ["--cluster", str(workers)]
    seen: dict[int, float] = {}
    with subprocess.Popen([*command, "--workers", "1"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while (line := process.stdout.readline()) and line.strip() != READY:
            pass
        before = sum(family_seconds(process.pid).values())
        while process.poll() is None:
            seen |= family_seconds(process.pid)
            time.sleep(0.1)
        printed = process.stdout.read()
    if process.returncode:
        sys.exit(f"{method} with {workers} workers failed")
    for name in ("packed", "none"):
        shutil.rmtree(options.directory / name)
    found = json.loads(printed.splitlines()[-1])
    return {"weights": found["weights"], "seconds": found["seconds"], "cpu": sum(seen.values()) - before}


def family_seconds(process: int) -> dict[int, float]:
    """Processor seconds of a process and all its descendants, by process id."""
    parents, seconds = {}, {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = place.read_text().rpartition(")")[2].split()
            number = int(place.parent.name)
            parents[number], seconds[number] = int(fields[1]), (int(fields[11]) + int(fields[12])) / CLOCK
    family = {process}
    while more := {number for number, parent in parents.items() if parent in family} - family:
        family |= more
    return {number: seconds[number] for number in family & seconds.keys()}


def show_shared(method: str, runs: dict[int, dict[str, float]]) -> None:
    """One line per number of workers, and the extrapolation."""
    alone = runs[0]["cpu"]
    for workers, run in runs.items():
        who = f"{workers} worker{'s' if workers > 1 else ''}" if workers else "one thread"
        print(
            f"{method:10} {who:10} {run['seconds']:7.1f} s wall {run['cpu']:7.1f} s of processor"
            f"   efficiency {alone / run['cpu']:.2f}"
        )
    worst, total = max(run["cpu"] for run in runs.values()), c2048_weights()
    days = worst / runs[0]["weights"] * total / 86400
    print(f"           c2048, {total / 1e12:.2f} * 10^12 weights: {days:.1f} days of one core; with 10 machines of 32")
    print(f"           such cores, {days / 320 * 24:.1f} hours", flush=True)


def measure(method: str, options: argparse.Namespace) -> dict[str, float]:
    """Run this script as the measured process; its figures, and the peaks of its memory in bytes."""
    command = [sys.executable, "-m", __spec__.name, "--work", method, "--directory", str(options.directory)]
    for name in ("samples", "threads", "group", "device", "codes"):
        command += [f"--{name}", str(getattr(options, name))]
    peaks = {"RssAnon": 0, "VmHWM": 0}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                    name, _, value = line.partition(":")
                    if name in peaks:
                        peaks[name] = max(peaks[name], int(value.split()[0]) * 1024)
            time.sleep(0.02)
        printed = process.stdout.read() if process.stdout else ""
    if process.returncode:
        sys.exit(f"{method} failed")
    shutil.rmtree(options.directory / "packed")
    return {**json.loads(printed.splitlines()[-1]), **peaks}


def share(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Measure, print and save each method with each number of workers."""
    for method in options.methods:
        runs = {workers: measure_shared(method, workers, options) for workers in (0, *options.workers)}
        show_shared(method, runs)
        results[method] = runs
        if options.save:
            what = {"layers": options.layers, "experts": options.experts, "samples": options.samples}
            machine.save(options.save, 1, {**what, **results})
    print(SHARED_ASSUMPTIONS)


def solver_operations(d_model: int, d_ff: int) -> float:
    """Multiplications of GPTQ per weight: R C^2 for compensation and C^3 / 3 for factorization of a matrix."""
    shapes = ((d_ff, d_model), (d_model, d_ff))
    return sum(rows * columns**2 + columns**3 / 3 for rows, columns in shapes) / (2 * d_model * d_ff)


def c2048_weights() -> float:
    """Expert weights of switch-c-2048."""
    d_model, d_ff, experts, layers = C2048
    return 2.0 * d_model * d_ff * experts * layers


def show(method: str, figures: dict[str, float]) -> None:
    """One line per method, and the extrapolation."""
    billions = figures["weights"] / 1e9
    wall, cpu = figures["seconds"] / billions, figures["cpu"] / billions
    memory = f"{figures['RssAnon'] / 1e9:.2f} GB anonymous, {figures['VmHWM'] / 1e9:.2f} GB with mapped files"
    print(
        f"{method:8} {billions:.2f} * 10^9 weights to {figures['bits']:.3f} bits: {wall:.1f} s wall and {cpu:.1f} s of"
    )
    if figures.get("device_memory"):
        memory += f", {figures['device_memory'] / 1e9:.2f} GB of the device"
    print(f"         processor for 10^9 weights; peak memory {memory}")
    d_model, d_ff, *_ = C2048
    total = c2048_weights() / 1e9
    factor = solver_operations(d_model, d_ff) / solver_operations(D_MODEL, D_FF) if method == "qmoe" else 1.0
    days, cores = (seconds * factor * total / 86400 for seconds in (wall, cpu))
    print(f"         c2048, {total:.0f} * 10^9 weights, {factor:.2f} times the time per weight: {days:.1f} days here,")
    print(f"         {cores:.1f} days of one core")


ASSUMPTIONS = """
Assumptions for c2048 (d_model 2080, d_ff 6144, 2048 experts, 30 sparse layers): finequant takes the time per weight
measured here; qmoe takes that time multiplied by the ratio of GPTQ's multiplications per weight (R C^2 + C^3 / 3 per
matrix), although the passes of the model and the sums of Hessians grow less; experts receive as many calibration
tokens as here; 3.1 TB are read from a disk that is no slower than the computation. One layer's codes take one byte per
weight, 52 GB."""


SHARED_ASSUMPTIONS = """
Assumptions: the largest processor time per weight measured here, over all numbers of workers, also holds for matrices
of c2048 and on its cores; the driver's share stays small (it copies packed bytes into shards: for 0.8 to 8 bits per
weight, 160 GB to 1.6 TB of reading, checksums and writing); tensors are equal (60 of 26 * 10^9 weights, each on one
machine, whose threads share its experts); shared storage delivers 3.1 TB in that time to all machines together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=EXPERTS)
    parser.add_argument("--methods", nargs="+", default=["finequant", "qmoe"])
    parser.add_argument("--samples", type=int, default=64, help="calibration samples of 512 tokens")
    parser.add_argument("--group", type=int, default=16, help="experts solved together")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--codes", default="plain", help="codes of `rate`: plain or dependent")
    parser.add_argument("--device", default="cpu", help="device for qmoe's model and solver")
    parser.add_argument("--directory", type=Path, help="folder for the checkpoint; default: a temporary directory")
    parser.add_argument("--save", type=Path, help="JSON file for the figures")
    parser.add_argument("--workers", type=int, nargs="+", help="numbers of workers, measured one after another")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--cluster", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    if options.layers < 2 or options.layers % 2:
        parser.error("--layers must be even: half of them are in the encoder")
    need = options.layers * 2.2 * 2 * options.experts * D_MODEL * D_FF
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        options.directory = Path(directory)
        if shutil.disk_usage(directory).free < 1.3 * need:
            sys.exit(f"{1.3 * need / 1e9:.0f} GB are needed in {directory}")
        print(json.dumps(machine.describe(options.threads, options.device)))
        start = time.perf_counter()
        build(options.directory / "model", options.layers, options.experts)
        print(f"built {options.layers} sparse layers in {time.perf_counter() - start:.0f} s", flush=True)
        results: dict[str, Any] = {}
        if options.workers:
            build(options.directory / "few", 2, 4)
            share(options, results)
            return
        for method in options.methods:
            results[method] = measure(method, options)
            show(method, results[method])
            sys.stdout.flush()
            if options.save:
                what = {"layers": options.layers, "experts": options.experts, "samples": options.samples}
                machine.save(options.save, options.threads, {**what, **results}, options.device)
        print(ASSUMPTIONS)


if __name__ == "__main__":
    main()

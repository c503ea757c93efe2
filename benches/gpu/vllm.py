"""Measures packed directories and ordinary checkpoints in vLLM: decoding, first tokens and memory.

    python -m benches.gpu.vllm MODEL... [--sequences 1 8 32] [--prompt 512] [--new 64] [--first 512 2048] [--eager]
        [--device cpu|cuda] [--results FILE]

Python is that of an environment with vLLM and moepack. Each engine runs in a process of its own, with its model in the
same process, without prefix caching, on the same prompts of random tokens. `benches.tools.stacked` makes a model of
many layers from one of a single layer; `moepack export --to compressed-tensors` makes the same weights for vLLM's own
kernels.

First token: seconds until all sequences have one, of prompts that arrive together. Decoding: tokens after the first one
per second, from the difference of a run that writes all tokens and one that writes the first. Both are medians over
rounds. `--first` adds first tokens of one prompt of each length.

Memory of a CPU is that of the process after the runs, of a GPU what it uses more than before the engine started. Both
are given without keys and values, for which vLLM reserves a size of its own. `loaded` is the growth since before the
engine started; on a CPU, `anonymous` is its part that is not mapped from files.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benches.tools import machine

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the memory of this process is that of the model
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

COLUMNS = ("model", "sequences", "tokens/s", "first token, s", "loaded, MB", "keys and values, MB")


def prompts(count: int, length: int, vocabulary: int, seed: int) -> list[dict[str, list[int]]]:
    """Prompts of random tokens."""
    source = random.Random(seed)
    return [{"prompt_token_ids": source.choices(range(3, vocabulary), k=length)} for _ in range(count)]


def written(engine: Any, requests: Sequence[Any], tokens: int) -> float:
    """Seconds in which an engine writes a number of tokens after each prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    found = engine.generate(requests, sampling, use_tqdm=False)
    elapsed = time.perf_counter() - start
    assert all(len(each.outputs[0].token_ids) == tokens for each in found)
    return elapsed


def speeds(engine: Any, sequences: int, options: argparse.Namespace, vocabulary: int) -> dict[str, float]:
    """Medians over rounds; a round before them warms up."""
    firsts, rates = [], []
    for number in range(options.rounds + 1):
        seed = 1000 * sequences + 2 * number
        first = written(engine, prompts(sequences, options.prompt, vocabulary, seed), 1)
        whole = written(engine, prompts(sequences, options.prompt, vocabulary, seed + 1), options.new)
        firsts.append(first)
        rates.append(sequences * (options.new - 1) / max(whole - first, 1e-9))
    return {"tokens/s": statistics.median(rates[1:]), "first token, s": statistics.median(firsts[1:])}


def first_token(engine: Any, length: int, options: argparse.Namespace, vocabulary: int) -> float:
    """Median over rounds of the seconds to the first token of one prompt; a round before them warms up."""
    times = [written(engine, prompts(1, length, vocabulary, seed), 1) for seed in range(options.rounds + 1)]
    return statistics.median(times[1:])


def used(device: str) -> dict[str, int]:
    """Bytes that this process uses, or a GPU with all its processes."""
    if device == "cpu":
        from moepack.memory import process_memory, release_unused

        release_unused()
        found = process_memory()
        return {"total": found.anonymous + found.mapped, "anonymous": found.anonymous}
    import torch

    free, total = torch.cuda.mem_get_info()
    return {"total": total - free}


def cached(engine: Any) -> int:
    """Bytes of an engine's keys and values."""
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in runner.kv_caches}
    return sum(storages.values())


def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start an engine in this process and measure it."""
    import vllm

    configuration = vllm.EngineArgs(model=model, skip_tokenizer_init=True).create_model_config()
    vocabulary = configuration.get_vocab_size()
    before = used(options.device)
    engine = vllm.LLM(
        model, dtype=options.dtype, max_model_len=max(options.prompt, *options.first, 0) + options.new,
        max_num_seqs=max(options.sequences),
        enforce_eager=options.eager, enable_prefix_caching=False, skip_tokenizer_init=True, disable_log_stats=True,
    )  # fmt: skip
    rows = {str(sequences): speeds(engine, sequences, options, vocabulary) for sequences in options.sequences}
    firsts = {str(length): first_token(engine, length, options, vocabulary) for length in options.first}
    keys, after = cached(engine), used(options.device)
    grown = {name: after[name] - before[name] for name in before}
    return {
        "model": Path(model).name,
        "bytes of the files": sum(file.stat().st_size for file in Path(model).glob("*.safetensors")),
        "speeds": rows,
        "first token, s, by length": firsts,
        "memory": {"loaded": grown["total"] - keys, "keys and values": keys, **_without(grown, keys)},
        "vllm": vllm.__version__,
    }


def _without(grown: Mapping[str, int], keys: int) -> dict[str, int]:
    return {"anonymous": grown["anonymous"] - keys} if "anonymous" in grown else {}


def in_process(model: str, arguments: Sequence[str], device: str) -> dict[str, Any]:
    """Measure an engine in a process of its own.

    Args:
        model: the directory.
        arguments: the options of this script.
        device: `cpu` or `cuda`.
    """
    with tempfile.TemporaryDirectory() as place:
        found = Path(place) / "found.json"
        command = [sys.executable, "-m", "benches.gpu.vllm", model, *arguments, "--device", device]
        defaults = ENVIRONMENT | (ON_CPU if device == "cpu" else {})
        subprocess.run([*command, "--found", str(found)], check=True, env=defaults | os.environ)
        result: dict[str, Any] = json.loads(found.read_text())
    return result


def table(engines: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures as a table in Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    for name, found in engines.items():
        memory = found["memory"]
        megabytes = (f"{memory['loaded'] / 1e6:.1f}", f"{memory['keys and values'] / 1e6:.1f}")
        for sequences, row in found["speeds"].items():
            lines.append((name, sequences, f"{row['tokens/s']:.1f}", f"{row['first token, s']:.3f}", *megabytes))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("models", nargs="+", help="packed directories, or checkpoints that vLLM loads itself")
    made.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    made.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    made.add_argument("--first", type=int, nargs="*", default=[], help="tokens of prompts for first tokens")
    made.add_argument("--new", type=int, default=64, help="tokens of an answer, at least 2")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--dtype", default="auto")
    made.add_argument("--eager", action="store_true", help="without compilation and graphs")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    made.add_argument("--results", type=Path)
    made.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    return made


def main() -> None:
    """Measure the engines, or one of them in this process."""
    options = parser().parse_args()
    if options.new < 2:
        raise SystemExit("--new is at least 2")
    if options.found:
        options.found.write_text(json.dumps(measure(options.models[0], options)))
        return
    arguments = ["--sequences", *map(str, options.sequences), *(["--eager"] if options.eager else [])]
    arguments += ["--first", *map(str, options.first)] if options.first else []
    for name in ("prompt", "new", "rounds", "dtype"):
        arguments += [f"--{name}", str(getattr(options, name))]
    names = ("sequences", "prompt", "first", "new", "rounds", "dtype", "eager")
    engines: dict[str, Any] = {}
    for model in options.models:
        engines[Path(model).name] = in_process(model, arguments, options.device)
        figures = {"options": {name: getattr(options, name) for name in names}, "engines": engines}
        print(table(engines), flush=True)
        if options.results:
            threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
            machine.save(options.results, threads, figures, options.device)


if __name__ == "__main__":
    main()

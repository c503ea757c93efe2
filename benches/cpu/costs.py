"""Measures the processor time and the memory of jobs, to compare them with the plan.

    python -m benches.cpu.costs MODEL [MODEL ...] [--calibration FILE] [--samples 16] [--out build/costs.json]
    python -m benches.cpu.costs --made-up 4 --tokenizer MODEL --calibration built-in --samples 32 --length 512

Each job runs in its own process and one thread. Its time is processor time, which other work on the machine changes
little, and begins after imports. Each row has what the plan knows of the job (`pipeline.costs.Load`), the seconds of
planning, of measuring the sensitivity, and of the rest, and the peak anonymous memory. `tests/pipeline/test_costs.py`
compares them with the plan.

`--made-up` packs one layer of random experts with the shapes of Qwen3-30B-A3B. Each token visits one of E experts: with
8 windows of 512 tokens per expert, an expert reads as many tokens as one of the real model with 128 windows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benches.tools import machine

JOBS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("auto", {"bits_per_weight": 4.0}),
    ("rate", {"bits_per_weight": 3.0}),
    ("finequant", {"bits": 4, "dense_bits": 4}),
    ("milo", {}),
)
CALIBRATED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("auto", {"bits_per_weight": 4.0}),
    ("rate", {"bits_per_weight": 3.0}),
    ("finequant", {"bits": 4, "dense_bits": 4}),
)


SHAPES = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 128, "num_experts_per_tok": 1, "norm_topk_prob": False,
}  # fmt: skip


def made_up(directory: Path, experts: int, tokenizer: Path) -> Path:
    """Write a layer of Qwen3-30B-A3B's shapes with Gaussian weights and the vocabulary of another model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    config = AutoConfig.for_model("qwen3_moe", **SHAPES, num_experts=experts, vocab_size=vocabulary, dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, directory / name)
    return directory


def measure(model: str, method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run a job in this process and one thread."""
    import torch

    import moepack.calibration.fisher
    import moepack.methods.rate.importance as importance
    from moepack import _core
    from moepack.memory import anonymous_bytes
    from moepack.methods import create
    from moepack.pipeline import compress
    from moepack.pipeline.estimate import estimate

    peak, done = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            peak[0] = max(peak[0], anonymous_bytes())

    threading.Thread(target=watch, daemon=True).start()
    base = peak[0]
    torch.set_num_threads(1)
    _core.set_threads(1)
    seconds, fisher = {"sensitivity": 0.0}, moepack.calibration.fisher.fisher

    def timed(*given: Any) -> Any:
        start = time.process_time()
        found = fisher(*given)
        seconds["sensitivity"] += time.process_time() - start
        return found

    importance.fisher = timed  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as work:
        chosen = create(method, **settings)
        start = time.process_time()
        plan = estimate(model, Path(work) / "out", chosen)
        seconds["plan"] = time.process_time() - start - seconds["sensitivity"]
        start = time.process_time()
        compress(model, Path(work) / "out", method=plan.plan or chosen, check=False)
        seconds["pack"] = time.process_time() - start
    done.set()
    memory = {"imports": base, "peak": peak[0]}
    return {"model": Path(model).name, "load": plan.load.to_json(), "seconds": seconds, "memory": memory}


def main() -> None:
    """Run all jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--made-up", type=int, metavar="EXPERTS")
    parser.add_argument("--tokenizer", type=Path, help="model whose tokenizer the made-up one takes")
    parser.add_argument("--calibration")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("build/costs.json"))
    options = parser.parse_args()
    if options.job:
        print(json.dumps(measure(options.models[0], *json.loads(options.job))))
        return
    rows = []
    scratch = tempfile.TemporaryDirectory()
    if options.made_up:
        path = Path(scratch.name) / f"made-up-{options.made_up}"
        options.models.append(str(made_up(path, options.made_up, options.tokenizer)))
    for model in options.models:
        jobs = [(name, {**own, "calibration": "none"}) for name, own in JOBS]
        if options.calibration:
            text = {"calibration": options.calibration, "samples": options.samples, "sequence_length": options.length}
            jobs = [(name, {**own, **text}) for name, own in CALIBRATED]
        for job in jobs:
            if options.methods and job[0] not in options.methods:
                continue
            command = [sys.executable, "-m", "benches.cpu.costs", model, "--job", json.dumps(job)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(done.stderr[-500:], file=sys.stderr)
                continue
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            shown = {name: round(value, 1) for name, value in rows[-1]["seconds"].items()}
            memory = {name: value >> 20 for name, value in rows[-1]["memory"].items()}
            print(rows[-1]["model"], job[0], shown, memory, flush=True)
    scratch.cleanup()
    machine.save(options.out, 1, rows)


if __name__ == "__main__":
    main()

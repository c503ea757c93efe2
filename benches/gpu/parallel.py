"""Compares what vLLM writes on several devices with what it writes on one: greedy tokens and log-probabilities.

    python -m benches.gpu.parallel MODEL TEXT... [--ranks 2] [--modes tensor expert pipeline] [--prompts 8] [--new 32]
        [--device cpu|cuda] [--results FILE]

Python is that of an environment with vLLM and moepack. Each mode runs in a process of its own on the same prompts,
which are evenly spaced parts of the text files. Devices add up parts of a sum in another order, and bfloat16 rounds
them, so texts part at near ties: the margin is how much more likely the one device's token was there than the other's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benches.gpu.vllm import ENVIRONMENT, ON_CPU
from benches.tools import machine

MODES = {
    "one": lambda ranks: {},
    "tensor": lambda ranks: {"tensor_parallel_size": ranks},
    "expert": lambda ranks: {"tensor_parallel_size": ranks, "enable_expert_parallel": True},
    "pipeline": lambda ranks: {"pipeline_parallel_size": ranks},
}
"""Arguments of the engine."""

LENGTH, LIKELIEST = 240, 5
"""Characters of a prompt; tokens whose log-probabilities are kept at each step."""

APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""Ranks are processes that start afresh, because forked ones cannot use a GPU."""

Answers = list[list[dict[str, Any]]]
"""For each prompt and step, the token and the log-probabilities of the likeliest tokens."""


def write(mode: str, options: argparse.Namespace) -> Answers:
    """Start an engine in a mode and let it write."""
    import vllm

    text = "".join(file.read_text(encoding="utf-8") for file in options.texts)
    starts = [len(text) // (options.prompts + 1) * number for number in range(options.prompts)]
    engine = vllm.LLM(
        str(options.model), max_model_len=4 * LENGTH, max_num_seqs=options.prompts, gpu_memory_utilization=0.3,
        enable_prefix_caching=False, disable_log_stats=True, **MODES[mode](options.ranks),
    )  # fmt: skip
    sampling = vllm.SamplingParams(max_tokens=options.new, temperature=0, ignore_eos=True, logprobs=LIKELIEST)
    found = engine.generate([text[start : start + LENGTH] for start in starts], sampling, use_tqdm=False)
    return [
        [
            {"token": token, "scores": {str(other): score.logprob for other, score in scores.items()}}
            for token, scores in zip(each.outputs[0].token_ids, each.outputs[0].logprobs, strict=True)
        ]
        for each in found
    ]


def compared(one: Answers, other: Answers) -> dict[str, Any]:
    """Equal answers, the largest difference of the log-probabilities of equal tokens, and margins where texts part."""
    equal, largest, margins = 0, 0.0, []
    for left, right in zip(one, other, strict=True):
        for first, second in zip(left, right, strict=True):
            own, given = str(first["token"]), str(second["token"])
            if own != given:
                margins.append(first["scores"][own] - first["scores"].get(given, float("-inf")))
                break
            largest = max(largest, abs(first["scores"][own] - second["scores"][own]))
        else:
            equal += 1
    return {"equal answers": equal, "of": len(one), "largest difference": largest, "margins": margins}


def in_process(mode: str, options: argparse.Namespace) -> Answers:
    """Run a mode in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        found = Path(place) / "found.json"
        command = [sys.executable, "-m", "benches.gpu.parallel", str(options.model), *map(str, options.texts)]
        for name in ("ranks", "prompts", "new"):
            command += [f"--{name}", str(getattr(options, name))]
        defaults = ENVIRONMENT | APART | (ON_CPU if options.device == "cpu" else {})
        subprocess.run([*command, "--run", mode, "--found", str(found)], check=True, env=defaults | os.environ)
        answers: Answers = json.loads(found.read_text())
    return answers


def main() -> None:
    """Compare the modes, or run one of them in this process."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", type=Path, help="a packed directory")
    made.add_argument("texts", type=Path, nargs="+", help="text files")
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--modes", nargs="+", choices=[*MODES][1:], default=[*MODES][1:])
    made.add_argument("--prompts", type=int, default=8)
    made.add_argument("--new", type=int, default=32)
    made.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    made.add_argument("--results", type=Path)
    made.add_argument("--run", help=argparse.SUPPRESS)
    made.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.run:
        options.found.write_text(json.dumps(write(options.run, options)))
        return
    one = in_process("one", options)
    rows: dict[str, Any] = {}
    for mode in options.modes:
        rows[mode] = compared(one, in_process(mode, options))
        print(mode, rows[mode], flush=True)
    if options.results:
        figures = {"model": options.model.name, "ranks": options.ranks, "new": options.new, "modes": rows}
        machine.save(options.results, os.cpu_count() or 1, figures, options.device)


if __name__ == "__main__":
    main()

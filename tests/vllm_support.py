"""Runs packed directories in vLLM's engine, in this process, and compares them with moepack's own runtime.

Both run in float32, so that only the order of sums differs. Importing this module skips the tests if vLLM is missing.
"""

import gc
import importlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import moepack

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
vllm = pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm` runs these tests")
registry = importlib.import_module("vllm.model_executor.models.registry")
registry._run_in_subprocess = lambda inspect: inspect()  # vLLM starts a process to look at each class of models

BOUND = 0.005
"""Largest difference of two log-probabilities. The largest that has been measured is 0.002."""

PROMPTS = tuple([3 + step * i % 58 for i in range(tokens)] for step, tokens in ((7, 30), (11, 5), (13, 17)))
"""Prompts of tokens that every tiny model has."""

ANSWER = 12
"""Tokens of an answer."""

CONTEXT = 64

CACHE = 64 << 20
"""Bytes of an engine's keys and values. vLLM writes all of them when an engine starts."""

Tokens = list[int]


@dataclass(frozen=True)
class Answer:
    """A greedy answer of moepack's runtime.

    Attributes:
        tokens: the answer.
        scores: log-probabilities of the tokens after the first one, of the prompt and the answer.
        margins: how much more probable than any other each token of the answer is, as a difference of logarithms.
    """

    tokens: Tokens
    scores: list[float]
    margins: list[float]


def answers(directory: Path, prompts: Sequence[Tokens] = PROMPTS, dtype: str = "float32") -> list[Answer]:
    """Greedy answers of a directory, packed or not, in transformers with moepack."""
    if "quantization_config" in json.loads((directory / "config.json").read_text()):
        model = moepack.load(directory, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return [_answer(model, prompt) for prompt in prompts]


@torch.inference_mode()
def _answer(model: Any, prompt: Tokens) -> Answer:
    tokens: Tokens = []
    margins = []
    for _ in range(ANSWER):
        scores = _scores(model, prompt + tokens)
        best = scores[-1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
    read = prompt + tokens
    chosen = _scores(model, read)[:-1].gather(1, torch.tensor(read[1:])[:, None])
    return Answer(tokens, chosen[:, 0].tolist(), margins)


def _scores(model: Any, tokens: Tokens) -> torch.Tensor:
    """Log-probabilities of the token after each one, shape (T, V)."""
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


@contextmanager
def engine(directory: Path, **settings: Any) -> Iterator[Any]:
    """An engine of vLLM in this process; it is stopped afterwards."""
    from vllm.distributed import cleanup_dist_env_and_memory

    defaults = {"dtype": "float32", "max_model_len": CONTEXT, "max_num_seqs": 8, "enforce_eager": True}
    defaults |= {"skip_tokenizer_init": True, "disable_log_stats": True, "kv_cache_memory_bytes": CACHE}
    running = None
    try:
        running = vllm.LLM(str(directory), **defaults | settings)
        yield running
    finally:
        if running is not None:  # otherwise the collector shuts it down, and the processes' groups of a later engine
            running.llm_engine.engine_core.shutdown()
        running = None
        gc.collect()
        cleanup_dist_env_and_memory()


def assert_agrees(running: Any, expected: Sequence[Answer], bound: float = BOUND) -> None:
    """An engine gives the answers that are expected, with the same log-probabilities, read at once and token by token.

    An answer may part from the expected one at a token that is at most twice the bound more probable than another.
    """
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    settings = {"temperature": 0, "detokenize": False, "ignore_eos": True}
    greedy = vllm.SamplingParams(max_tokens=ANSWER, logprobs=0, **settings)
    compared = 0
    written = running.generate(prompts, greedy, use_tqdm=False)
    for prompt, request, answer in zip(PROMPTS, written, expected, strict=True):
        [found] = request.outputs
        steps = zip(answer.tokens, answer.margins, answer.scores[len(prompt) - 1 :], strict=True)
        for step, (token, margin, score) in enumerate(steps):
            if found.token_ids[step] != token:
                assert margin <= 2 * bound, f"token {step} of the answer to {len(prompt)} tokens"
                break
            assert math.isclose(found.logprobs[step][token].logprob, score, abs_tol=bound)
            compared += 1
    assert compared >= ANSWER, "no answer could be compared"
    reading = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, **settings)
    whole = [prompt + answer.tokens for prompt, answer in zip(PROMPTS, expected, strict=True)]
    requests = running.generate([{"prompt_token_ids": tokens} for tokens in whole], reading, use_tqdm=False)
    for tokens, request, answer in zip(whole, requests, expected, strict=True):
        scores = [step[token].logprob for token, step in zip(tokens[1:], request.prompt_logprobs[1:], strict=True)]
        assert max(abs(one - other) for one, other in zip(scores, answer.scores, strict=True)) <= bound


def packed_names(running: Any) -> set[str]:
    """The names of the tensors that an engine's model keeps packed."""
    found: list[set[str]] = running.apply_model(_packed_names)
    return found[0]


def _packed_names(model: torch.nn.Module) -> set[str]:
    methods = [(layer, getattr(layer, "quant_method", None)) for layer in model.modules()]
    return {name for layer, method in methods if hasattr(method, "packed") for *_, name in method.packed(layer)}

"""Threads that share a model or a tensor compute the same as one alone; subinterpreters are rejected."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import moepack
from fault_support import every_method

THREADS, CALLS = 8, 24


@pytest.mark.parametrize("method", ["finequant", "milo", "rate"])
def test_threads_share_a_model(method: str, mixtral: Path, tmp_path: Path) -> None:
    out = moepack.compress(mixtral, tmp_path / "out", method=every_method(tmp_path)[method]).path
    model = moepack.load(out, torch.float32)
    prompts = [torch.arange(3, 3 + length)[None] for length in range(1, 1 + CALLS)]

    def logits(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(ids).logits

    alone = [logits(ids) for ids in prompts]
    with ThreadPoolExecutor(THREADS) as pool:
        together = list(pool.map(logits, prompts * 4))
    assert all(torch.equal(found, alone[i % CALLS]) for i, found in enumerate(together))


def test_threads_share_a_tensor() -> None:
    weights = torch.randn(4, 96, 256, generator=torch.Generator().manual_seed(0))
    tensor = moepack.GroupwiseTensor.quantize(weights, bits=4)
    x = torch.randn(4, 7, 256, generator=torch.Generator().manual_seed(1))

    def answers(_: int) -> tuple[torch.Tensor, ...]:
        tensor.verify()
        return tensor.decode(), tensor.dequantize(), tensor.matmul(x)

    alone = answers(0)
    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(answers, range(4 * THREADS)):
            assert all(torch.equal(*pair) for pair in zip(found, alone, strict=True))


@pytest.mark.parametrize("first", ["import moepack._core", ""])
def test_another_interpreter_is_refused(first: str) -> None:
    script = (
        "try: import _interpreters as others\n"
        "except ModuleNotFoundError: import _xxsubinterpreters as others\n"
        f"{first}\n"
        "code = 'try: import moepack._core\\nexcept ImportError as error: print(error, flush=True)'\n"
        "others.run_string(others.create(), code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout == "moepack runs in the main interpreter only; use threads or processes\n", done

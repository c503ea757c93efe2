"""Packed models on several processes of vLLM: the answers of one process, from each rank's own part of the bytes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moepack
from moepack.methods.finequant import FineQuant
from moepack.methods.rate import Rate
from packed_support import manifest_of
from vllm_support import Answer, answers, assert_agrees, engine

MODEL = Qwen3MoeConfig(
    vocab_size=200, hidden_size=128, moe_intermediate_size=256, num_experts=6, num_experts_per_tok=2, head_dim=32,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip

METHODS: dict[str, Callable[[], Any]] = {
    "channels can be cut": lambda: FineQuant(bits=4, group_size=32, dense_bits=8),
    "only experts can be divided": lambda: Rate(bits_per_weight=4),
}


@pytest.fixture(scope="module", params=METHODS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("parallel")
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(MODEL).bfloat16().save_pretrained(place / "model")
    moepack.compress(place / "model", place / "packed", method=METHODS[request.param]())
    return place / "packed"


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[Answer]:
    return answers(directory)


def held(model: torch.nn.Module) -> int:
    """The packed bytes that a rank holds."""
    found = {}
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if hasattr(method, "packed"):
            for module, projection, _ in method.packed(layer):
                found[module.get_buffer(projection).data_ptr()] = module.get_buffer(projection).nbytes
    return sum(found.values())


@pytest.mark.parametrize(
    ("directory", "experts"),
    [
        pytest.param(method, experts, marks=[pytest.mark.slow] if cut == experts else [])
        for method, cut in (("channels can be cut", True), ("only experts can be divided", False))
        for experts in (False, True)
    ],
    indirect=["directory"],
)
def test_two_ranks_give_the_answers_of_one(
    directory: Path, expected: list[Answer], experts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to send `held` to the ranks
    settings = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "enable_expert_parallel": experts}
    with engine(directory, load_format="moepack", **settings) as running:
        assert_agrees(running, expected)
        total = sum(record.nbytes for record in manifest_of(directory).packed().values())
        assert all(0.4 * total < share < 0.65 * total for share in running.apply_model(held))


@pytest.mark.parametrize("directory", ["only experts can be divided"], indirect=True)
def test_two_stages_give_the_answers_of_one(
    directory: Path, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage holds its layers, and both hold the tied embedding.

    The CPU build needs a compiled model to pass hidden states on.
    """
    monkeypatch.setitem(os.environ, "VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    settings = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp", "enforce_eager": False}
    with engine(directory, load_format="moepack", **settings) as running:
        assert_agrees(running, expected)
        records = manifest_of(directory).packed()
        total = sum(record.nbytes for record in records.values())
        shared = sum(record.nbytes for name, record in records.items() if ".layers." not in name)
        shares = running.apply_model(held)
        assert all(share < 0.6 * (total - shared) + shared for share in shares) and sum(shares) >= total

"""Each family that vLLM has: packed layers give the answers of our own runtime.

Both compute `exact`: other modes round activations, depending on the tokens beside them, and a rounding that changes
which expert is chosen changes a random model's answer. docs/serving.md lists the families and the reasons.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import moepack
import vllm_support
from moepack.census.tiny import tiny_model
from moepack.export import export
from moepack.export.bf16 import plain_shards
from moepack.export.directory import ModelWriter
from moepack.format.directory import PackedDirectory
from moepack.methods.finequant import FineQuant
from packed_support import manifest_of
from places import ROOT
from vllm_support import PROMPTS, answers, assert_agrees, engine, packed_names, vllm

BOUND = 1e-4
"""Largest difference of two log-probabilities if all weights stay packed. 1e-6 has been measured."""

SIZES = {"hidden_size": 128, "head_dim": 32}
"""Sizes that vLLM's attention on the CPU takes."""

LATENT = {
    "hidden_size": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "head_dim": 64, "n_group": 1, "topk_group": 1,
}  # fmt: skip
"""Sizes that vLLM's latent attention takes."""

ALIKE = {
    *("deepseek_v2", "dots1", "ernie4_5_moe", "flex_olmo", "granitemoe", "hunyuan_v1_moe", "olmoe", "qwen2_moe"),
}
"""Families that fuse and name layers like another family in this list. Their tests have the mark `slow`."""

EXPERTS, ABSORBED = r".+\.experts\..+", r".+\.kv_b_proj\.weight"

FAMILIES: dict[str, Mapping[str, Any]] = {
    "dots1": SIZES,
    "ernie4_5_moe": SIZES,
    "flex_olmo": SIZES,
    "glm4_moe": SIZES,
    "gpt_oss": SIZES,
    "granitemoe": SIZES,
    "granitemoeshared": SIZES,
    "hunyuan_v1_moe": SIZES,
    "llama4_text": SIZES,
    "mixtral": SIZES,
    "olmoe": SIZES,
    "qwen2_moe": SIZES,
    "qwen3_moe": SIZES,
}
"""Sizes of the families, by name."""

DIFFERENT: dict[str, Mapping[str, Any]] = {"deepseek_v2": LATENT, "deepseek_v3": {**LATENT, "topk_method": "noaux_tc"}}
"""Sizes of families whose unpacked models get other answers from vLLM than from transformers, by name."""

DECODED = {"gpt_oss": EXPERTS, "llama4_text": EXPERTS}
"""Packed tensors that vLLM gets as bfloat16. The reference model has the same experts in bfloat16."""

NAMES = {"phimoe": "PhiMoEForCausalLM"}
"""Names by which vLLM knows a model, and published checkpoints name it, unlike transformers."""

BIASED = re.compile(r".*correction_bias")
"""Parameters that vLLM's router on the CPU leaves out, unless experts are chosen in groups."""


def each(families: Mapping[str, Any]) -> list[Any]:
    """The families as parameters of a test."""
    return [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in families]


def checkpoint(family: str, directory: Path) -> Path:
    """Write a tiny model of a family."""
    model = tiny_model(family, own={**FAMILIES, **DIFFERENT}[family]).to(torch.bfloat16)
    with torch.no_grad():
        for name, values in (*model.named_parameters(), *model.named_buffers()):
            if BIASED.fullmatch(name):
                values.zero_()
    model.save_pretrained(directory)
    if family in NAMES:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"architectures": [NAMES[family]]}))
    return directory


def with_decoded_experts(packed: Path, out: Path) -> Path:
    """Write a checkpoint with the experts in bfloat16, as vLLM gets them, and linear layers in float32."""
    source = PackedDirectory.open(packed)
    shards = plain_shards(source)
    with ModelWriter.open(source, out, len(shards)) as writer:
        for shard in shards:
            writer.shard([*shard()])
        writer.finish(None)
    return out


@pytest.mark.parametrize("family", each(FAMILIES))
def test_a_family_gives_the_answers_of_our_own_runtime(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEPACK_COMPUTE", "exact")
    moepack.compress(
        checkpoint(family, tmp_path / "model"), tmp_path / "packed", method=FineQuant(bits=8, dense_bits=8)
    )
    expected, decoded = tmp_path / "packed", DECODED.get(family, "")
    if decoded:
        expected = with_decoded_experts(tmp_path / "packed", tmp_path / "plain")
    found = answers(expected)  # transformers cannot build some models while an engine runs in the same process
    with engine(tmp_path / "packed") as running:
        packed = manifest_of(tmp_path / "packed").packed()
        assert packed_names(running) == {name for name in packed if not re.fullmatch(decoded, name)}
        assert_agrees(running, found, vllm_support.BOUND if decoded else BOUND)


@pytest.mark.parametrize("family", each(DIFFERENT))
def test_a_family_that_vllm_computes_differently_gives_the_answers_of_the_unpacked_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEPACK_COMPUTE", "exact")
    model = checkpoint(family, tmp_path / "model")
    moepack.compress(model, tmp_path / "packed", method=FineQuant(bits=8, dense_bits=8))
    export(tmp_path / "packed", tmp_path / "plain")
    scores = []
    for name in ("packed", "plain"):
        # On processors with AMX, vLLM prefers an attention that takes bfloat16 only.
        with engine(tmp_path / name, attention_config={"backend": "CPU_MLA"}) as running:
            scores.append(read(running))
            left = manifest_of(tmp_path / "packed").packed().keys() - packed_names(running)
            assert name == "plain" or all(re.fullmatch(ABSORBED, tensor) for tensor in left)
    assert torch.allclose(*scores, atol=2 * vllm_support.BOUND)


def read(running: Any) -> torch.Tensor:
    """The log-probabilities of the prompts' tokens after the first one."""
    settings = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
    requests = running.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], settings, use_tqdm=False)
    return torch.tensor(
        [
            step[token].logprob
            for prompt, request in zip(PROMPTS, requests, strict=True)
            for token, step in zip(prompt[1:], request.prompt_logprobs[1:], strict=True)
        ]
    )


def test_the_page_lists_every_family() -> None:
    text = (ROOT / "docs/serving.md").read_text("utf-8")
    listed = re.findall(r"`(\w+)`", text.partition("\n## Families of models in vLLM\n")[2].partition("\n## ")[0])
    assert {*FAMILIES, *DIFFERENT} <= set(listed)

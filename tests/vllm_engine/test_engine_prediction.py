"""Layers for multi-token prediction as vLLM's speculator: packed models draft what their unpacked forms draft."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import moepack
from moepack.census.tiny import tiny_model
from moepack.export import export
from moepack.methods.finequant import FineQuant
from moepack.methods.rate import Rate
from packed_support import manifest_of
from vllm_support import PROMPTS, answers, assert_agrees, engine, vllm

METHODS = {
    "experts kept": (FineQuant(bits=8, dense_bits=8), None),
    "experts packed": (FineQuant(bits=8, dense_bits=8), 8),
    "other scales": (Rate(bits_per_weight=6), 8),
}
SPECULATION = {"method": "mtp", "num_speculative_tokens": 1}
LAYERS = 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GLM-4.5 of two layers with a layer for prediction, a copy of the last."""
    directory = tmp_path_factory.mktemp("prediction") / "source"
    model = tiny_model("glm4_moe", own={"hidden_size": 128, "head_dim": 32, "num_nextn_predict_layers": 1})
    model.to(torch.bfloat16).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    last, extra = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    layer = {extra + name.removeprefix(last): values for name, values in tensors.items() if name.startswith(last)}
    layer |= {f"{extra}{name}.weight": tensors["model.norm.weight"] for name in ("enorm", "hnorm", "shared_head.norm")}
    layer[f"{extra}eh_proj.weight"] = torch.randn(128, 256).mul(256**-0.5).bfloat16()
    layer[f"{extra}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    layer[f"{extra}shared_head.head.weight"] = tensors["lm_head.weight"]
    copies = {name: values.clone() for name, values in layer.items()}
    save_file(tensors | copies, directory / "model.safetensors", {"format": "pt"})
    return directory


@contextmanager
def drafting(directory: Path, **settings: Any) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """An engine with speculation, and the logits of its drafts."""
    with engine(directory, speculative_config=SPECULATION, **settings) as running:
        drafter = running.llm_engine.model_executor.driver_worker.worker.model_runner.drafter.model
        compute, found = drafter.compute_logits, []

        def recorded(*arguments: Any, **others: Any) -> torch.Tensor:
            found.append(compute(*arguments, **others))
            return found[-1]

        drafter.compute_logits = recorded
        yield running, found


def first_draft(running: Any, found: list[torch.Tensor]) -> torch.Tensor:
    """The log-probabilities of the first draft after a prompt."""
    found.clear()
    settings = vllm.SamplingParams(max_tokens=2, temperature=0, detokenize=False, ignore_eos=True)
    running.generate([{"prompt_token_ids": PROMPTS[0]}], settings, use_tqdm=False)
    return found[0].log_softmax(-1)


@pytest.mark.parametrize("name", METHODS)
def test_drafts_are_those_of_the_unpacked_model(name: str, source: Path, tmp_path: Path) -> None:
    method, bits = METHODS[name]
    moepack.compress(source, tmp_path / "packed", method=method, mtp_bits=bits)
    export(tmp_path / "packed", tmp_path / "plain")
    written = answers(tmp_path / "packed")
    with drafting(tmp_path / "plain") as (running, found):
        expected = first_draft(running, found)
    with drafting(tmp_path / "packed") as (running, found):
        drafted = first_draft(running, found)
        assert_agrees(running, written)
        names = {each for model in models(running) for each in names_of(model)}
    packed = manifest_of(tmp_path / "packed").packed()
    assert names >= packed.keys()
    assert torch.allclose(drafted, expected, atol=0.05)


def models(running: Any) -> list[torch.nn.Module]:
    """The model of an engine, and the one that drafts."""
    runner = running.llm_engine.model_executor.driver_worker.worker.model_runner
    return [runner.model, runner.drafter.model]


def names_of(model: torch.nn.Module) -> set[str]:
    """The names of the tensors that a model keeps packed."""
    layers = [(layer, getattr(layer, "quant_method", None)) for layer in model.modules()]
    return {name for layer, method in layers if hasattr(method, "packed") for *_, name in method.packed(layer)}

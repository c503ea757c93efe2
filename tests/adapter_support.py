"""Packed models, the same models with decoded weights, and shared checks for adapter tests."""

import copy
import functools
import pickle
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import transformers

import moepack
import runtime_support as support
import tiny_models
from moepack.census.tiny import tiny_model
from moepack.checkpoint.experts import form_of
from moepack.methods.finequant import FineQuant
from moepack.methods.rate import Rate

CLOSE = {"rtol": 2e-3, "atol": 2e-4}
"""Products of packed and of decoded weights are summed in different orders; later layers amplify the difference."""


def _model(architecture: str) -> Any:
    """A tiny random model; skips models that the installed transformers lacks, or whose experts bypass the
    interface."""
    if architecture in support.ARCHITECTURES:
        return support.tiny_model(architecture)
    if architecture not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have it")
    try:
        model = tiny_model(architecture)
    except ValueError as error:
        pytest.skip(f"this version of transformers cannot build it: {error}")
    if not any(map(form_of, model.modules())):
        pytest.skip("this version of transformers keeps its experts in other modules")
    return model


@functools.cache
def twins(architecture: str, dense_bits: int | None = 8) -> tuple[Any, Any, Path]:
    """A packed model, the same model with decoded weights, and the packed directory. Copy before changing."""
    directory = Path(mkdtemp()) / "packed"
    model = _model(architecture)
    support.write_packed(model.float(), directory, FineQuant(bits=8, dense_bits=dense_bits))
    packed = moepack.load(directory, torch.float32, mode="exact")
    return packed, copy.deepcopy(packed).dequantize(), directory


def pickled(model: Any) -> Any:
    """A copy through pickling."""
    return pickle.loads(pickle.dumps(model))


def fresh(architecture: str, dense_bits: int | None = 8) -> tuple[Any, Any]:
    packed, stock, _ = twins(architecture, dense_bits)
    return copy.deepcopy(packed), copy.deepcopy(stock)


@functools.cache
def tied() -> Path:
    """A packed directory of Mixtral, all of it packed; its head multiplies by the embedding's bytes."""
    directory = Path(mkdtemp())
    moepack.compress(tiny_models.build("mixtral", directory / "source"), directory / "packed", method=Rate(5.0))
    return directory / "packed"


def expert_parameters(stock: Any) -> list[str]:
    """The parameters of routed experts in an unpacked model, in peft's form."""
    forms = {path.rpartition(".")[2]: form for path, module in stock.named_modules() if (form := form_of(module))}
    return [f"{name}.{parameter}" for name, form in forms.items() for parameter in form.parameters]


def adapted(model: Any) -> dict[str, torch.Size]:
    """The trained parameters with shapes."""
    return {name: value.shape for name, value in model.named_parameters() if value.requires_grad}


def randomized(model: Any, seed: int = 7) -> Any:
    """The model with non-zero adapters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in sorted(model.named_parameters()):
            if "lora_" in name:
                value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
    return model


def tokens(model: Any) -> torch.Tensor:
    """Two random sequences."""
    text = model.config.get_text_config()
    return torch.arange(24).mul(7).remainder(min(60, text.vocab_size - 4)).add(3).view(2, 12)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens(model)).logits
    return found


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients of all trained parameters. Each token has its own loss, because routers may be random in training."""
    model.eval()
    found = model(input_ids=tokens(model)).logits
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    (found * weights).mean().backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def assert_same(packed: Any, stock: Any) -> None:
    """Compare outputs and gradients with the same adapters on decoded weights."""
    try:
        expected_logits = logits(stock)
    except AttributeError as error:
        pytest.skip(f"stock transformers and peft cannot run it: {error}")
    torch.testing.assert_close(logits(packed), expected_logits, **CLOSE)
    found, expected = gradients(packed), gradients(stock)
    assert found.keys() == expected.keys() and found
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < 1e-2, (name, error)

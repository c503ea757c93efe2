"""The models of `benches/tools/real.py`: all forms of a function, rescaled or not, compute the same logits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from benches.tools import real

HIDDEN, LAYERS, INNER, HEADS, GROUPS, TOKENS = 32, 2, 48, 4, 2, 40


@pytest.fixture(scope="module")
def dense() -> Any:
    """A random dense model whose weights bfloat16 holds exactly."""
    generator, width = torch.Generator().manual_seed(0), HIDDEN // HEADS

    def random(*shape: int) -> torch.Tensor:
        return (0.3 * torch.randn(shape, generator=generator)).bfloat16().float()

    tensors = {"embed": random(TOKENS, HIDDEN), "norm": (1 + random(HIDDEN)).bfloat16().float()}
    for layer in range(LAYERS):
        shapes = {
            "q": (HIDDEN, HIDDEN), "k": (GROUPS * width, HIDDEN), "v": (GROUPS * width, HIDDEN), "o": (HIDDEN, HIDDEN),
            "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER),
        }  # fmt: skip
        tensors |= {f"{layer}.{name}": random(*shape) for name, shape in shapes.items()}
        tensors |= {f"{layer}.{name}_norm": (1 + random(HIDDEN)).bfloat16().float() for name in ("attention", "mlp")}
    tokens = [chr(97 + number) if number < 26 else f"<{number}>" for number in range(TOKENS)]
    fields = {
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": [], "tokenizer.ggml.token_type": [1] * TOKENS,
        "tokenizer.chat_template": "{{ messages }}", "llama.vocab_size": TOKENS, "llama.rope.freq_base": 10000.0,
        "llama.context_length": 64,
    }  # fmt: skip
    made = SimpleNamespace(
        hidden=HIDDEN,
        layers=LAYERS,
        inner=INNER,
        heads=HEADS,
        groups=GROUPS,
        width=width,
        tensors=tensors,
        fields=fields,
    )
    made.positions = real.Dense.positions.fget(made)
    return made


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("form", real.FORMS)
def test_every_form_computes_the_dense_function(dense: Any, form: str, seed: int | None, tmp_path: Path) -> None:
    out = real.checkpoint(dense, tmp_path / "out", form, seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ids = torch.arange(3, 19)
    with torch.inference_mode():
        found, expected = model(ids[None]).logits[0], real.dense_logits(dense, ids)
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_rescaling_changes_the_scales_of_every_kind(dense: Any) -> None:
    found, divided = real.rescaled(dense, 3)
    assert divided != 1
    for name, before in dense.tensors.items():
        assert (name in ("embed", "norm")) == torch.equal(found[name], before), name

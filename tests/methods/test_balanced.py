"""The balanced form of a checkpoint: the same function, and the same loss however the function was written down."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import moepack
import runtime_support as support
from moepack.calibration.text import BUILT_IN
from moepack.checkpoint import Checkpoint, describe
from moepack.checkpoint.balanced import BalancedCheckpoint, balanced
from moepack.methods import Auto, CodeQuant, FineQuant, Method, Milo, Qmoe, Ternary
from moepack.methods.floe import Floe
from places import NOVEL, TINY_MOE

FILE = "model.safetensors"
SHOWN = ("bits", "weight_bits", "bits_per_weight", "group_size", "rotation", "rank", "paper_form", "dense_bits")


def everything(checkpoint: Checkpoint) -> set[str]:
    """The names of all tensors that can be packed."""
    model = describe(checkpoint)
    experts = {source for layer in model.layers for part in layer.projections for source in part.sources}
    return experts | {linear.source for layer in model.dense for linear in layer.linears if linear.role != "embedding"}


def form_of(checkpoint: Checkpoint, packed: set[str] | None = None) -> BalancedCheckpoint:
    found = balanced(checkpoint, describe(checkpoint), everything(checkpoint) if packed is None else packed)
    assert found is not None
    return found


def loaded(path: Path, architecture: str) -> torch.nn.Module:
    kind = AutoModelForSeq2SeqLM if architecture == support.SWITCH else AutoModelForCausalLM
    return kind.from_pretrained(path, dtype=torch.float32).eval()


def written(form: Checkpoint, config: Path, out: Path) -> Path:
    """Write a checkpoint as it is read."""
    out.mkdir()
    tensors = {name: form.tensor(name).contiguous().clone() for name in form.names()}
    save_file(tensors, out / FILE, metadata={"format": "pt"})
    (out / "config.json").write_text((config / "config.json").read_text())
    return out


@pytest.mark.parametrize("architecture", support.ARCHITECTURES)
def test_the_balanced_form_computes_the_same(architecture: str, tmp_path: Path) -> None:
    model = support.tiny_model(architecture)
    model.save_pretrained(tmp_path / "model")
    checkpoint = Checkpoint.open(tmp_path / "model")
    form = form_of(checkpoint)
    out = written(form, tmp_path / "model", tmp_path / "balanced")
    changed = {name for name in form.names() if not torch.equal(form.tensor(name), checkpoint.tensor(name))}
    assert everything(checkpoint) <= changed
    expected, found = support.logits(model), support.logits(loaded(out, architecture))
    assert float((found - expected).abs().max() / expected.abs().max()) < 2e-5


# ---- the loss of the example model in other scales


def drawn(count: int, seed: int) -> Tensor:
    """Return log-normal factors of deviation 1."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).exp()


def rescaled(model: Path, out: Path) -> Path:
    """Write the same function in float32 with other scales: norms, channels of experts, values of attention."""
    shutil.copytree(model, out)
    config = json.loads((model / "config.json").read_text())
    for file in out.glob("*.safetensors"):
        tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
        for layer in range(config["num_hidden_layers"]):
            _rescale(tensors, f"model.layers.{layer}", config, 1000 * layer)
        save_file(tensors, file, metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return out


def _rescale(tensors: dict[str, Tensor], path: str, config: dict[str, Any], seed: int) -> None:
    hidden, heads, groups = (
        config[f"{name}"] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    norms = (("input_layernorm", "self_attn.[qkv]_proj"), ("post_attention_layernorm", r".*(gate|w1|w3)"))
    for number, (norm, readers) in enumerate(norms):
        own = drawn(hidden, seed + number)
        tensors[f"{path}.{norm}.weight"] *= own
        for name in tensors:
            if re.fullmatch(rf"{path}\.{readers}\.weight", name):
                tensors[name] /= own
    own = drawn(groups * (hidden // heads), seed + 2)
    tensors[f"{path}.self_attn.v_proj.weight"] *= own[:, None]
    repeated = own.view(groups, 1, -1).expand(-1, heads // groups, -1).flatten()
    tensors[f"{path}.self_attn.o_proj.weight"] /= repeated
    for expert in range(config["num_local_experts"]):
        own = drawn(config["intermediate_size"], seed + 3 + expert)
        experts = f"{path}.block_sparse_moe.experts.{expert}"
        tensors[f"{experts}.w3.weight"] *= own[:, None]
        tensors[f"{experts}.w2.weight"] /= own


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The example model, and the same function in other scales."""
    other = rescaled(TINY_MOE, tmp_path_factory.mktemp("rescaled") / "model")
    loss = [moepack.evaluate(model, NOVEL, 4000).loss for model in (TINY_MOE, other)]
    assert loss[0] == pytest.approx(loss[1], abs=2e-3)
    return TINY_MOE, other


TEXT = {"calibration": BUILT_IN, "samples": 4, "sequence_length": 128}


@pytest.mark.parametrize(
    "method",
    [
        FineQuant(bits=2, group_size=32),
        FineQuant(bits=3, group_size=64, dense_bits=4),
        FineQuant(bits=3, group_size="row"),
        FineQuant(bits=3, group_size="budget", bits_per_weight=3.5, symmetric=False),
        FineQuant(bits=4, group_size="adaptive"),
        Milo(bits=3, rounds=2),
        Milo(bits=2, rank="uniform:4", rounds=2),
        Ternary(),
        Qmoe(**TEXT),
        Qmoe(**TEXT, bits="2", dense_bits=4),
        Qmoe(**TEXT, bits_per_weight=1.2),
        CodeQuant(**TEXT, rotation="none", weight_bits=3, steps=1),
        CodeQuant(**TEXT, rotation="none", weight_bits=2, steps=1, block=128, permute=True, dense=""),
        CodeQuant(**TEXT, rotation="random", weight_bits=3, steps=1),
        Floe(**TEXT, sparsity=0.5),
        Floe(**TEXT, sparsity=0.5, paper_form=True, bits=4),
        Auto(bits_per_weight=4.0, prefer="speed"),
    ],
    ids=lambda method: " ".join([method.name, *(f"{k}={v}" for k, v in method.settings.items() if k in SHOWN)]),
)
def test_a_model_in_other_scales_loses_as_much(method: Method, both: tuple[Path, Path], tmp_path: Path) -> None:
    losses, apart = [], []
    for number, model in enumerate(both):
        out = tmp_path / str(number)
        moepack.compress(model, out, method=copy.deepcopy(method))
        found = moepack.evaluate(out, NOVEL, 12_000, reference=model)
        losses.append(found.loss)
        apart.append(found.kl)
    print(losses, apart)
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert apart[0] > 0 and apart[1] == pytest.approx(apart[0], rel=0.15)

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
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import moepack
import runtime_support as support
from adapter_support import randomized
from moepack.calibration.text import BUILT_IN
from moepack.census.tiny import tiny_model
from moepack.checkpoint import Checkpoint, describe
from moepack.checkpoint.architectures.pre_normed import MODEL_TYPES
from moepack.checkpoint.balanced import BalancedCheckpoint, balanced
from moepack.checkpoint.model import Part
from moepack.checkpoint.quantized import open_checkpoint
from moepack.errors import CorruptionError, LoadError, UnsupportedModelError
from moepack.export import export
from moepack.format import PackedDirectory
from moepack.format.balance import balance_of
from moepack.format.hub import BALANCE
from moepack.integrations.loading import open_model
from moepack.methods import Auto, CodeQuant, FineQuant, Method, Milo, PackedBytes, Qmoe
from moepack.methods.floe import Floe
from moepack.methods.qmoe.ternary import Ternary
from moepack.pipeline.estimate import estimate
from moepack.solvers.balance import row_magnitudes
from places import NOVEL

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


def written(form: Checkpoint, config: Path, out: Path) -> Path:
    """Write a checkpoint as it is read."""
    out.mkdir()
    tensors = {name: form.tensor(name).contiguous().clone() for name in form.names()}
    save_file(tensors, out / FILE, metadata={"format": "pt"})
    (out / "config.json").write_text((config / "config.json").read_text())
    return out


@pytest.mark.parametrize("architecture", [*support.ARCHITECTURES, *sorted(MODEL_TYPES)])
def test_the_balanced_form_computes_the_same(architecture: str, tmp_path: Path) -> None:
    model = random_model(architecture)
    model.save_pretrained(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    form = form_of(checkpoint)
    out = written(form, tmp_path / "model", tmp_path / "balanced")
    changed = {name for name in form.names() if not torch.equal(form.tensor(name), checkpoint.tensor(name))}
    if architecture in support.ARCHITECTURES:
        assert everything(checkpoint) <= changed
    for layer in describe(form).layers:
        for part in layer.projections:
            for expert in (0, layer.experts - 1):
                assert torch.equal(part.expert(expert, torch.device("cpu")), part.expert(expert))
            whole = Part(part.parts[0].tensor)
            assert torch.equal(form.matrix(whole, torch.device("cpu")), form.tensor(whole.tensor))
    assert any((name.endswith("norm.weight") and ".layers." in name) or ".block." in name for name in changed)
    expected, found = (
        support.logits(model),
        support.logits(type(model).from_pretrained(out, dtype=torch.float32).eval()),
    )
    assert float((found - expected).abs().max() / expected.abs().max()) < 2e-5


def random_model(architecture: str) -> Any:
    """A tiny random model whose norms are not ones; skips what the installed transformers has not."""
    if architecture in support.ARCHITECTURES:
        return support.tiny_model(architecture)
    if architecture not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have it")
    model = tiny_model(architecture).float().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data = torch.rand(parameter.shape, generator=generator) + 0.5
    return model


@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_next", "mixtral"])
def test_norms_that_keep_their_scales_are_noted(architecture: str, tmp_path: Path) -> None:
    if architecture not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have it")
    random_model(architecture).save_pretrained(tmp_path / "model")
    report = moepack.compress(tmp_path / "model", tmp_path / "out", method="finequant")
    plan = estimate(tmp_path / "model", tmp_path / "other", FineQuant())
    for notes in (report.notes, plan.notes):
        assert any("norms keep their scales" in note for note in notes) == (architecture != "mixtral")
    assert (tmp_path / "out" / BALANCE).exists() == (architecture != "gpt_oss")
    assert moepack.verify(tmp_path / "out").ok


@pytest.mark.parametrize("name", ["model.layers.9.eh_proj.weight", "mtp.fc.weight", "model.mtp_linear_proj.0.weight"])
def test_the_last_norm_keeps_its_scales_if_layers_for_prediction_read_it(name: str, tmp_path: Path) -> None:
    support.tiny_model("mixtral").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert not torch.equal(form_of(checkpoint).tensor("model.norm.weight"), checkpoint.tensor("model.norm.weight"))
    save_file(load_file(tmp_path / FILE) | {name: torch.ones(64, 128)}, tmp_path / FILE, {"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    form = form_of(checkpoint)
    assert torch.equal(form.tensor("model.norm.weight"), checkpoint.tensor("model.norm.weight"))


# ---- what is combined with a packed model


class BalancedDense(support.DenseMethod):
    """Packs float32 weights of the balanced form: what differs from the source differs by its scales."""

    needs_balance = True


def pair(architecture: str, folder: Path) -> tuple[Any, Path]:
    """A tiny random model, and its packed directory with all linear layers packed but the shared experts."""
    model = support.tiny_model(architecture)
    return model, support.write_packed(model, folder / "packed", BalancedDense(("attention", "mlp", "head")))


DECODERS = [name for name in support.ARCHITECTURES if name != support.SWITCH]


@pytest.mark.parametrize("architecture", DECODERS)
def test_an_adapter_of_the_source_fits_and_goes(architecture: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the extra `train` is not installed")
    source, directory = pair(architecture, tmp_path)
    packed = moepack.load(directory, dtype=torch.float32)
    plain = support.logits(packed)
    close = {"rtol": 1e-3, "atol": 1e-3 * float(plain.abs().max())}
    torch.testing.assert_close(plain, support.logits(source), **close)
    exclude = ["router"] if architecture == "phimoe" else None
    config = peft.LoraConfig(target_modules="all-linear", exclude_modules=exclude, r=4)
    adapted = randomized(peft.get_peft_model(source, copy.deepcopy(config)))
    adapted.save_pretrained(tmp_path / "adapter")
    found = peft.PeftModel.from_pretrained(packed, tmp_path / "adapter").eval()
    expected = support.logits(adapted.eval())
    assert float((expected - plain).abs().max()) > 10 * close["atol"]
    torch.testing.assert_close(support.logits(found), expected, **close)
    assert torch.equal(support.logits(found.unload()), plain)


def test_a_refused_adapter_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the extra `train` is not installed")
    packed = moepack.load(pair("mixtral", tmp_path)[1], dtype=torch.float32)
    plain, state = support.logits(packed), {name: tensor.clone() for name, tensor in packed.state_dict().items()}
    with pytest.raises(UnsupportedModelError):
        peft.get_peft_model(packed, peft.LoraConfig(target_modules=["q_proj", "gate_proj"]))
    assert torch.equal(support.logits(packed), plain)
    assert all(torch.equal(tensor, state[name]) for name, tensor in packed.state_dict().items())


@pytest.mark.parametrize("architecture", ["qwen2_moe", "deepseek_v3", "phimoe", "switch_transformers"])
def test_decoded_models_have_the_scales_of_the_source(architecture: str, tmp_path: Path) -> None:
    source, directory = pair(architecture, tmp_path)
    decoded = moepack.load(directory, dtype=torch.float32).dequantize()
    for name, tensor in source.state_dict().items():
        torch.testing.assert_close(decoded.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(support.logits(decoded), support.logits(source), rtol=1e-3, atol=1e-4)
    export(directory, tmp_path / "plain")
    exported, original = open_checkpoint(tmp_path / "plain"), open_checkpoint(tmp_path / "packed-source")
    for name in original.names():
        torch.testing.assert_close(exported.tensor(name).float(), original.tensor(name).float(), rtol=2**-8, atol=1e-6)
    assert not (tmp_path / "plain" / BALANCE).exists()


def test_a_rotated_model_rejects_adapters_of_another_model(mixtral: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the extra `train` is not installed")
    method = CodeQuant(str(NOVEL), samples=2, sequence_length=32, rotation="random", steps=1)
    moepack.compress(mixtral, tmp_path / "packed", method=method)
    config = peft.LoraConfig(target_modules=["q_proj"], r=4)
    peft.get_peft_model(open_model(mixtral, torch.float32), copy.deepcopy(config)).save_pretrained(tmp_path / "other")
    packed = moepack.load(tmp_path / "packed", dtype=torch.float32)
    with pytest.raises(UnsupportedModelError, match="was rotated before it was packed"):
        peft.PeftModel.from_pretrained(packed, tmp_path / "other")
    peft.get_peft_model(packed, config).save_pretrained(tmp_path / "own")
    packed = moepack.load(tmp_path / "packed", dtype=torch.float32)
    assert peft.PeftModel.from_pretrained(packed, tmp_path / "own")


def test_damaged_and_missing_factors_are_reported(tmp_path: Path) -> None:
    directory = pair("mixtral", tmp_path)[1]
    file = directory / BALANCE
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptionError, match=BALANCE):
        balance_of(directory)
    file.write_bytes(content)
    save_file({name: -tensor for name, tensor in load_file(file).items()}, file)
    with pytest.raises(CorruptionError, match="positive"):
        balance_of(directory)
    file.unlink()
    with pytest.raises(LoadError, match="missing"):
        balance_of(directory)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_magnitudes_of_rows_are_means_and_leave_the_rows(dtype: torch.dtype) -> None:
    rows, columns = torch.randn(300, 2000).to(dtype), torch.rand(2000, dtype=torch.float64) + 0.5
    rows[7] = 0
    given = rows.clone()
    expected = (rows.double().abs() / columns).mean(1)
    expected[7] = 1
    torch.testing.assert_close(row_magnitudes(rows, columns), expected)
    assert torch.equal(rows, given)


# ---- tensors packed elsewhere


def test_tensors_packed_from_the_checkpoint_as_it_is_keep_their_scales(mixtral: Path, tmp_path: Path) -> None:
    """A job takes the form from which a given tensor was packed, also for tensors that share its scales."""
    layer = describe(open_checkpoint(mixtral)).layers[0]
    *_, down = layer.projections
    plain = torch.stack([down.expert(expert).float() for expert in range(layer.experts)])
    blob = support.dense_blob(plain.numpy())
    others = {down.packed_name: PackedBytes(support.KIND, blob)}
    moepack.compress(mixtral, tmp_path / "out", method=BalancedDense(), others=others)
    packed, source = (moepack.load(tmp_path / "out", dtype=torch.float32), open_model(mixtral, torch.float32))
    torch.testing.assert_close(support.logits(packed), support.logits(source), rtol=1e-3, atol=1e-3)
    keys = load_file(tmp_path / "out" / BALANCE).keys()
    assert not any(down.packed_name in key or layer.projections[1].packed_name + ".rows" in key for key in keys)
    moepack.compress(mixtral, tmp_path / "whole", method=BalancedDense())
    first = PackedDirectory.open(tmp_path / "whole")
    given = {name: PackedBytes(support.KIND, data) for name, data in first.tensors().items() if "layers.0" in name}
    moepack.compress(mixtral, tmp_path / "again", method=BalancedDense(), others=given)
    second = PackedDirectory.open(tmp_path / "again").tensors()
    assert all((second[name] == data).all() for name, data in first.tensors().items())
    mixed = {**given, down.packed_name: PackedBytes(support.KIND, blob)}
    with pytest.raises(ValueError, match="different forms of the checkpoint"):
        moepack.compress(mixtral, tmp_path / "no", method=BalancedDense(), others=mixed)


# ---- the loss of the example model in other scales


def drawn(count: int, seed: int) -> Tensor:
    """Return log-normal factors of deviation 1."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).exp()


def in_float32(model: Path, out: Path, scaled: bool) -> Path:
    """Write the same function in float32, with other scales of norms, channels of experts and values if `scaled`."""
    shutil.copytree(model, out)
    config = json.loads((model / "config.json").read_text())
    for file in out.glob("*.safetensors"):
        tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
        for layer in range(config["num_hidden_layers"] if scaled else 0):
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
def both(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same function in other scales."""
    folder = tmp_path_factory.mktemp("rescaled")  # both in float32: budgets follow the size of the files
    one, other = (in_float32(shallow, folder / name, name == "scaled") for name in ("plain", "scaled"))
    loss = [moepack.evaluate(model, NOVEL, 4000).loss for model in (one, other)]
    assert loss[0] == pytest.approx(loss[1], abs=2e-3)
    return one, other


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
        Qmoe(**{**TEXT, "samples": 16}, bits_per_weight=1.6),
        CodeQuant(**TEXT, rotation="none", weight_bits=3, steps=1),
        CodeQuant(**TEXT, rotation="none", weight_bits=2, steps=1, block=128, permute=True, dense=""),
        CodeQuant(**TEXT, rotation="random", weight_bits=3, steps=1),
        Floe(**TEXT, sparsity=0.5),
        Floe(**TEXT, sparsity=0.5, paper_form=True, bits=4),
        Auto(**TEXT, bits_per_weight=4.0, prefer="speed"),
    ],
    ids=lambda method: " ".join([method.name, *(f"{k}={v}" for k, v in method.settings.items() if k in SHOWN)]),
)
@pytest.mark.usefixtures("fast_widths")
def test_a_model_in_other_scales_loses_as_much(method: Method, both: tuple[Path, Path], tmp_path: Path) -> None:
    losses, apart = [], []
    for number, model in enumerate(both):
        out = tmp_path / str(number)
        moepack.compress(model, out, method=copy.deepcopy(method))
        found = moepack.evaluate(out, NOVEL, 6000, reference=model)
        losses.append(found.loss)
        apart.append(found.kl)
    print(losses, apart)
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert apart[0] > 0 and apart[1] == pytest.approx(apart[0], rel=0.15)

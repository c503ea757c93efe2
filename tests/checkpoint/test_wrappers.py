"""Tensor names changed by wrappers: everything that transformers loads is read, and also names hidden by a wrapper."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moepack import CheckpointError, LoadError, UnsupportedModelError, compress, describe, load, verify
from moepack.checkpoint.classes import model_class
from moepack.checkpoint.quantized import open_checkpoint
from moepack.checkpoint.reader import Checkpoint
from moepack.export import export
from moepack.format import PackedDirectory
from moepack.integrations.loading import open_model
from moepack.methods.finequant import FineQuant
from moepack.methods.rate import Rate
from moepack.pipeline.estimate import estimate

Rename = Callable[[str], str]
IDS = torch.arange(3, 19)[None]

FAMILIES = [
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "granitemoe", "olmoe", "phimoe"),
    *("glm4_moe", "gpt_oss", "qwen3_next", "jamba", "dbrx", "nemotron_h", "switch_transformers", "qwen3_5_moe"),
]


def text_only(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def compiled_blocks(name: str) -> str:
    """Names of `block.compile()` in a loop over layers."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return name if number is None else ".".join([*parts[: number + 1], "_orig_mod", *parts[number + 1 :]])


RENAMINGS: dict[str, Rename] = {
    "no prefix": lambda name: name.removeprefix("model."),
    "prefix twice": lambda name: f"model.{name}" if name.startswith("model.") else name,
    "_orig_mod.": lambda name: f"_orig_mod.{name}",
    "module.": lambda name: f"module.{name}",
    "base_model.model.": lambda name: f"base_model.model.{name}",
    "module._orig_mod.": lambda name: f"module._orig_mod.{name}",
    "_orig_mod.module.": lambda name: f"_orig_mod.module.{name}",
    "base_model.model._orig_mod.": lambda name: f"base_model.model._orig_mod.{name}",
    "_orig_mod. without prefix": lambda name: f"_orig_mod.{name.removeprefix('model.')}",
    "module. without prefix": lambda name: f"module.{name.removeprefix('model.')}",
    "language_model.": lambda name: f"language_model.{name}",
    "model.language_model.": text_only,
    "module.model.language_model.": lambda name: f"module.{text_only(name)}",
    "_fsdp_wrapped_module.": lambda name: f"_fsdp_wrapped_module.{compiled_blocks(name)}",
    "compiled blocks": compiled_blocks,
    "policy.actor.": lambda name: f"policy.actor.{name}",
}


def renamed(source: Path, target: Path, rename: Rename, shards: int = 1) -> Path:
    """The checkpoint with renamed tensors, in one file or in shards with an index."""
    target.mkdir()
    tensors = {rename(name): x for name, x in load_file(source / "model.safetensors").items()}
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    if shards == 1:
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        return target
    files = {f"model-{i}.safetensors": [*tensors][i::shards] for i in range(shards)}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, target / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


def facts(checkpoint: Checkpoint) -> object:
    """The description of a checkpoint without notes and the order of tensors."""
    model = describe(checkpoint)
    parts = {p.packed_name: (p.shape, p.parts) for layer in model.layers for p in layer.projections}
    dense = {(linear.name, linear.role, linear.source) for layer in model.dense for linear in layer.linears}
    return (
        parts,
        dense,
        set(model.dense_names),
        {layer.name: ({*layer.router}, {*layer.shared}) for layer in model.layers},
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_wrapper_is_read_as_the_plain_checkpoint(
    family: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    source = saved(family)
    expected, names = facts(open_checkpoint(source)), load_file(source / "model.safetensors").keys()
    for number, (kind, rename) in enumerate(RENAMINGS.items()):
        if [*map(rename, names)] == [*names]:
            continue
        wrapped = open_checkpoint(renamed(source, tmp_path / str(number), rename, shards=1 + number % 2))
        assert facts(wrapped) == expected, (family, kind)
        silent = kind in ("no prefix", "prefix twice")
        assert silent or any("training wrapper" in note for note in describe(wrapped).notes), (family, kind)


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_that_stock_transformers_loads_is_read(
    family: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    source = saved(family)
    for kind in ("no prefix", "prefix twice"):
        directory = renamed(source, tmp_path / kind, RENAMINGS[kind])
        config = json.loads((source / "config.json").read_text())
        _, report = model_class(config).from_pretrained(directory, dtype="auto", output_loading_info=True)
        if report["missing_keys"] or report["unexpected_keys"]:
            continue
        compress(directory, tmp_path / f"{kind} packed", method=FineQuant(bits=8))


@pytest.mark.parametrize("kind", ["no prefix", "_orig_mod.", "base_model.model.", "module.model.language_model."])
def test_the_packed_directory_does_not_remember_the_wrapper(
    kind: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """It is packed, loaded by both entry points, exported and evaluated like the plain checkpoint."""
    source = saved("qwen3_moe")
    wrapped = renamed(source, tmp_path / "wrapped", RENAMINGS[kind])
    want = open_model(source, torch.float32)(IDS).logits
    assert torch.equal(open_model(wrapped, torch.float32)(IDS).logits, want)
    for place in (source, wrapped):
        compress(place, tmp_path / f"{place.name} packed", method=Rate(8.0))
    plain, packed = tmp_path / f"{source.name} packed", tmp_path / "wrapped packed"
    assert PackedDirectory.open(packed).manifest.tensors.keys() == PackedDirectory.open(plain).manifest.tensors.keys()
    assert verify(packed).ok
    found = load(packed, "float32", mode="exact")(IDS).logits
    assert torch.equal(found, load(plain, "float32", mode="exact")(IDS).logits)
    stock, report = transformers.AutoModelForCausalLM.from_pretrained(
        packed, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert (stock(IDS).logits - want).norm() < 0.05 * want.norm()
    export(packed, tmp_path / "bf16")
    _, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


def fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Linear layers in float8 with one factor per matrix."""
    made: dict[str, torch.Tensor] = {}
    for name, x in tensors.items():
        if name.endswith("_proj.weight"):
            scale = x.abs().max().float() / 448
            made |= {name: (x.float() / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
        else:
            made[name] = x
    return made


@pytest.mark.parametrize("kind", ["no prefix", "_orig_mod.", "module.model.language_model."])
def test_companions_of_quantized_weights_are_renamed_with_them(
    kind: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    source = saved("qwen3_moe")
    directory = renamed(source, tmp_path / "codes", lambda name: name)
    tensors = fp8(load_file(source / "model.safetensors"))
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    wrapped = renamed(directory, tmp_path / "wrapped", RENAMINGS[kind])
    plain, found = open_checkpoint(directory), open_checkpoint(wrapped)
    assert set(found.names()) == set(plain.names())
    assert all(torch.equal(found.tensor(name), plain.tensor(name)) for name in plain.names())


def test_a_tied_head_is_renamed_with_the_rest(saved: Callable[[str], Path], tmp_path: Path) -> None:
    source = renamed(saved("qwen3_moe"), tmp_path / "tied", lambda name: name)
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    for kind in ("module.", "module.model.language_model."):
        wrapped = open_checkpoint(renamed(source, tmp_path / kind, RENAMINGS[kind]))
        assert facts(wrapped) == facts(open_checkpoint(source)) and not describe(wrapped).unread
        assert wrapped.config["tie_word_embeddings"] is False  # the head is stored with other values


MIXED: dict[str, Rename] = {
    "a layer without prefix": lambda name: name.removeprefix("model.") if ".1." in name[:16] else name,
    "attention without prefix": lambda name: name.removeprefix("model.") if ".self_attn." in name else name,
    "a layer of module.": lambda name: f"module.{name}" if ".1." in name[:16] else name,
    "ends of module.": lambda name: f"module.{name}" if "0" not in name and "1" not in name else name,
    "most of base_model.model.": lambda name: name if name.startswith("lm_head") else f"base_model.model.{name}",
}
"""Names of different forms in one checkpoint, as if different programs had saved its shards."""


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_names_of_several_forms_in_one_checkpoint(family: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    source = saved(family)
    expected = facts(open_checkpoint(source))
    for number, (kind, rename) in enumerate(MIXED.items()):
        directory = renamed(source, tmp_path / str(number), rename, shards=1 + number % 2)
        assert facts(open_checkpoint(directory)) == expected, kind
        estimate(directory, tmp_path / "out", method=FineQuant(bits=8))


@pytest.mark.parametrize("rename", [lambda name: name.removeprefix("model."), lambda name: f"module.{name}"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_an_index_with_other_prefixes_than_its_shards(
    family: str, rename: Rename, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """Transformers reads the list of files from it."""
    directory = renamed(saved(family), tmp_path / "x", lambda name: name, shards=2)
    index = directory / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    names = {rename(name): file for name, file in listed.items()}
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    _, report = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert facts(open_checkpoint(directory)) == facts(open_checkpoint(saved(family)))
    assert open_model(directory, torch.float32)(IDS).logits.isfinite().all()


# ---- names that are not unwrapped


def test_two_models_under_two_prefixes_are_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    directory = renamed(saved("mixtral"), tmp_path / "both", lambda name: f"student.{name}")
    tensors = load_file(directory / "model.safetensors")
    teacher = {name.replace("student", "teacher"): x.clone() for name, x in tensors.items()}
    save_file(tensors | teacher, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"twice, under '(student|teacher)\.' and under"):
        open_checkpoint(directory)


def test_a_name_that_is_there_in_two_spellings_is_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    directory = renamed(saved("mixtral"), tmp_path / "both", lambda name: name)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if "layers.0" in name]:
        tensors[name.removeprefix("model.")] = tensors[name] + 1
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="is stored twice, as"):
        compress(directory, tmp_path / "out", method=FineQuant(bits=8))


def test_a_norm_of_another_tower_is_not_taken_for_the_models(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """One tensor is missing and one of that name exists elsewhere, which does not indicate a wrapper."""
    directory = renamed(
        saved("qwen3_moe"),
        tmp_path / "x",
        lambda name: "visual.norm.weight" if name == "model.norm.weight" else name,
    )
    for door in (compress, estimate):
        with pytest.raises(
            CheckpointError, match=r"'model\.norm\.weight': is missing from the checkpoint, although the model needs it"
        ):
            door(directory, tmp_path / "out", method=FineQuant(bits=8))
    with pytest.raises(LoadError, match=r"does not have: model\.norm\.weight"):
        open_model(directory)


@pytest.mark.parametrize(
    "name, other",
    [("q_proj.weight", "q_proj.base_layer.weight"), ("lm_head.weight", "lm_head.modules_to_save.default.weight")],
)
def test_an_unmerged_adapter_is_reported(name: str, other: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    directory = renamed(
        saved("qwen3_moe"), tmp_path / "x", lambda each: f"base_model.model.{each.replace(name, other)}"
    )
    sentence = rf"the checkpoint has '.*{other}': merge the adapter first"
    for door in (compress, estimate):
        with pytest.raises(CheckpointError, match=sentence):
            door(directory, tmp_path / "out", method=FineQuant(bits=8))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_a_hidden_layer_is_reported(family: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """A prefix of a minority of the names is not taken for a wrapper."""
    directory = renamed(saved(family), tmp_path / "x", lambda name: f"draft.{name}" if ".layers.1." in name else name)
    for door in (compress, estimate):
        with pytest.raises(CheckpointError, match=r"the checkpoint has 'draft\.model\.layers\.1\."):
            door(directory, tmp_path / "out", method=FineQuant(bits=8))


def test_experts_of_an_unmerged_adapter_are_reported(saved: Callable[[str], Path], tmp_path: Path) -> None:
    directory = renamed(
        saved("qwen3_moe"),
        tmp_path / "x",
        lambda name: name.replace("_proj.weight", "_proj.base_layer.weight"),
    )
    with pytest.raises(CheckpointError, match=r"the checkpoint has '.*base_layer\.weight': merge the adapter first"):
        estimate(directory, tmp_path / "out", method=FineQuant(bits=8))


def test_a_rejection_names_the_found_and_the_expected(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """The message never calls a listed model type unsupported."""
    directory = renamed(saved("mixtral"), tmp_path / "x", lambda name: name.replace("layers", "blocks"))
    with pytest.raises(UnsupportedModelError) as caught:
        compress(directory, tmp_path / "out", method=FineQuant(bits=8))
    said = str(caught.value)
    assert "experts.0.w1.weight" in said and "the nearest is" in said and "not supported" not in said

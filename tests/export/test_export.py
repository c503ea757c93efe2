"""Output of `moepack export`, read back by the target programs."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

import moepack
from moepack import GroupwiseTensor, OutputExistsError, ResumeError, UnsupportedModelError
from moepack.checkpoint import Checkpoint, describe
from moepack.checkpoint.quantized.opening import open_checkpoint
from moepack.cli import main
from moepack.export import export
from moepack.export.compressed_tensors import pack_words
from moepack.export.gguf import q4_0_blocks, q8_0_blocks
from moepack.format import PackedDirectory
from moepack.methods import Method, create
from moepack.methods.finequant import FineQuant
from moepack.methods.qmoe.ternary import Ternary
from moepack.pipeline import Assignment
from moepack.pipeline.journal import Workspace
from places import NOVEL, TINY_MOE
from runtime_support import ARCHITECTURES, SWITCH, logits, tiny_model, write_packed


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


INT4 = FineQuant(bits=4, group_size=16, dense_bits=8)


@pytest.mark.parametrize(
    ("architecture", "method"),
    [(name, INT4) for name in ARCHITECTURES]
    + [("mixtral", Ternary()), (SWITCH, Ternary()), ("mixtral", FineQuant(bits=2, group_size=16, symmetric=False))],
)
def test_bf16_loads_in_stock_transformers_with_the_same_logits(
    architecture: str, method: Method, tmp_path: Path
) -> None:
    directory = write_packed(tiny_model(architecture).bfloat16(), tmp_path / "packed", method)
    assert export(directory, tmp_path / "out") > 0
    auto = transformers.AutoModelForSeq2SeqLM if architecture == SWITCH else transformers.AutoModelForCausalLM
    loaded, report = auto.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    assert not hasattr(loaded.config, "quantization_config")
    packed = moepack.load(directory, torch.float32)
    expected, found = logits(packed), logits(loaded)
    assert (found - expected).abs().median() / expected.abs().median() < 0.015  # each matrix is rounded by 2^-9
    names = tensors_of(tmp_path / "out")
    assert {tensor.dtype for name, tensor in names.items() if tensor.ndim > 1} == {torch.bfloat16}
    with pytest.raises(ValueError, match="inside the packed directory"):
        export(directory, directory / "out")
    assert len(names) == len(json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"])
    again = tmp_path / "again"
    moepack.compress(tmp_path / "out", again, method=Ternary())  # and moepack reads its own export
    assert moepack.verify(again).ok


def test_the_place_is_not_taken_from_an_unfinished_compress(tmp_path: Path) -> None:
    directory = write_packed(tiny_model("mixtral").bfloat16(), tmp_path / "packed", Ternary())
    partial = tmp_path / "out.partial"
    Workspace.open(partial, {"method": "ternary"}, resume=True).close()
    (partial / "shard").write_text("hours of work")
    with pytest.raises(ResumeError, match="method was ternary, is export"):
        export(directory, tmp_path / "out")
    assert (partial / "shard").exists()
    shutil.rmtree(partial)
    Workspace.open(partial, {"method": "export"}, resume=True).close()
    (partial / "shard").write_text("of a killed run")
    export(directory, tmp_path / "out")
    assert not partial.exists() and not (tmp_path / "out" / "shard").exists()


def test_bf16_keeps_unpacked_tensors_bit_for_bit(mixtral: Path, packed: Path, tmp_path: Path) -> None:
    export(packed, tmp_path / "out")
    source, found = tensors_of(mixtral), tensors_of(tmp_path / "out")
    assert found.keys() == source.keys()
    for name, tensor in source.items():
        assert found[name].shape == tensor.shape
        if name.endswith(".gate.weight"):  # stored in the scales of the packed model, rounded to bfloat16
            torch.testing.assert_close(found[name], tensor, rtol=2**-7, atol=0)
        elif ".experts." not in name:
            assert torch.equal(found[name], tensor)
    names = {path.name for path in mixtral.iterdir() if not path.name.endswith(".safetensors")}
    assert names <= {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("to", ["bf16", "compressed-tensors", "gguf"])
def test_nothing_is_overwritten_and_unknown_formats_are_refused(to: str, packed: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputExistsError):
        export(packed, tmp_path, to)
    with pytest.raises(ValueError, match="unknown format"):
        export(packed, tmp_path / "out", "onnx")
    with pytest.raises(moepack.LoadError):
        export(tmp_path, tmp_path / "out", to)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("targets", ["exported", "of classes", "of no class"])
def test_integers_of_two_widths_are_read_again(targets: str, mixtral: Path, tmp_path: Path) -> None:
    moepack.compress(mixtral, tmp_path / "packed", method=FineQuant(bits=4, group_size=16, dense_bits="attention=8"))
    export(tmp_path / "packed", tmp_path / "out", "compressed-tensors")
    config = json.loads((tmp_path / "out/config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    if targets != "exported":
        for group in groups.values():
            experts = ["Linear"] if targets == "of classes" else ["re:.*experts"]
            group["targets"] = ["re:.*self_attn"] if group["weights"]["num_bits"] == 8 else experts
        (tmp_path / "out/config.json").write_text(json.dumps(config))
    assert {group["weights"]["num_bits"] for group in groups.values()} == {4, 8}
    found, stored, decoded = open_checkpoint(tmp_path / "out"), tensors_of(tmp_path / "out"), 0
    for name in found.names():
        if (words := stored.get(f"{name}_packed")) is not None:
            bits, scales = 8 if "self_attn" in name else 4, stored[f"{name}_scale"].float()
            stream = np.unpackbits(words.numpy().view(np.uint8), axis=-1, bitorder="little")
            codes = np.packbits(stream.reshape(len(words), -1, bits), axis=-1, bitorder="little")[..., 0]
            values = (torch.from_numpy(codes).float() - 2 ** (bits - 1)) * scales.repeat_interleave(16, -1)
            torch.testing.assert_close(found.tensor(name).float(), values, rtol=2**-8, atol=0)
            decoded += 1
    assert decoded == sum(name.endswith("_packed") for name in stored)


def test_integers_that_no_group_describes_are_named(mixtral: Path, tmp_path: Path) -> None:
    moepack.compress(mixtral, tmp_path / "packed", method=FineQuant(bits=4, group_size=16, dense_bits="attention=8"))
    export(tmp_path / "packed", tmp_path / "out", "compressed-tensors")
    config = json.loads((tmp_path / "out/config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["targets"] = ["re:.*self_attn"] if group["weights"]["num_bits"] == 8 else ["re:.*w[12]"]
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    with pytest.raises(moepack.CheckpointError, match=r"model.layers.0.block_sparse_moe.experts.0.w3.weight_"):
        open_checkpoint(tmp_path / "out")


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_match_compressed_tensors(bits: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = np.random.default_rng(bits).integers(0, 2**bits, (5, 75)).astype(np.uint8)
    expected = helpers.pack_to_int32(torch.from_numpy(codes.astype(np.int16) - 2 ** (bits - 1)).to(torch.int8), bits)
    assert torch.equal(torch.from_numpy(pack_words(codes, bits)), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"bits": 4, "group_size": 16, "dense_bits": "attention=8"},
        {"bits": 8, "group_size": "row"},
        {"bits": 3, "group_size": 16, "dense_bits": 4},
    ],
)
@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe", SWITCH])
def test_compressed_tensors_reads_the_same_values(architecture: str, settings: dict[str, Any], tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    model = tiny_model(architecture)
    if architecture == "qwen2_moe":  # 24 columns and groups of 16: the layout has no short group
        settings = {**settings, "group_size": "row"}
    directory = write_packed(model, tmp_path / "packed", FineQuant(**settings))
    export(directory, tmp_path / "out", "compressed-tensors")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    parsed = quantization.QuantizationConfig.model_validate(config)
    stored, checkpoint = tensors_of(tmp_path / "out"), Checkpoint.open(tmp_path / "packed-source")
    source, _ = Assignment(FineQuant(**settings)).balanced(checkpoint, describe(checkpoint))
    opened = PackedDirectory.open(directory)
    expected = {}
    for name, record in opened.manifest.packed().items():
        values = torch.from_numpy(opened.blob(name).dequantize()).to(getattr(torch, settings.get("scales", "float16")))
        for expert in range(len(values)):
            key = f"{record.module}.{expert}.{record.projection}" if record.experts else name.removesuffix(".weight")
            expected[key] = values[expert]
    modules = {name.removesuffix(".weight_packed") for name in stored if name.endswith(".weight_packed")}
    assert len(modules) == len(expected)
    sums = sorted(float(tensor.double().sum()) for tensor in expected.values())
    found = []
    for module in modules:
        schemes = [s for s in parsed.config_groups.values() if any(matches(target, module) for target in s.targets)]
        assert len(schemes) == 1, module
        state = {key: stored[f"{module}.{key}"] for key in ("weight_packed", "weight_scale", "weight_shape")}
        weight = compressors.PackedQuantizationCompressor.decompress(state, schemes[0])["weight"]
        original = source.tensor(f"{module}.weight").float()
        assert (weight.float() - original).norm() < 0.35 * original.norm()  # the right matrix under the right name
        found.append(float(weight.double().sum()))
    assert np.allclose(sorted(found), sums, rtol=1e-6, atol=1e-6)
    assert not modules & set(config["ignore"])
    assert not any(f"{module}.weight" in stored for module in modules)


@pytest.mark.parametrize(("architecture", "group_size"), [("mixtral", 16), ("qwen3_moe", "row")])
def test_stock_transformers_runs_the_compressed_tensors_export(
    architecture: str, group_size: int | str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("compressed_tensors")
    method = FineQuant(bits=4, group_size=group_size, dense_bits="attention=8")
    directory = write_packed(tiny_model(architecture), tmp_path / "packed", method)
    export(directory, tmp_path / "out", "compressed-tensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert "Could not match" not in caplog.text
    expected, found = logits(moepack.load(directory, torch.float32, mode="exact")), logits(loaded)
    assert (found - expected).norm() < 5e-3 * expected.norm()  # it dequantizes in float16


def matches(target: str, module: str) -> bool:
    import re

    return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module


@pytest.mark.parametrize("bits", [4, 8])
def test_gguf_rejects_rows_that_do_not_form_blocks(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = tiny_model("mixtral")  # 32 and 48 columns
    for size, settings in (("row", {"dense_bits": "attention=8"}), (32, {})):
        directory = write_packed(model, tmp_path / str(size), FineQuant(bits, size, **settings))
        with pytest.raises(UnsupportedModelError, match="do not form blocks of 32"):
            export(directory, tmp_path / "out.gguf", "gguf")
        assert not (tmp_path / "out.gguf").exists()


def tiny_model_of_width_64() -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def test_blocks_of_llama_cpp() -> None:
    codes = np.arange(32, dtype=np.uint8).reshape(1, 1, 32)
    scales = np.array([[1.5]], np.float16)
    assert bytes(q4_0_blocks(codes % 16, scales)[0, 0]) == b"\x00\x3e" + bytes(i | i << 4 for i in range(16))
    assert bytes(q8_0_blocks(codes + 112, scales)[0, 0]) == b"\x00\x3e" + bytes((i - 16) % 256 for i in range(32))


@pytest.mark.parametrize("to", ["compressed-tensors", "gguf"])
def test_unsupported_layouts_are_rejected_with_the_reason(to: str, packed: Path, tmp_path: Path) -> None:
    if to == "gguf":
        pytest.importorskip("gguf")
    with pytest.raises(UnsupportedModelError, match=r"not 'ternary'"):
        export(packed, tmp_path / "out", to)
    model = tiny_model_of_width_64()
    directory = write_packed(model, tmp_path / "offsets", FineQuant(symmetric=False))
    with pytest.raises(UnsupportedModelError, match="offsets"):
        export(directory, tmp_path / "out", to)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_a_group_that_does_not_divide_the_row_is_refused(tmp_path: Path) -> None:
    directory = write_packed(tiny_model("mixtral"), tmp_path / "packed", FineQuant(group_size=32))
    with pytest.raises(UnsupportedModelError, match="do not divide its 48 columns"):
        export(directory, tmp_path / "out", "compressed-tensors")


def test_the_command(packed: Path, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["export", str(packed), str(tmp_path / "out"), "--to", "bf16"])
    assert caught.value.code == 0 and "wrote" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["export", str(packed), str(tmp_path / "out2"), "--to", "exl2"])
    assert caught.value.code == 2
    assert GroupwiseTensor.kind == "groupwise"


CALIBRATED = {"calibration": str(NOVEL), "samples": 4, "sequence_length": 128}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qmoe", {**CALIBRATED, "bits_per_weight": 1.5}),
        ("qmoe", {**CALIBRATED, "dense_bits": 8}),
        ("qmoe", {**CALIBRATED, "bits": "2", "group_size": 32}),
        ("finequant", {"bits": 3, "symmetric": False, "dense_bits": "attention=4,head=8"}),
        ("milo", {"bits": 3, "rank": "uniform:2", "rounds": 1}),
        ("codequant", {**CALIBRATED, "weight_bits": 3, "rotation_steps": 4}),
        ("codequant", {**CALIBRATED, "weight_bits": 4, "block": 128, "rotation": "none"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, list(value.values())[-2:])),
)
def test_bf16_of_every_method_on_the_example(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Stock transformers computes the packed model's loss from the export, not the original model's."""
    source, text = TINY_MOE, NOVEL
    moepack.compress(source, tmp_path / "packed", method=create(name, **settings))
    export(tmp_path / "packed", tmp_path / "plain")
    stock, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    assert not hasattr(stock.config, "quantization_config")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "plain")
    expected = moepack.evaluate(tmp_path / "packed", text, 6_000, source)
    found = moepack.evaluate(stock, text, 6_000, tokenizer=tokenizer)
    assert expected.kl is not None and expected.kl > 2e-3
    assert found.loss == pytest.approx(expected.loss, abs=1e-2)  # restored weights are rounded to bfloat16

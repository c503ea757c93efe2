"""Quantized source checkpoints: their weights against other decoders, and packing them."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moepack import Checkpoint, CheckpointError, UnsupportedModelError, compress
from moepack.census import architectures
from moepack.census.tiny import tiny_model
from moepack.checkpoint.quantized import QuantizedCheckpoint, open_checkpoint
from moepack.checkpoint.quantized.schemes import METHODS
from moepack.evaluation.streaming import StreamedDecoder
from moepack.format import PackedDirectory
from moepack.integrations.loading import open_model
from moepack.methods.finequant import FineQuant

Tensors = dict[str, torch.Tensor]
BLOCK = [24, 16]
"""Rows and columns that share an fp8 scale; they divide the rows of no matrix."""


def rows_of(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 16, (rows, columns), dtype=torch.int32)


def words(codes: torch.Tensor) -> torch.Tensor:
    """Pack eight 4-bit codes per word, low bits first: [R, C] to [R, C / 8] int32."""
    parts = codes.long().view(len(codes), -1, 8) << torch.arange(0, 32, 4)
    return parts.sum(-1).where(parts.sum(-1) < 1 << 31, parts.sum(-1) - (1 << 32)).to(torch.int32)


def fp8(stem: str, weight: torch.Tensor) -> Tensors:
    rows, columns = ((size + block - 1) // block for size, block in zip(weight.shape, BLOCK, strict=True))
    scales = torch.rand(rows, columns) + 0.5
    return {f"{stem}weight": weight.to(torch.float8_e4m3fn), f"{stem}weight_scale_inv": scales}


def pack_quantized(stem: str, weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    return {
        f"{stem}weight_packed": words(rows_of(rows, columns)),
        f"{stem}weight_scale": torch.rand(rows, columns // 8).bfloat16(),
        f"{stem}weight_shape": torch.tensor([rows, columns]),
    }


def with_zeros(stem: str, weight: torch.Tensor) -> Tensors:
    """Zero points that are packed along the rows, and columns in another order than their groups."""
    rows, columns = weight.shape
    zeros = words(rows_of(columns // 8, rows)).T.contiguous()
    order = torch.arange(columns, dtype=torch.int32).flip(0) // 8
    return pack_quantized(stem, weight) | {f"{stem}weight_zero_point": zeros, f"{stem}weight_g_idx": order}


def float_rows(stem: str, weight: torch.Tensor) -> Tensors:
    scales = (torch.rand(len(weight), 1) + 0.5).bfloat16()
    plain = {f"{stem}weight": weight.to(torch.float8_e4m3fn), f"{stem}weight_scale": scales}
    return plain | {f"{stem}input_scale": torch.ones(1)}


def fp8_one(stem: str, weight: torch.Tensor) -> Tensors:
    return {f"{stem}weight": weight.to(torch.float8_e4m3fn), f"{stem}weight_scale_inv": torch.rand(()) + 0.5}


def of_shape(end: str, shape: Callable[[int, int], tuple[int, ...]]) -> Callable[[str, torch.Tensor], Tensors]:
    """Float8 with a factor of a shape that follows from that of the matrix."""

    def quantize(stem: str, weight: torch.Tensor) -> Tensors:
        scales = torch.rand(shape(*weight.shape)) + 0.5
        more = {f"{stem}input_scale": torch.ones(1), f"{stem}activation_scale": torch.ones(())}
        return {f"{stem}weight": weight.to(torch.float8_e4m3fn), f"{stem}weight{end}": scales, **more}

    return quantize


def gptq(stem: str, weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    return {
        f"{stem}qweight": words(rows_of(rows, columns)).T.contiguous(),
        f"{stem}qzeros": words(rows_of(columns // 16, rows)),
        f"{stem}scales": torch.rand(columns // 16, rows).half(),
        f"{stem}g_idx": torch.arange(columns, dtype=torch.int32).flip(0) // 16,
    }


def awq(stem: str, weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    return {
        f"{stem}qweight": words(rows_of(columns, rows)),
        f"{stem}qzeros": words(rows_of(columns // 16, rows)),
        f"{stem}scales": torch.rand(columns // 16, rows).half(),
    }


SCHEME = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 8, "strategy": "group"}
KINDS: dict[str, tuple[Callable[[str, torch.Tensor], Tensors], dict[str, Any]]] = {
    "fp8": (fp8, {"weight_block_size": BLOCK}),
    "compressed-tensors": (
        pack_quantized,
        {"format": "pack-quantized", "config_groups": {"group_0": {"weights": SCHEME}}},
    ),
    "compressed-tensors with zeros": (
        with_zeros,
        {"format": "pack-quantized", "config_groups": {"group_0": {"weights": SCHEME | {"symmetric": False}}}},
    ),
    "compressed-tensors in fp8": (
        float_rows,
        {
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
        },
    ),
    "fp8 of one scale": (fp8_one, {"weight_block_size": None}),
    "fp8 as vLLM serves it": (of_shape("_scale", lambda *_: (1,)), {"activation_scheme": "static"}),
    "fp8 without settings": (of_shape("_scale", lambda *_: ()), {}),
    "FP8": (of_shape("_scale", lambda *_: ()), {}),
    "fp8 by rows": (of_shape("_scale_inv", lambda rows, _: (rows, 1)), {}),
    "fbgemm_fp8": (of_shape("_scale", lambda rows, _: (rows, 1)), {"activation_scale_ub": 1200.0}),
    "modelopt": (of_shape("_scale", lambda *_: ()), {"quant_algo": "FP8"}),
    "modelopt by rows": (of_shape("_scale", lambda rows, _: (rows,)), {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}),
    "quark": (
        of_shape("_scale", lambda *_: (1,)),
        {"global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}},
    ),
    "gptq": (gptq, {"bits": 4, "group_size": 16}),
    "awq": (awq, {"bits": 4, "group_size": 16, "version": "gemm"}),
}


def write(source: Path, target: Path, tensors: Tensors, settings: dict[str, Any] | None) -> Path:
    target.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config |= {} if settings is None else {"quantization_config": settings}
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sources") / "plain"
    tiny_model("qwen3_moe").to(torch.bfloat16).save_pretrained(path)
    return path


def quantized(plain: Path, target: Path, method: str) -> Path:
    """The plain checkpoint with the experts of its last layer and all attention quantized; other layers stay plain."""
    torch.manual_seed(0)
    quantize, settings = KINDS[method]
    tensors: Tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        chosen = "_proj.weight" in name and ("self_attn" in name or "layers.1" in name)
        tensors |= quantize(name.removesuffix("weight"), tensor) if chosen else {name: tensor}
    return write(plain, target, tensors, {"quant_method": method.partition(" ")[0], **settings})


def packed(directory: Path) -> dict[str, bytes]:
    opened = PackedDirectory.open(directory)
    return {name: bytes(opened.tensor(name)) for name in opened.manifest.packed()}


@pytest.mark.parametrize("method", KINDS)
def test_packed_values_equal_those_of_the_codes(method: str, plain: Path, tmp_path: Path) -> None:
    source = open_checkpoint(quantized(plain, tmp_path / "codes", method))
    assert isinstance(source, QuantizedCheckpoint)
    assert set(source.names()) == set(Checkpoint.open(plain).names())
    decoded = write(plain, tmp_path / "decoded", {name: source.tensor(name) for name in source.names()}, None)
    sizes: list[tuple[int, int]] = []
    for name, directory in (("a", tmp_path / "codes"), ("b", decoded)):
        report = compress(directory, tmp_path / name, method=FineQuant(bits=4, dense_bits=4))
        assert any("already quantized" in note for note in report.notes) == (name == "a")
        sizes.append((report.source_bytes, report.expert_source_bytes))
    assert all(small < large for small, large in zip(*sizes, strict=True))  # as stored, not as decoded
    assert packed(tmp_path / "a") == packed(tmp_path / "b")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "moepack"


def pair(method: str, plain: Path, folder: Path) -> tuple[Checkpoint, QuantizedCheckpoint, str]:
    """The codes, the weights, and the prefix of a weight's names."""
    directory = quantized(plain, folder / "codes", method)
    source = open_checkpoint(directory)
    assert isinstance(source, QuantizedCheckpoint)
    return Checkpoint.open(directory), source, "model.layers.1.mlp.experts.2.up_proj."


def test_fp8_equals_transformers_bit_for_bit(plain: Path, tmp_path: Path) -> None:
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight = torch.randn(48, 32).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2)
    expected = finegrained.Fp8Dequantize(None)._dequantize_one(weight, scales, torch.bfloat16)
    tensors = {"x.weight": weight, "x.weight_scale_inv": scales}
    source = open_checkpoint(write(plain, tmp_path / "x", tensors, {"quant_method": "fp8", "weight_block_size": BLOCK}))
    assert torch.equal(source.tensor("x.weight"), expected)


@pytest.mark.parametrize("end", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1, 1), (3, 6, 1), (3, 6), (3, 1, 4), "blocks"])
def test_stacked_experts_in_fp8(shape: Any, end: str, plain: Path, tmp_path: Path) -> None:
    """Llama 4 and transformers' own experts: one tensor for all experts, with factors named after it."""
    blocks = [4, 2] if shape == "blocks" else None
    weight, scales = torch.randn(3, 6, 4).to(torch.float8_e4m3fn), torch.rand((3, 2, 2) if blocks else shape) + 0.5
    tensors = {"x.gate_up_proj": weight, f"x.gate_up_proj{end}": scales}
    path = write(plain, tmp_path / "x", tensors, {"quant_method": "fp8", "weight_block_size": blocks})
    source = open_checkpoint(path)
    wide = scales.repeat_interleave(4, 1)[:, :6].repeat_interleave(2, 2) if blocks else scales
    factors = wide if wide.ndim in (0, 3) or wide.numel() == 1 else wide.reshape(3, -1, 1)
    expected = (weight.float() * factors).bfloat16()
    assert source.names() == ("x.gate_up_proj",) and torch.equal(source.tensor("x.gate_up_proj"), expected)
    assert all(torch.equal(source.part("x.gate_up_proj", expert), expected[expert]) for expert in range(3))


def test_mxfp4_equals_transformers_bit_for_bit(plain: Path, tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (3, 6, 2, 16), dtype=torch.uint8)
    scales = torch.randint(118, 134, (3, 6, 2), dtype=torch.uint8)
    tensors = {"x.up_blocks": blocks, "x.up_scales": scales, "y": torch.ones(2)}
    source = open_checkpoint(write(plain, tmp_path / "x", tensors, {"quant_method": "mxfp4"}))
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert source.names() and torch.equal(source.tensor("x.up"), expected)
    assert torch.equal(source.part("x.up", 1), expected[1]) and torch.equal(source.tensor("y"), torch.ones(2))


def test_int4_equals_compressed_tensors(plain: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes, source, stem = pair("compressed-tensors", plain, tmp_path)
    words_, scales = (codes.tensor(f"{stem}{end}") for end in ("weight_packed", "weight_scale"))
    values = library.unpack_from_int32(words_, 4, torch.Size(codes.tensor(f"{stem}weight_shape").tolist()))
    assert torch.equal(source.tensor(f"{stem}weight"), values.bfloat16() * scales.repeat_interleave(8, 1))


def test_zero_points_beside_compressed_tensors(plain: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base").PackedQuantizationCompressor
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = SCHEME | {"symmetric": False, "group_size": 16}
    args = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**scheme))
    state = {
        "weight": torch.randn(20, 48),
        "weight_scale": torch.rand(20, 3) / 4,
        "weight_zero_point": torch.randint(-8, 8, (20, 3), dtype=torch.int8),
    }
    stored = library.compress(state, args)
    tensors = {f"x.{name}": torch.as_tensor(value) for name, value in stored.items()}
    settings = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": scheme}}}
    path = write(plain, tmp_path / "x", tensors, {"quant_method": "compressed-tensors", **settings})
    expected = library.decompress(stored, args)["weight"]
    assert torch.equal(open_checkpoint(path).tensor("x.weight"), expected.bfloat16())


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors with zeros"])
def test_a_quantized_original_is_loaded_like_it_is_packed(method: str, plain: Path, tmp_path: Path) -> None:
    """`eval`, `tune`, `compare` and importances read originals through `open_model`."""
    directory = quantized(plain, tmp_path / "codes", method)
    source = open_checkpoint(directory)
    decoded = write(plain, tmp_path / "decoded", {name: source.tensor(name) for name in source.names()}, None)
    ids = torch.arange(3, 19)[None]
    with torch.inference_mode():
        found, expected = (open_model(path, torch.float32)(input_ids=ids).logits for path in (directory, decoded))
    assert torch.equal(found, expected)
    twins = [
        StreamedDecoder(open_checkpoint(path), ids.repeat(2, 1), torch.float32, tmp_path / path.name)
        for path in (directory, decoded)
    ]
    assert torch.equal(*(next(twin.logits(lambda *_: None)) for twin in twins))


def test_codes_are_not_made_longer(plain: Path, tmp_path: Path) -> None:
    directory = quantized(plain, tmp_path / "codes", "gptq")
    for name, bits in (("up", 8), ("stays", 4)):
        refused = pytest.raises(UnsupportedModelError, match=r"source has \S+ bits .*gptq.* request fewer bits")
        with refused if bits == 8 else nullcontext():
            compress(directory, tmp_path / name, method=FineQuant(bits=bits))
    stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    with pytest.raises(ValueError, match="already take only"):
        compress(directory, tmp_path / "auto", size=stored)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_int4_of_gptq_and_awq_value_by_value(method: str, plain: Path, tmp_path: Path) -> None:
    codes, source, stem = pair(method, plain, tmp_path)
    found = source.tensor(f"{stem}weight")
    words_, zeros, scales = (codes.tensor(f"{stem}{end}") for end in ("qweight", "qzeros", "scales"))
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    for row in range(found.shape[0]):
        for column in range(found.shape[1]):
            if method == "gptq":
                group = int(codes.tensor(f"{stem}g_idx")[column])
                code = int(words_[column // 8, row]) >> 4 * (column % 8) & 15
                zero = (int(zeros[group, row // 8]) >> 4 * (row % 8) & 15) + 1
            else:
                group, shift = column // 16, 4 * order[row % 8]
                code = int(words_[column, row // 8]) >> shift & 15
                zero = int(zeros[group, row // 8]) >> shift & 15
            assert found[row, column] == ((code - zero) * scales[group, row].float()).half()


def test_gpt_oss_in_its_published_form(tmp_path: Path) -> None:
    """Transposed and interleaved experts in mxfp4, packed without decoding more than an expert at a time."""
    if not any("gpt_oss" in types for types in architectures()):
        pytest.skip("this version of transformers does not have it")
    tiny_model("gpt_oss").to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    torch.manual_seed(0)
    tensors: Tensors = {}
    for name, tensor in load_file(tmp_path / "plain" / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensor.shape
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(120, 126, (experts, rows, columns // 32), dtype=torch.uint8)
        else:
            tensors[name] = tensor
    source = open_checkpoint(write(tmp_path / "plain", tmp_path / "codes", tensors, {"quant_method": "mxfp4"}))
    decoded = {name: source.tensor(name) for name in source.names()}
    write(tmp_path / "plain", tmp_path / "decoded", decoded, None)
    for name in ("codes", "decoded"):
        compress(tmp_path / name, tmp_path / f"{name}-packed", method=FineQuant(bits=4))
    assert packed(tmp_path / "codes-packed") == packed(tmp_path / "decoded-packed")


# ---- rejections


def changed(plain: Path, folder: Path, change: Callable[[Tensors], None]) -> Path:
    directory = quantized(plain, folder / "codes", "fp8")
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


NAME = "model.layers.1.mlp.experts.2.up_proj.weight"


def test_scales_that_are_missing(plain: Path, tmp_path: Path) -> None:
    directory = changed(plain, tmp_path, lambda tensors: tensors.__delitem__(f"{NAME}_scale_inv"))
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.weight': has codes but no .*weight_scale_inv"):
        open_checkpoint(directory)


def test_scales_of_another_shape(plain: Path, tmp_path: Path) -> None:
    directory = changed(plain, tmp_path, lambda tensors: tensors.update({f"{NAME}_scale_inv": torch.ones(1, 1)}))
    with pytest.raises(CheckpointError, match=r"do not match: weight \[32, 32\], weight_scale_inv \[1, 1\]"):
        open_checkpoint(directory)


def test_scales_without_codes(plain: Path, tmp_path: Path) -> None:
    directory = changed(plain, tmp_path, lambda tensors: tensors.update({NAME: torch.ones(32, 32).bfloat16()}))
    with pytest.raises(CheckpointError, match="belongs to no tensor of codes"):
        open_checkpoint(directory)


@pytest.mark.parametrize("method", [*METHODS, "hqq", "made_up"])
@pytest.mark.parametrize(
    "settings", [{}, {"bits": 5}, {"format": "none", "config_groups": {}}, {"quant_algo": "NVFP4"}]
)
def test_no_refusal_contradicts_itself(method: str, settings: dict[str, Any], plain: Path, tmp_path: Path) -> None:
    """The list of supported methods never contains the rejected one. A rejected form of a supported method has a
    reason."""
    tensors = load_file(plain / "model.safetensors")
    directory = write(plain, tmp_path / "x", tensors, {"quant_method": method, **settings})
    with pytest.raises(UnsupportedModelError) as caught:
        open_checkpoint(directory)
    before, _, known = str(caught.value).partition("moepack decodes ")
    assert f"'{method}'" in before and (method in METHODS) is not bool(known)
    assert method not in known.partition(":")[0].split(", ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "made_up"}, "'made_up'"),
        ({"quant_method": "gptq", "bits": 3}, "'gptq' with settings .* .3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}}, "format 'marlin-24'"),
        ({"quant_method": "fp8"}, "already quantized by 'fp8', but none of the tensors is in float8_e4m3fn"),
        ({"quant_method": "gptq", "bits": 4}, r"by 'gptq', but none of the tensors is called \*qweight"),
        ({"quant_method": "gptq"}, "'gptq' with settings .* .None bits; only 2, 4 and 8 are supported"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'; only FP8, "),
        ({"quant_method": "quark"}, "weights of dtype None and qscheme None"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "no setting 'config_groups'"),
        ({"quant_method": ["fp8"]}, "already quantized"),
    ],
)
def test_quantizations_that_are_not_known(settings: dict[str, Any], message: str, plain: Path, tmp_path: Path) -> None:
    directory = write(plain, tmp_path / "x", load_file(plain / "model.safetensors"), settings)
    with pytest.raises(UnsupportedModelError, match=message):
        compress(directory, tmp_path / "out", method=FineQuant(bits=8))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int8])
def test_codes_of_another_type_are_rejected(dtype: torch.dtype, plain: Path, tmp_path: Path) -> None:
    """The message never advises to remove a correct setting."""
    tensors = load_file(plain / "model.safetensors")
    tensors |= {name: weight.to(dtype) for name, weight in tensors.items() if name.endswith("q_proj.weight")}
    directory = write(plain, tmp_path / "x", tensors, {"quant_method": "fp8"})
    with pytest.raises(UnsupportedModelError, match=rf"q_proj\.weight is in {str(dtype)[6:]}, which") as caught:
        open_checkpoint(directory)
    assert "remove quantization_config" not in str(caught.value)

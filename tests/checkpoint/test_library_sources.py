"""Quantized checkpoints that other libraries made: the decoded weights against those libraries' own decoding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from golden.make_bitsandbytes import FILE, stored
from golden.make_modelopt import FILE as MODELOPT
from moepack import CheckpointError, UnsupportedModelError
from moepack.checkpoint import Checkpoint
from moepack.checkpoint.quantized import open_checkpoint

Tensors = dict[str, torch.Tensor]


def write(folder: Path, tensors: Tensors, settings: dict[str, Any] | None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {"model_type": "qwen3_moe"} | ({} if settings is None else {"quantization_config": settings})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def of(name: str, tensors: Tensors) -> Tensors:
    return {key.replace(name, "x", 1): value for key, value in tensors.items() if key.startswith(f"{name}.")}


# ---- compressed-tensors

WEIGHTS: dict[str, dict[str, Any]] = {
    "int-quantized of rows": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "int-quantized of a tensor": {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True},
    "int-quantized with zeros": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    "int-quantized of groups": {
        "num_bits": 8, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True
    },
    "float-quantized of rows": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    "float-quantized of a tensor": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    "nvfp4-pack-quantized": {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True
    },
    "mxfp4-pack-quantized": {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
        "scale_dtype": "torch.uint8",
    },
    "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
    "pack-quantized of 8 bits": {
        "num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False
    },
}  # fmt: skip


def state(scheme: dict[str, Any], weight: torch.Tensor) -> Tensors:
    """A weight with scales and zero points in the shapes that the strategy asks for."""
    rows, columns = weight.shape
    groups = columns // scheme.get("group_size", columns)
    shape = (1,) if scheme["strategy"] == "tensor" else (rows, groups)
    found = {"weight": weight, "weight_scale": torch.rand(shape) / 50 + 0.01}
    if scheme["strategy"] == "tensor_group":
        found |= {"weight_scale": torch.rand(shape) * 100 + 20, "weight_global_scale": torch.tensor([300.0])}
    if scheme.get("scale_dtype"):
        found["weight_scale"] = torch.exp2(torch.randint(-4, 1, shape).float())
    if not scheme["symmetric"]:
        found["weight_zero_point"] = torch.randint(-8, 8, shape, dtype=torch.int8)
    return found


def compressed(scheme: dict[str, Any], form: str) -> tuple[Tensors, torch.Tensor, dict[str, Any]]:
    """The stored tensors of a weight, the library's decoding, and the settings in config.json."""
    base = pytest.importorskip("compressed_tensors.compressors.base").BaseCompressor
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = {**scheme, "scale_dtype": getattr(torch, scheme.get("scale_dtype", "").partition(".")[2] or "Size", None)}
    if not isinstance(scheme["scale_dtype"], torch.dtype):
        del scheme["scale_dtype"]
    args = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**scheme))
    library = base.get_value_from_registry(form)
    torch.manual_seed(0)
    made = library.compress(state(scheme, torch.randn(24, 64)), args)
    tensors = {f"x.{name}": torch.as_tensor(value) for name, value in made.items()}
    settings = {"quant_method": "compressed-tensors", "format": form}
    plain = {key: value for key, value in scheme.items() if key != "scale_dtype"}
    expected = library.decompress(dict(made), args)["weight"].float()
    return tensors, expected, {**settings, "config_groups": {"group_0": {"weights": plain}}}


@pytest.mark.parametrize("case", WEIGHTS)
def test_a_weight_of_compressed_tensors(case: str, tmp_path: Path) -> None:
    tensors, expected, settings = compressed(WEIGHTS[case], case.partition(" ")[0])
    source = open_checkpoint(write(tmp_path / "x", tensors, settings))
    assert source.names() == ("x.weight",)
    found = source.tensor("x.weight")
    assert found.shape == (24, 64) and found.dtype == torch.bfloat16
    assert torch.equal(found, expected.bfloat16())


def test_several_formats_in_one_checkpoint(tmp_path: Path) -> None:
    tensors: Tensors = {}
    expected: Tensors = {}
    groups: dict[str, Any] = {}
    for number, case in enumerate(("nvfp4-pack-quantized", "float-quantized of rows", "int-quantized of rows")):
        form = case.partition(" ")[0]
        made, expected[f"m{number}.weight"], settings = compressed(WEIGHTS[case], form)
        tensors |= {name.replace("x.", f"m{number}."): value for name, value in made.items()}
        groups[f"group_{number}"] = {**settings["config_groups"]["group_0"], "format": form}
    settings = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    source = open_checkpoint(write(tmp_path / "x", tensors, settings))
    assert set(source.names()) == set(expected)
    for name, values in expected.items():
        assert torch.equal(source.tensor(name), values.bfloat16()), name


# ---- ModelOpt

NVFP4 = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}


def modelopt() -> tuple[Tensors, torch.Tensor]:
    """A weight in ModelOpt's NVFP4 with scales of keys and values, and the library's decoding."""
    tensors = load_file(MODELOPT)
    scales = {"k_proj.k_scale": torch.tensor(1.0), "v_proj.v_scale": torch.tensor(1.0)}
    return of("x", tensors) | scales, tensors["expected"].float()


@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json"])
def test_nvfp4_of_modelopt(place: str, tmp_path: Path) -> None:
    tensors, expected = modelopt()
    settings = {"quant_method": "modelopt", **NVFP4} if place == "config.json" else None
    path = write(tmp_path / "x", tensors, settings)
    if settings is None:
        (path / place).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": NVFP4}))
    source = open_checkpoint(path)
    assert source.names() == ("x.weight",)
    assert torch.allclose(source.tensor("x.weight").float(), expected, rtol=2**-8, atol=0)


def test_mixed_precision_of_modelopt(tmp_path: Path) -> None:
    tensors, expected = modelopt()
    eight = torch.randn(6, 4).to(torch.float8_e4m3fn)
    tensors |= {"y.weight": eight, "y.weight_scale": torch.tensor(0.5)}
    layers = {"x": {"quant_algo": "NVFP4", "group_size": 16}, "y": {"quant_algo": "FP8"}}
    settings = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    source = open_checkpoint(write(tmp_path / "x", tensors, settings))
    assert set(source.names()) == {"x.weight", "y.weight"}
    assert torch.allclose(source.tensor("x.weight").float(), expected, rtol=2**-8, atol=0)
    assert torch.equal(source.tensor("y.weight"), (eight.float() / 2).bfloat16())


# ---- bitsandbytes


@pytest.mark.parametrize("made", ["golden", "installed"])
@pytest.mark.parametrize("name", ["nf4", "nf4_nested", "fp4", "fp4_nested", "int8"])
def test_a_weight_of_bitsandbytes(name: str, made: str, tmp_path: Path) -> None:
    if made == "installed":
        pytest.importorskip("bitsandbytes")
    tensors = load_file(FILE) if made == "golden" else stored()
    settings = {"load_in_8bit": name == "int8", "bnb_4bit_quant_type": name.partition("_")[0]}
    path = write(tmp_path / "x", of(name, tensors), {"quant_method": "bitsandbytes", **settings})
    source = open_checkpoint(path)
    assert source.names() == ("x.weight",)
    found, expected = source.tensor("x.weight"), tensors[f"expected.{name}"]
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected.bfloat16())


# ---- gptq


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_of_any_width(bits: int, version: str, tmp_path: Path) -> None:
    """Codes are packed by whole numbers of Python, one shift at a time."""
    torch.manual_seed(bits)
    rows, columns, group, most = 32, 64, 16, (1 << bits) - 1
    codes, order = torch.randint(0, most + 1, (columns, rows)), torch.arange(columns).flip(0) // group
    zeros, scales = torch.randint(1, most + 1, (columns // group, rows)), torch.rand(columns // group, rows).half()

    def packed(values: torch.Tensor) -> torch.Tensor:
        width = 32 // bits
        lines = [
            [sum(v << bits * i for i, v in enumerate(line[at : at + width])) for at in range(0, len(line), width)]
            for line in values.tolist()
        ]
        return torch.tensor(lines).where(torch.tensor(lines) < 1 << 31, torch.tensor(lines) - (1 << 32)).int()

    tensors = {
        "x.qweight": packed(codes.T).T,
        "x.qzeros": packed(zeros - int(version == "gptq")),
        "x.scales": scales,
        "x.g_idx": order.int(),
    }
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": version}
    source = open_checkpoint(write(tmp_path / "x", tensors, settings))
    expected = ((codes - zeros[order]).float() * scales.float()[order]).T.half()
    assert torch.equal(source.tensor("x.weight"), expected)


# ---- faults

FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("int-quantized of groups", {"x.weight_scale": torch.ones(24, 3)}),
    "int8 zeros": ("int-quantized with zeros", {"x.weight_zero_point": torch.ones(23, 1)}),
    "int8 of three axes": ("int-quantized of rows", {"x.weight": torch.ones(2, 2, 2, dtype=torch.int8)}),
    "nvfp4": ("nvfp4-pack-quantized", {"x.weight_scale": torch.ones(24, 5)}),
    "nvfp4 of a row": ("nvfp4-pack-quantized", {"x.weight_packed": torch.ones(24, dtype=torch.uint8)}),
    "nvfp4 whole": ("nvfp4-pack-quantized", {"x.weight_global_scale": torch.ones(2)}),
    "mxfp4": ("mxfp4-pack-quantized", {"x.weight_scale": torch.ones(24, 4, dtype=torch.uint8)}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_shapes_that_do_not_match(fault: str, tmp_path: Path) -> None:
    case, change = FAULTS[fault]
    tensors, _, settings = compressed(WEIGHTS[case], case.partition(" ")[0])
    with pytest.raises(CheckpointError, match=r"safetensors: tensor 'x\.weight.*': the shapes .* do not match"):
        open_checkpoint(write(tmp_path / "x", tensors | change, settings))


@pytest.mark.parametrize("end", ["weight_scale", "weight_global_scale"])
def test_a_scale_that_is_missing(end: str, tmp_path: Path) -> None:
    tensors, _, settings = compressed(WEIGHTS["nvfp4-pack-quantized"], "nvfp4-pack-quantized")
    del tensors[f"x.{end}"]
    with pytest.raises(CheckpointError, match=rf"'x\.weight_packed': has codes but no x\.{end}"):
        open_checkpoint(write(tmp_path / "x", tensors, settings))


BROKEN_STATES = {
    "not json": b"\xff{",
    "not an object": b"[]",
    "no shape": b'{"dtype": "bfloat16", "blocksize": 64}',
    "negative": b'{"dtype": "bfloat16", "blocksize": 64, "shape": [-48, -40]}',
    "another shape": b'{"dtype": "bfloat16", "blocksize": 64, "shape": [48, 41]}',
    "a huge shape": b'{"dtype": "bfloat16", "blocksize": 64, "shape": [1099511627775, 1099511627775]}',
    "no block size": b'{"dtype": "bfloat16", "shape": [48, 40]}',
    "a text": b'{"dtype": "bfloat16", "blocksize": "64", "shape": [48, 40]}',
    "another dtype": b'{"dtype": "int3", "blocksize": 64, "shape": [48, 40]}',
    "a list of dtypes": b'{"dtype": ["bfloat16"], "blocksize": 64, "shape": [48, 40]}',
    "shape is a number": b'{"dtype": "bfloat16", "blocksize": 64, "shape": 48}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("case", BROKEN_STATES)
def test_damaged_states_of_bitsandbytes(case: str, tmp_path: Path) -> None:
    tensors = of("nf4", load_file(FILE))
    tensors["x.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(BROKEN_STATES[case]), dtype=torch.uint8)
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    with pytest.raises(CheckpointError, match=r"safetensors: tensor 'x\.weight"):
        open_checkpoint(write(tmp_path / "x", tensors, settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type 'nf3'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        ({"quant_method": "modelopt"}, "quant_algo None"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": [1]}, "compressed-tensors"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "8-bit numbers of type 'float' in groups of nvfp4-pack-quantized",
        ),
    ],
)
def test_forms_that_are_not_read(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(write(tmp_path / "x", {"x.weight": torch.ones(4, 4)}, settings))


def test_stored_bits_count_scales(tmp_path: Path) -> None:
    tensors = of("nf4_nested", load_file(FILE))
    settings = {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}
    path = write(tmp_path / "x", tensors, settings)
    source, plain = open_checkpoint(path), Checkpoint.open(path)
    assert source.stored == plain.stored and source.stored_bits(["x.weight"]) == 8 * plain.stored / (48 * 40)

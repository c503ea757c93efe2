"""Quantizers of other packages, applied to a Llama checkpoint.

Each function quantizes the linear layers of a checkpoint with one package and its defaults, on given calibration
tokens, and returns the weights that the package's own runtime would use. Packages are imported lazily, because no
environment has all of them. `ggml_quantizer.py` has llama.cpp.

Sizes include everything that a reader of the codes needs: the codes at their nominal width, a scale and a zero per
group at the package's stored width, and a group index per column if columns are reordered."""

from __future__ import annotations

import importlib.metadata
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moepack as package
from benches.tools.ggml_quantizer import llama_cpp
from benches.tools.quantized import Quantized, linear_layers, opened


def changed(before: Path, after: Any, bits: Callable[[Tensor], float]) -> Quantized:
    """The weights in which a model differs from its checkpoint: projections of a size in bits, and norms in 16 bits."""
    originals, found = opened(before, torch.float32, "cpu").state_dict(), Quantized()
    for name, tensor in after.state_dict().items():
        mine = tensor.detach().float().cpu()
        if name in originals and not torch.equal(mine, originals[name]):
            found.put(name, mine, bits(mine) if name.endswith("_proj.weight") else 16 * mine.numel())
    return found


def grouped_bits(shape: torch.Size, bits: int, group: int, scale: int, zero: int) -> float:
    """Bits per weight of codes in groups along rows; each group has a scale and a zero of the given bits."""
    rows, columns = shape
    return float(rows * columns * bits + rows * math.ceil(columns / group) * (scale + zero))


def hqq(model: Path, ids: Tensor, device: str, bits: int, group: int, axis: int = 1) -> Quantized:
    """HQQ: half-quadratic zeros, without calibration. Scales and zeros are float16."""
    from hqq.core.quantize import HQQLinear, hqq_base_quant_config

    found = Quantized()
    config = hqq_base_quant_config(nbits=bits, group_size=group, axis=axis)
    for name, layer in linear_layers(opened(model, torch.float16, device)):
        count, shape = layer.weight.numel(), layer.weight.shape
        made = HQQLinear(layer, config, compute_dtype=torch.float16, device=device)
        found.put(f"{name}.weight", made.dequantize().view(shape), count * (bits + 32 / group))
    return found


def gptqmodel(
    model: Path, ids: Tensor, device: str, bits: int, group: int, symmetric: bool = True, ordered: bool = False
) -> Quantized:
    """GPTQModel's GPTQ. Its portable kernel decodes the result."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # with fewer it does not load a model
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=bits, group_size=group, sym=symmetric, desc_act=ordered)
    samples = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    with tempfile.TemporaryDirectory() as folder:
        made = GPTQModel.load(str(model), config, device=device)
        made.quantize(samples, batch_size=8)
        made.save(folder)
        del made
        packed = GPTQModel.load(folder, backend=BACKEND.TORCH, device=device).model
    found = Quantized()
    for name, layer in linear_layers(packed):
        weight = layer.dequantize_weight().T
        index = 32 * weight.shape[1] if ordered else 0
        size = grouped_bits(weight.shape, bits, group, 16, 0 if symmetric else bits)
        found.put(f"{name}.weight", weight, size + index)
    return found


def auto_round(
    model: Path, ids: Tensor, device: str, bits: int, group: int, symmetric: bool = True, iterations: int = 200
) -> Quantized:
    """Intel's AutoRound. Scales are float16; zeros have as many bits as codes."""
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    loaded = opened(model, torch.float32, device)
    made = AutoRound(
        loaded, tokenizer=AutoTokenizer.from_pretrained(model), bits=bits, group_size=group, sym=symmetric,
        iters=iterations, nsamples=len(ids), seqlen=ids.shape[1], batch_size=8, dataset=[row[None] for row in ids],
        device_map=device, enable_torch_compile=False,
    )  # fmt: skip
    after, _ = made.quantize()
    return changed(model, after, lambda each: grouped_bits(each.shape, bits, group, 16, 0 if symmetric else bits))


def llm_compressor(
    model: Path, ids: Tensor, device: str, bits: int, group: int, symmetric: bool = True, awq: bool = False
) -> Quantized:
    """llm-compressor's GPTQ or AWQ. Scales are bfloat16; zeros are counted with as many bits as codes."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.modifiers.gptq import GPTQModifier

    settings = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=settings)
    recipe = (AWQModifier if awq else GPTQModifier)(config_groups={"group_0": scheme}, ignore=["lm_head"])
    loaded = opened(model, torch.bfloat16, device)
    samples = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in ids]
    oneshot(
        model=loaded, dataset=Dataset.from_list(samples), recipe=recipe, num_calibration_samples=len(ids),
        max_seq_length=ids.shape[1],
    )  # fmt: skip
    for _, layer in linear_layers(loaded):
        zero = getattr(layer, "weight_zero_point", None)
        layer.weight.data = fake_quantize(layer.weight.data.float(), layer.weight_scale.float(), zero, settings)
    return changed(model, loaded, lambda each: grouped_bits(each.shape, bits, group, 16, 0 if symmetric else bits))


def moepack(model: Path, ids: Tensor, device: str, bits: float, text: bool = True) -> Quantized:
    """moepack's `auto --prefer quality` at a total size, on a checkpoint with experts."""
    from benches.tools.dequantized import Dequantized
    from moepack.format import PackedDirectory
    from moepack.integrations.loading import open_tokenizer
    from moepack.methods import Auto

    found = Quantized()
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "text.txt", Path(folder) / "packed"
        source.write_text(open_tokenizer(model).decode(ids.flatten()), encoding="utf-8")
        given = {"calibration": str(source), "samples": len(ids), "sequence_length": ids.shape[1]}
        given = given if text else {"calibration": "none"}
        package.compress(model, out, method=Auto(bits_per_weight=bits, prefer="quality", device=device, **given))
        for name, record in PackedDirectory.open(out).manifest.packed().items():
            found.sizes[name] = 8.0 * record.nbytes, math.prod(record.shape)
        originals = opened(model, torch.float32, "cpu").state_dict()
        for name, tensor in Dequantized(model, "cpu").packed(out).state_dict().items():
            if name != "lm_head.weight" and not torch.equal(tensor, originals[name]):
                found.weights[name] = tensor
    return found


QUANTIZERS: dict[str, tuple[str, Callable[..., Quantized]]] = {
    "hqq": ("hqq", hqq),
    "gptqmodel": ("gptqmodel", gptqmodel),
    "auto-round": ("auto-round", auto_round),
    "llm-compressor": ("llmcompressor", llm_compressor),
    "llama.cpp": ("llama-cpp-python", llama_cpp),
    "moepack": ("moepack", moepack),
}
"""The distribution and the function of each peer."""


def version(distribution: str) -> str | None:
    """The installed version; None if the distribution is absent. This package may run from its source."""
    if distribution == "moepack":
        return package.__version__
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None

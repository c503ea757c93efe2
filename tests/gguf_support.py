"""Writes GGUF files of tiny models with the gguf package, in the layout of llama.cpp's converter."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from moepack.export.gguf.architectures import MODELS
from moepack.export.gguf.vocabulary import Vocabulary
from moepack.format.regular import read_json
from tiny_models import write_tokenizer

Named = dict[str, torch.Tensor]
Encode = Callable[[str, torch.Tensor], tuple[np.ndarray, Any]]
"""A function from a tensor's name and float32 values to its bytes and its type (None: as the array's dtype)."""

_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def write_merged_tokenizer(directory: Path) -> None:
    """Write a tokenizer of single bytes and two merges."""
    write_tokenizer(directory)
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] |= {"th": 285, "the": 286}
    content["model"]["merges"] = [["t", "h"], ["th", "e"]]
    file.write_text(json.dumps(content))


def as_float32(name: str, values: torch.Tensor) -> tuple[np.ndarray, Any]:
    """Keep a tensor in float32."""
    return values.float().numpy(), None


def quantized(kind: str) -> Encode:
    """Matrices whose rows fill blocks as a type of the gguf package, others in float32."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]

    def encode(name: str, values: torch.Tensor) -> tuple[np.ndarray, Any]:
        block = gguf.GGML_QUANT_SIZES[number][0]
        if values.ndim < 2 or values.shape[-1] % block or "_inp" in name or "norm" in name:
            return as_float32(name, values)
        return gguf.quantize(values.float().contiguous().numpy(), number), number

    return encode


def converted(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint under llama.cpp's names, as its converter writes them."""
    import gguf

    config = read_json(directory / "config.json", ValueError)  # type: ignore[arg-type]
    model = MODELS[config["model_type"]]
    rename, stacks = model.names(gguf, config), {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if match := _EXPERT.fullmatch(name):
            stacks.setdefault((match[1], _PARTS[match[3]]), {})[int(match[2])] = tensor
            continue
        renamed = rename(name)
        if tensor.ndim == 1 or "ffn_gate_inp" in renamed:
            yield renamed, tensor.reshape(-1) if tensor.shape[0] == 1 else tensor
            continue
        for piece in model.pieces(renamed, tensor.shape[0], config):
            rows = tensor if piece.order is None else tensor[torch.from_numpy(piece.order)]
            yield piece.name, rows.mT.contiguous() if piece.transposed else rows
    for (layer, part), experts in stacks.items():
        yield f"blk.{layer}.ffn_{part}_exps.weight", torch.stack([experts[i] for i in range(len(experts))])


def write_gguf(directory: Path, file: Path, encode: Encode = as_float32, **options: Any) -> Path:
    """Write a checkpoint of one of the architectures that GGUF export supports as a GGUF file.

    Args:
        directory: the checkpoint, with a tokenizer or without.
        file: the file to write.
        encode: how tensors are stored.
        options: arguments of `gguf.GGUFWriter`, such as `split_max_tensors`.
    """
    import gguf

    config = read_json(directory / "config.json", ValueError)  # type: ignore[arg-type]
    model = MODELS[config["model_type"]]
    writer = gguf.GGUFWriter(file, model.name, **options)
    model.write(gguf, writer, config)
    if (directory / "tokenizer.json").exists():
        Vocabulary(directory, config["vocab_size"]).write(gguf, writer)
    for name, tensor in converted(directory):
        data, kind = encode(name, tensor)
        writer.add_tensor(name, data, raw_dtype=kind)
    finish(writer)
    return file


def finish(writer: Any) -> None:
    """Write the collected entries and tensors."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

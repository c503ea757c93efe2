"""Symmetric group-wise integers in llama.cpp's blocks: four bits as Q4_0, eight bits as Q8_0.

Both hold 32 columns a block with one f16 scale, `d * (q - 8)` and `d * q`; a group of 64 becomes two blocks with the
same scale, so every value stays what it was. Refused are other bits, offsets, groups of 16, rows that 32 does not
divide, and bfloat16 scales that f16 cannot hold.

The file holds the tensors and the configuration under the hub's names, experts stacked as `[experts, rows, columns]`.
It is a container for tools that read GGUF: no tokenizer, and none of the renaming and reordering that llama.cpp's own
converter does for each architecture.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moepack.errors import LoadError, UnsupportedModelError
from moepack.export.directory import dense_entries
from moepack.format.atomic import disk_errors
from moepack.format.directory import PackedDirectory
from moepack.format.shard import Entry
from moepack.groupwise import GroupwiseTensor

__all__ = ["export_gguf", "q4_0_blocks", "q8_0_blocks"]

BLOCK = 32
_BLOCK_BYTES = {4: 18, 8: 34}


def export_gguf(directory: Path, out: Path) -> int:
    """Write one GGUF file; arguments and errors as for `export`.

    Raises:
        LoadError: the package `gguf` is not installed (`pip install moepack[export]`).
    """
    try:
        import gguf
    except ImportError as error:
        raise LoadError("the package gguf is needed: pip install 'moepack[export]'") from error
    source = PackedDirectory.open(directory)
    tensors = {name: _checked(source, name) for name in source.manifest.packed()}
    partial = out.with_name(f".{out.name}.moepack-tmp")
    try:
        with disk_errors(out):
            _write(gguf, gguf.GGUFWriter(partial, source.manifest.architecture), source, tensors)
            os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return out.stat().st_size


def _write(gguf: Any, writer: Any, source: PackedDirectory, tensors: dict[str, GroupwiseTensor]) -> None:
    """Announce all tensors, then write them one by one."""
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    writer.add_string("moepack.config", json.dumps(config, sort_keys=True))
    kinds = {4: gguf.GGMLQuantizationType.Q4_0, 8: gguf.GGMLQuantizationType.Q8_0}
    for name, tensor in tensors.items():
        shape = (*tensor.shape[:-1], tensor.shape[-1] // BLOCK * _BLOCK_BYTES[tensor.bits])
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), kinds[tensor.bits])
    dense = [entry for entries in dense_entries(source) for entry in entries]
    for entry in dense:
        _dense_info(writer, gguf, entry)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors.values():
        writer.write_tensor_data(_blocks(tensor))
    for entry in dense:
        writer.write_tensor_data(np.frombuffer(entry.data(), np.uint8))
    writer.close()


def _dense_info(writer: Any, gguf: Any, entry: Entry) -> None:
    kinds = {
        "F32": gguf.GGMLQuantizationType.F32,
        "F16": gguf.GGMLQuantizationType.F16,
        "BF16": gguf.GGMLQuantizationType.BF16,
    }
    if entry.dtype not in kinds:
        raise UnsupportedModelError(f"GGUF has no plain tensors of {entry.dtype}", tensor=entry.name)
    width = 4 if entry.dtype == "F32" else 2
    shape = (*entry.shape[:-1], entry.shape[-1] * width) if entry.shape else (width,)
    writer.add_tensor_info(entry.name, shape, np.dtype(np.uint8), entry.nbytes, kinds[entry.dtype])


def _checked(source: PackedDirectory, name: str) -> GroupwiseTensor:
    """Open a packed tensor that GGUF's blocks can hold; `UnsupportedModelError` says why another one cannot."""
    record = source.manifest.tensors[name]
    if record.kind != GroupwiseTensor.kind:
        message = f"only group-wise integers can be written so, not '{record.kind}'; `--to bf16` writes anything"
        raise UnsupportedModelError(message, file=source.path, tensor=name)
    tensor = GroupwiseTensor(source.tensor(name), file=source.path / record.file, tensor=name)
    columns, width = tensor.shape[-1], tensor.group_size
    reason = None
    if tensor.bits not in (4, 8):
        reason = f"it has {tensor.bits} bits; Q4_0 and Q8_0 have 4 and 8"
    elif not tensor.symmetric:
        reason = "it has offsets"
    elif columns % BLOCK or (width % BLOCK and width != columns):
        reason = f"groups of {width} of {columns} columns are no blocks of {BLOCK}"
    elif not bool((tensor.scales.half().float() == tensor.scales).all()):
        reason = "a scale is beyond float16"
    if reason:
        raise UnsupportedModelError(f"GGUF cannot hold it: {reason}", file=source.path, tensor=name)
    return tensor


def _blocks(tensor: GroupwiseTensor) -> NDArray[np.uint8]:
    """All blocks of a tensor, flat."""
    codes = tensor.decode().reshape(-1, tensor.shape[-1] // BLOCK, BLOCK).numpy()
    repeat = tensor.group_size // BLOCK
    scales = tensor.scales.repeat_interleave(repeat, dim=-1).reshape(len(codes), -1)[:, : codes.shape[1]]
    make = q4_0_blocks if tensor.bits == 4 else q8_0_blocks
    return make(codes, scales.to(torch.float16).numpy()).reshape(-1)


def q4_0_blocks(codes: NDArray[np.uint8], scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Blocks `[N, B, 18]` of codes `[N, B, 32]` and scales `[N, B]`: the scale, then columns i and i + 16 in byte i."""
    nibbles = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([_bytes(scales), nibbles], axis=-1)


def q8_0_blocks(codes: NDArray[np.uint8], scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Blocks `[N, B, 34]` of codes `[N, B, 32]` and scales `[N, B]`: the scale, then signed bytes."""
    return np.concatenate([_bytes(scales), codes ^ 0x80], axis=-1)


def _bytes(scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(scales).view(np.uint8).reshape(*scales.shape, 2)

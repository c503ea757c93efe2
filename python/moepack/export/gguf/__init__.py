"""Exports a GGUF file for llama.cpp: names, hyperparameters, tokenizer, and packed tensors as llama.cpp's blocks.

`models.MODELS` lists the supported architectures. Models that llama.cpp would compute or tokenize differently are
rejected with the reason before anything is written.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moepack.errors import LoadError, UnsupportedModelError
from moepack.export.directory import dense_entries
from moepack.export.gguf.architectures import model_of
from moepack.export.gguf.blocks import blocks, open_tensor, q4_0_blocks, q8_0_blocks
from moepack.export.gguf.experts import stacks
from moepack.export.gguf.model import Model, Piece
from moepack.export.gguf.vocabulary import Vocabulary
from moepack.format.atomic import disk_errors
from moepack.format.directory import PackedDirectory
from moepack.format.shard import Entry
from moepack.groupwise import GroupwiseTensor
from moepack.system import files

__all__ = ["export_gguf", "q4_0_blocks", "q8_0_blocks"]

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file: name, shape, GGML type, and a function that returns its bytes."""

    name: str
    shape: tuple[int, ...]
    kind: str
    data: Callable[[], NDArray[np.uint8]]

    def announce(self, gguf: Any, writer: Any) -> None:
        """Register the tensor with the writer."""
        kind = gguf.GGMLQuantizationType[self.kind]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*self.shape[:-1], self.shape[-1] // block * size)
        writer.add_tensor_info(self.name, shape, np.dtype(np.uint8), math.prod(shape), kind)


def export_gguf(directory: Path, out: Path) -> int:
    """Write one GGUF file. Arguments and errors as for `export`.

    Raises:
        LoadError: the package `gguf` is not installed (`pip install moepack[export]`).
    """
    try:
        import gguf
    except ImportError as error:
        raise LoadError("GGUF export needs the package gguf: pip install 'moepack[export]'") from error
    source = PackedDirectory.open(directory)
    packed = {name: open_tensor(source, name) for name in source.manifest.packed()}
    model = model_of(source.config)
    vocabulary = Vocabulary(source.path, source.config["vocab_size"])
    tensors = [*_packed(gguf, model, source, packed), *_dense(gguf, model, source)]
    if _HEAD not in {tensor.name for tensor in tensors}:
        tensors += [_Tensor(_HEAD, t.shape, t.kind, t.data) for t in tensors if t.name == _EMBEDDING]
    partial = out.with_name(f".{out.name}.moepack-tmp")
    try:
        with disk_errors(out):
            with closing(gguf.GGUFWriter(partial, model.name)) as writer:
                writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
                model.write(gguf, writer, source.config)
                vocabulary.write(gguf, writer)
                _write(gguf, writer, tensors)
            files.replace(partial, out)
    finally:
        with suppress(OSError):
            files.remove(partial, missing_ok=True)
    return out.stat().st_size


def _write(gguf: Any, writer: Any, tensors: list[_Tensor]) -> None:
    """Register all tensors, then write them one by one."""
    for tensor in tensors:
        tensor.announce(gguf, writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.data())


def _packed(gguf: Any, model: Model, source: PackedDirectory, tensors: dict[str, GroupwiseTensor]) -> Iterator[_Tensor]:
    """Yield the packed tensors as blocks; those that llama.cpp stores as vectors, in float32."""
    rename = model.names(gguf, source.config)
    for name, tensor in tensors.items():
        record = source.manifest.tensors[name]
        assert record.module is not None and record.projection is not None
        renamed = model.expert_name(record.module, record.projection) if record.experts else rename(name)
        if _is_vector(renamed):
            yield _vector(renamed, lambda tensor=tensor: tensor.dequantize(), tensor.shape)  # type: ignore[misc]
            continue
        for piece in model.pieces(renamed, tensor.shape[-2], source.config):
            yield _packed_piece(piece, tensor)


def _packed_piece(piece: Piece, tensor: GroupwiseTensor) -> _Tensor:
    """Return a tensor made of rows of a packed one: as blocks, or in float32 if transposed."""
    if piece.transposed:
        return _transposed(piece, tensor.dequantize, tensor.shape)
    kind = {4: "Q4_0", 8: "Q8_0"}[tensor.bits]
    return _Tensor(piece.name, _shape(piece, tensor.shape), kind, lambda: blocks(tensor, piece.order))


def _dense(gguf: Any, model: Model, source: PackedDirectory) -> Iterator[_Tensor]:
    """Yield the tensors that are not packed: vectors and routers in float32, others, experts included, unchanged."""
    rename = model.names(gguf, source.config)
    entries = [entry for entries in dense_entries(source) for entry in entries]
    if unknown := [entry for entry in entries if entry.dtype not in _DTYPES]:
        raise UnsupportedModelError(f"llama.cpp does not support tensors of {unknown[0].dtype}", tensor=unknown[0].name)
    experts, entries = stacks(source.config["model_type"], entries)
    for stack in experts:
        yield _Tensor(model.expert_name(f"{stack.layer}.", stack.projection), stack.shape, stack.dtype, stack.data)
    for entry in entries:
        renamed = rename(entry.name)
        if len(entry.shape) == 1 or _is_vector(renamed) or "ffn_gate_inp" in renamed:
            yield _vector(renamed, lambda entry=entry: _values(entry), entry.shape)  # type: ignore[misc]
            continue
        for piece in model.pieces(renamed, entry.shape[0], source.config):
            yield _dense_piece(piece, entry)


def _dense_piece(piece: Piece, entry: Entry) -> _Tensor:
    """Return a tensor made of rows of an unpacked one: bit for bit, or in float32 if transposed."""
    if piece.transposed:
        return _transposed(piece, lambda: _values(entry), entry.shape)
    return _Tensor(piece.name, _shape(piece, entry.shape), entry.dtype, lambda: _bytes(entry, piece.order))


def _transposed(piece: Piece, values: Callable[[], torch.Tensor], shape: tuple[int, ...]) -> _Tensor:
    """Return a transposed tensor in float32."""
    *others, rows, columns = _shape(piece, shape)
    order = torch.from_numpy(piece.order)

    def data() -> NDArray[np.uint8]:
        return values().float().view(-1, columns)[order].mT.contiguous().view(-1).numpy().view(np.uint8)

    return _Tensor(piece.name, (*others, columns, rows), "F32", data)


def _shape(piece: Piece, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if piece.order is None else (*piece.order.shape, shape[-1])


def _is_vector(name: str) -> bool:
    """Return whether llama.cpp stores a vector for transformers' matrix of one row."""
    return name.endswith(".ffn_gate_inp_shexp.weight")


def _vector(name: str, values: Callable[[], torch.Tensor], shape: tuple[int, ...]) -> _Tensor:
    """Return a tensor in float32."""
    shape = shape[-1:] if _is_vector(name) else shape
    return _Tensor(name, shape, "F32", lambda: values().float().contiguous().view(-1).numpy().view(np.uint8))


def _values(entry: Entry) -> torch.Tensor:
    return torch.frombuffer(bytearray(entry.data()), dtype=_DTYPES[entry.dtype]).view(entry.shape)


def _bytes(entry: Entry, order: NDArray[np.int64] | None) -> NDArray[np.uint8]:
    data = np.frombuffer(entry.data(), np.uint8)
    return data if order is None else data.reshape(entry.shape[0], -1)[order].reshape(-1)

"""A GGUF model with the interface of a checkpoint: transformers' names, tensors decoded one at a time."""

import os
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from moepack.checkpoint.decoded import DecodedCheckpoint
from moepack.checkpoint.gguf.header import FLOAT_KINDS
from moepack.checkpoint.gguf.model import GgufModel, read_model
from moepack.checkpoint.gguf.names import Made, Piece, made_of
from moepack.checkpoint.reader import Checkpoint, read_config
from moepack.checkpoint.shards import ShardFiles
from moepack.errors import CheckpointError, UnsupportedModelError
from moepack.format.header import TensorInfo

__all__ = ["GgufCheckpoint", "open_gguf"]

VALUES_AT_ONCE = 1 << 20
"""Number of values that are decoded together, which bounds the temporary arrays."""

_EXACT = {"MXFP4": torch.bfloat16, "NVFP4": torch.bfloat16}
"""Types whose values bfloat16 represents. All others have float16 scales and are rounded to float16."""


def open_gguf(directory: Path, parts: Sequence[Path]) -> Checkpoint:
    """Open the GGUF model of a directory. No tensor is read.

    Args:
        directory: a directory with config.json.
        parts: the files of the model, maybe links.

    Raises:
        CheckpointError: a file is unreadable, truncated or contradicts itself, another part or config.json.
        UnsupportedModelError: a tensor or its type is not known.
    """
    return GgufCheckpoint(directory, read_config(directory), read_model([_followed(part) for part in parts]))


def _followed(part: Path) -> Path:
    """Return the target of a link with the same name, so that errors name the user's file."""
    target = Path(os.readlink(part)) if part.is_symlink() else part
    return target if target.is_absolute() and target.name == part.name else part


class GgufCheckpoint(DecodedCheckpoint):
    """The tensors of a GGUF model under transformers' names."""

    def __init__(self, path: Path, config: dict[str, Any], model: GgufModel, files: ShardFiles | None = None) -> None:
        """Create the checkpoint; raises as `open_gguf`.

        Args:
            path: a directory with config.json.
            config: its content.
            model: the headers.
            files: returns the bytes of the parts; None reads the files.
        """
        original = Checkpoint(path, config, model.shards, files)
        made, unread = made_of(model, config)
        self._kinds, self._made = model.kinds, {each.name: each for each in made}
        if len(self._made) != len(made):
            twice = next(name for name, count in Counter(each.name for each in made).items() if count > 1)
            raise CheckpointError("is in the file twice, under two names", file=model.file, tensor=twice)
        infos = {each.name: self._info(each, model) for each in made}
        sources = {each.name: tuple(_stored(original, piece) for piece in each.pieces) for each in made}
        quantized = [each.name for each in made if any(self._kinds[p.name] not in FLOAT_KINDS for p in each.pieces)]
        self.method = "GGUF " + ", ".join(sorted({kind for kind in model.kinds.values() if kind not in FLOAT_KINDS}))
        super().__init__(original, config, infos, sources, quantized)
        notes = [self.note] if quantized else ["The weights are those of a GGUF file, under llama.cpp's names."]
        if unread:
            notes.append(f"{len(unread)} tensors of multi-token prediction are left out ({unread[0]}, ...).")
        self.notes = tuple(notes)

    def _info(self, made: Made, model: GgufModel) -> TensorInfo:
        kinds = [self._kinds[piece.name] for piece in made.pieces]
        dtypes = [FLOAT_KINDS.get(kind) or _EXACT.get(kind, torch.float16) for kind in kinds]
        file = next(header.header.file for header in model.headers if made.pieces[0].name in header.kinds)
        return TensorInfo(made.name, made.shape, dtypes[0], file, 0, prod(made.shape) * dtypes[0].itemsize)

    def part(self, name: str, expert: int) -> torch.Tensor:
        """Return one matrix of a stacked tensor, decoding only that matrix."""
        if name in self._made and not 0 <= expert < self.info(name).shape[0]:
            raise IndexError(f"expert index {expert} is out of range: '{name}' has {self.info(name).shape[0]} experts")
        return super().part(name, expert)

    def _decoded(self, name: str, expert: int | None) -> torch.Tensor:
        made, dtype = self._made[name], self.info(name).dtype
        if expert is not None and any(piece.shape[0] != made.shape[0] for piece in made.pieces):
            return self._decoded(name, None)[expert]
        pieces = [self._values(piece, expert, dtype) for piece in made.pieces]
        return pieces[0] if made.build is None else made.build(*pieces).contiguous()

    def _values(self, piece: Piece, expert: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the decoded values of a piece, or of one matrix of it."""
        index = piece.expert if piece.expert is not None else expert
        stored = self._original.mapped(_place(self._original, piece.name, index, piece.rows))
        kind = self._kinds[piece.name]
        if kind in FLOAT_KINDS:
            return stored.to(dtype)
        try:
            return _dequantized(stored, kind, dtype)
        except NotImplementedError as cause:
            message = f"the installed gguf package does not decode {kind}"
            file = self._original.info(piece.name).file
            raise UnsupportedModelError(message, file=file, tensor=piece.name) from cause


def _dequantized(stored: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Decode rows of blocks, shape (..., bytes) uint8, a few rows at a time."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    values, nbytes = gguf.GGML_QUANT_SIZES[number]
    columns = stored.shape[-1] // nbytes * values
    rows = stored.reshape(-1, stored.shape[-1])
    out = torch.empty(len(rows), columns, dtype=dtype)
    step = max(VALUES_AT_ONCE // max(columns, 1), 1)
    for start in range(0, len(rows), step):
        data = rows[start : start + step].contiguous().numpy()
        out[start : start + step] = torch.from_numpy(gguf.dequantize(data, number))
    return out.view(*stored.shape[:-1], columns)


def _stored(original: Checkpoint, piece: Piece) -> TensorInfo:
    """Return the place of a piece in the file."""
    return _place(original, piece.name, piece.expert, piece.rows)


def _place(original: Checkpoint, name: str, index: int | None, rows: slice | None) -> TensorInfo:
    """Return the place of a tensor of the file, of one matrix of it, or of rows of that matrix."""
    info = original.info(name)
    if index is not None:
        info = info.at(index)
    if rows is None:
        return info
    row = info.nbytes // info.shape[0]
    count = rows.stop - rows.start
    shape = (count, *info.shape[1:])
    return TensorInfo(info.name, shape, info.dtype, info.file, info.offset + rows.start * row, count * row)

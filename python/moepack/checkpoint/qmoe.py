"""Reads checkpoints in the QMoE authors' format (section 4.3 of the paper; files written by torch.save).

A directory holds `noexp.pt` (all dense tensors), `exp00.pt`, `exp01.pt`, ... (the experts of one layer each) and
`sizes.pt`. A projection `NAME` of an expert (such as `encoder.block.1.layer.1.mlp.experts.expert_0.wi`) has:

* `NAME.w_comp` int16 [words]: codes of the 65,536-word dictionary, row after row;
* `NAME.row_off` int32 [R + 1]: the first code of each row, and the number of codes;
* `NAME.ter_minmax` bf16 [2 R]: minimum and maximum of each row, alternating.

The authors' packer takes both levels from the *quantized* row and recognises codes by value, so a row without a
positive weight stores zero as its "maximum". The reader therefore rebuilds the values and encodes them again, which is
exact and avoids that defect. The number of columns is not stored; it follows from the configuration.

The files are pickles and are opened with `weights_only`, so they cannot run code. Words are decoded by the checked
reader of the dictionary code, so damaged words raise errors and never cause invalid memory accesses.
"""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moepack import _core
from moepack.errors import CheckpointError, UnsupportedModelError
from moepack.format.regular import read_json
from moepack.ternary import TernaryTensor, encode_ternary

__all__ = ["QmoeCheckpoint", "read_matrix"]

_PARTS = ("w_comp", "row_off", "ter_minmax")


class QmoeCheckpoint:
    """An open directory of QMoE files. Tensors are mapped and read on use."""

    def __init__(self, path: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self.path, self.config, self._tensors = path, config, tensors

    @classmethod
    def open(cls, path: str | PathLike[str]) -> "QmoeCheckpoint":
        """Open `path`.

        Raises:
            CheckpointError: a file is missing, damaged, or holds anything but tensors.
            UnsupportedModelError: the directory has no QMoE tensors.
        """
        directory = Path(path)
        tensors: dict[str, torch.Tensor] = {}
        for file in [directory / "noexp.pt", *sorted(directory.glob("exp*.pt"))]:
            tensors |= _load(file)
        if not any(name.endswith(".w_comp") for name in tensors):
            raise UnsupportedModelError("holds no tensor in QMoE's format", file=directory)
        file = directory / "config.json"
        config = read_json(file, CheckpointError)
        return cls(directory, config, tensors)

    def matrices(self) -> tuple[str, ...]:
        """Return the names of the packed projections."""
        return tuple(name.removesuffix(".w_comp") for name in self._tensors if name.endswith(".w_comp"))

    def dense(self) -> tuple[str, ...]:
        """Return the names of all other tensors."""
        packed = self.matrices()
        owned = {f"{name}.{part}" for name in packed for part in (*_PARTS, "weight")}
        return tuple(name for name in self._tensors if name not in owned)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a dense tensor; `CheckpointError` if it does not exist."""
        if name not in self._tensors:
            raise CheckpointError("no such tensor in the checkpoint", file=self.path, tensor=name)
        return self._tensors[name]

    def matrix(self, name: str, code: str = "fsv8") -> TernaryTensor:
        """Return a packed projection, shape (R, C).

        Args:
            name: one of `matrices`.
            code: entropy code of the result, "fsv8" or "dict16".

        Raises:
            CheckpointError: its tensors are missing or contradict each other.
        """
        return _encoded(self.values(name), code, name)

    def shape(self, name: str) -> tuple[int, int]:
        """Return rows and columns of a packed projection. Errors as for `matrix`."""
        key = "d_model" if name.endswith(".wi") else "d_ff"
        columns = self.config.get(key)
        if not isinstance(columns, int):
            raise CheckpointError(f"has no valid {key}", file=self.path / "config.json")
        return len(self.tensor(f"{name}.row_off")) - 1, columns

    def values(self, name: str) -> torch.Tensor:
        """Return the weights of a packed projection in float32, shape (R, C). Errors as for `matrix`."""
        words, offsets, levels = (self.tensor(f"{name}.{part}") for part in _PARTS)
        return _values(words, offsets, levels, self.shape(name)[1], name)


def read_matrix(
    words: torch.Tensor,
    row_offsets: torch.Tensor,
    levels: torch.Tensor,
    columns: int,
    *,
    code: str = "fsv8",
    name: str | None = None,
) -> TernaryTensor:
    """Read one matrix in QMoE's format.

    Args:
        words: codes of the paper's dictionary, int16 [N].
        row_offsets: int32 [R + 1], ascending from 0 to N.
        levels: minimum and maximum of each row, [2 R].
        columns: number of columns C.
        code: entropy code of the result, "fsv8" or "dict16".
        name: name of the matrix for error messages.

    Returns:
        The matrix, shape (R, C). Its values are exactly those encoded by words and levels.

    Raises:
        CheckpointError: the tensors contradict each other, or the words do not decode to rows of C columns.
    """
    return _encoded(_values(words, row_offsets, levels, columns, name), code, name)


def _values(
    words: torch.Tensor, row_offsets: torch.Tensor, levels: torch.Tensor, columns: int, name: str | None
) -> torch.Tensor:
    rows = len(row_offsets) - 1
    starts = row_offsets.to(torch.int64)
    ascending = rows >= 0 and bool((starts.diff() >= 0).all()) and int(starts[0]) == 0 and int(starts[-1]) == len(words)
    if words.dtype != torch.int16 or not ascending or levels.shape != (2 * rows,):
        raise CheckpointError("words, row offsets and levels contradict each other", tensor=name)
    try:
        blob = _core.PackedTensor(_blob(words.numpy().view(np.uint16), starts.numpy(), columns))
        symbols = torch.from_numpy(blob.decode()[0])
    except ValueError as error:
        raise CheckpointError(f"the words do not decode: {error}", tensor=name) from error
    low, high = levels.float().view(rows, 1, 2).unbind(-1)
    return torch.where(symbols < 0, low, torch.where(symbols > 0, high, torch.zeros_like(low)))


def _encoded(values: torch.Tensor, code: str, name: str | None) -> TernaryTensor:
    try:
        return encode_ternary(values, code=code)
    except ValueError as error:
        raise CheckpointError(f"the levels are not ternary: {error}", tensor=name) from error


def _load(file: Path) -> dict[str, torch.Tensor]:
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", file=file) from error
    except Exception as error:  # torch.load passes on any exception of the unpickler
        raise CheckpointError(f"cannot be read: {error}", file=file) from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise CheckpointError("is not a dictionary of tensors", file=file)
    return {str(name): tensor for name, tensor in content.items()}


def _blob(words: npt.NDArray[np.uint16], starts: npt.NDArray[np.int64], columns: int) -> npt.NDArray[np.uint8]:
    """Build a `dict16` blob of the words with the levels -1 and 1, for the checked decoder."""
    rows = len(starts) - 1
    template = _core.encode_ternary(
        np.zeros((1, rows, columns), np.int8),
        np.tile(np.array([-1, 1], np.float32), (1, rows, 1)),
        ndim=2,
        code="dict16",
    )
    header = template[:128].copy()
    # Payload bytes and the number of non-zeros, which only full verification checks.
    header[48:64].view(np.uint64)[:] = (2 * len(words), 0)
    levels_end = 128 + 2 * rows  # opposite levels are stored once, in bf16
    sections = [
        np.concatenate([header, template[128:levels_end]]),
        starts[:-1].astype(np.uint32).view(np.uint8),
        np.array([0, len(words)], np.uint64).view(np.uint8),
        np.ascontiguousarray(words).view(np.uint8),
    ]
    padded = [np.pad(section, (0, -len(section) % 64)) for section in sections]
    tail = 64 + (-len(sections[-1]) % 64)
    padded[-1] = np.pad(sections[-1], (0, tail))
    return np.concatenate(padded)

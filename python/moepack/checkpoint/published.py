"""Presents a model in the QMoE authors' format as a checkpoint for the pipeline.

The model consists of two directories. The published one has the packed experts and usually the dense tensors
(`noexp.pt`). That of the original Switch model has the configuration and tokenizer for current transformers, and the
dense tensors that the published one lacks. The original's experts are not used and may be absent.

Invariants: experts have their names in the original and are bf16 matrices of three values per row, decoded one at a
time; dense tensors of the published model take precedence over those of the original.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moepack.checkpoint.qmoe import QmoeCheckpoint
from moepack.checkpoint.reader import Checkpoint
from moepack.checkpoint.shards import sampled
from moepack.errors import CheckpointError, UnsupportedModelError
from moepack.format.header import TensorInfo
from moepack.format.regular import read_json
from moepack.format.weights import weight_files

__all__ = ["PublishedCheckpoint"]

_ARCHITECTURE = "switch_transformers"
#: Settings that must agree if both configurations have them.
_SIZES = ("d_model", "d_ff", "num_experts", "num_layers", "num_decoder_layers", "vocab_size")


class PublishedCheckpoint(Checkpoint):
    """The published experts and the original's dense tensors, with the interface of `Checkpoint`."""

    def __init__(self, path: Path, config: dict[str, Any], packed: QmoeCheckpoint, original: Checkpoint | None) -> None:
        super().__init__(path, config, {})
        self._packed, self._original = packed, original
        self._matrices = {f"{name}.weight": name for name in packed.matrices()}
        self._dense = {name: packed.tensor(name) for name in packed.dense()}
        self._tensors = dict(self._published())
        for name in () if original is None else original.names():
            if ".experts." not in name:
                self._tensors.setdefault(name, original.info(name))  # type: ignore[union-attr]

    @classmethod
    def open_pair(
        cls, published: str | PathLike[str], original: str | PathLike[str] | None = None
    ) -> PublishedCheckpoint:
        """Open a published model.

        Args:
            published: directory of the authors' files.
            original: directory of the original Switch model, with or without its safetensors files. None if the
                published directory has a configuration that transformers reads and all dense tensors.

        Raises:
            CheckpointError: a file is missing or damaged, or the two are different models.
            UnsupportedModelError: the directory has no tensor in QMoE's format, or the original is not a Switch model.
        """
        packed = QmoeCheckpoint.open(published)
        path = Path(published if original is None else original)
        file = path / "config.json"
        config = read_json(file, CheckpointError)
        if config.get("model_type") != _ARCHITECTURE:
            raise UnsupportedModelError(f"model type '{config.get('model_type')}', not '{_ARCHITECTURE}'", file=file)
        for key in _SIZES:
            here, there = packed.config.get(key), config.get(key)
            if here is not None and there is not None and here != there:
                raise CheckpointError(f"is another model: {key} is {there}, but {here} in the published one", file=file)
        has_weights = original is not None and bool(weight_files(path))
        return cls(path, config, packed, Checkpoint.open(path) if has_weights else None)

    def _published(self) -> Mapping[str, TensorInfo]:
        """Return entries for the published tensors. Their offsets are unused."""
        infos: dict[str, TensorInfo] = {}
        for name, tensor in self._dense.items():
            size = tensor.numel() * tensor.element_size()
            infos[name] = TensorInfo(name, tuple(tensor.shape), tensor.dtype, self._packed.path / "noexp.pt", 0, size)
        for name, matrix in self._matrices.items():
            shape = self._packed.shape(matrix)
            infos[name] = TensorInfo(name, shape, torch.bfloat16, self._packed.path, 0, 2 * shape[0] * shape[1])
        return infos

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor. An expert is decoded to bf16, shape (R, C).

        Errors as for `Checkpoint.tensor`; also `CheckpointError` for damaged words.
        """
        if name in self._matrices:
            return self._packed.values(self._matrices[name]).bfloat16()
        if name in self._dense:
            return self._dense[name]
        if self._original is None:
            raise CheckpointError("no such tensor in the checkpoint", file=self.path, tensor=name)
        return self._original.tensor(name)

    def part(self, name: str, expert: int) -> torch.Tensor:
        """Return one matrix of a tensor that stacks experts. Errors as for `tensor`."""
        return self.tensor(name)[expert]

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of the tensor, shape (nbytes,). Errors as for `tensor`."""
        if self._original is not None and name not in self._matrices and name not in self._dense:
            return self._original.raw(name)
        tensor = self.tensor(name).contiguous()
        data: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
        return data

    def fingerprint(self) -> str:
        """Return a SHA-256 hex digest of configuration, sizes and samples of the published files, and the original."""
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for file in [self._packed.path / "noexp.pt", *sorted(self._packed.path.glob("exp*.pt"))]:
            digest.update(f"{file.name}\n{file.stat().st_size}\n".encode())
            digest.update(sampled(file, file.stat().st_size))
        if self._original is not None:
            digest.update(self._original.fingerprint().encode())
        return digest.hexdigest()

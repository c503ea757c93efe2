"""A checkpoint whose tensors are computed from another one when they are read; nothing is written.

Some methods change what they do not pack as well (a rotation turns embeddings, norms and routers). Calibration and
pipeline read the changed model as they would any other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moepack.checkpoint.reader import Checkpoint
from moepack.format.header import TensorInfo

__all__ = ["Rewriting", "RewrittenCheckpoint"]


@dataclass(frozen=True)
class Rewriting:
    """How a checkpoint changes, tensor by tensor; shapes stay.

    Attributes:
        names: the tensors.
        source: gives the tensor of the original checkpoint that a tensor is made of.
        tensor: computes a tensor, in float32 or finer where it is floating-point.
        dtype: gives the type in which a tensor will be stored, or None for one that will be packed: its values are then
            not rounded, and its size counts as that of the original.
        config: what changes in config.json.
        state: what the change was made from; kept for a resumed run.
        identity: SHA-256 of the state.
    """

    names: tuple[str, ...]
    source: Callable[[str], str]
    tensor: Callable[[str], torch.Tensor]
    dtype: Callable[[str], torch.dtype | None]
    config: Mapping[str, Any]
    state: Mapping[str, torch.Tensor]
    identity: str


class RewrittenCheckpoint(Checkpoint):
    """The changed checkpoint."""

    def __init__(self, original: Checkpoint, rewriting: Rewriting) -> None:
        super().__init__(original.path, {**original.config, **rewriting.config}, original.shards)
        self.original, self.rewriting, self.notes = original, rewriting, original.notes
        self._tensors = {name: self._described(name) for name in rewriting.names}

    def _described(self, name: str) -> TensorInfo:
        info = self.original.info(self.rewriting.source(name))
        dtype = self.rewriting.dtype(name) or info.dtype
        return replace(info, name=name, dtype=dtype, nbytes=prod(info.shape) * dtype.itemsize)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor; errors as those of the original's `tensor`."""
        self.info(name)
        value, dtype = self.rewriting.tensor(name), self.rewriting.dtype(name)
        return value if dtype is None else value.to(dtype)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes in the type that `info` tells."""
        value = self.tensor(name).to(self.info(name).dtype).contiguous()
        data: npt.NDArray[np.uint8] = value.reshape(-1).view(torch.uint8).numpy()
        return data

    def fingerprint(self) -> str:
        """The original's fingerprint and what the change was made from."""
        return f"{self.original.fingerprint()}+{self.rewriting.identity}"

"""A checkpoint whose tensors are computed from another checkpoint when they are read. Nothing is written.

Some methods also change tensors that they do not pack (a rotation changes embeddings, norms and routers). Calibration
and the pipeline read the changed model like any other.
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
    """A change of a checkpoint, tensor by tensor. Shapes do not change.

    Attributes:
        names: names of the tensors.
        source: returns the tensor of the original checkpoint from which a tensor is computed.
        tensor: computes a tensor; floating-point tensors in float32 or higher precision.
        dtype: returns the dtype in which a tensor will be stored, or None for a tensor that will be packed: its values
            are not rounded, and its size is that of the original.
        config: changed entries of config.json.
        state: inputs of the change, kept for a resumed run.
        identity: identifies the change; SHA-256 of the state if there is any.
        part: computes one matrix of a tensor that stacks experts, as `tensor` does; None computes the whole tensor.
    """

    names: tuple[str, ...]
    source: Callable[[str], str]
    tensor: Callable[[str], torch.Tensor]
    dtype: Callable[[str], torch.dtype | None]
    config: Mapping[str, Any]
    state: Mapping[str, torch.Tensor]
    identity: str
    part: Callable[[str, int], torch.Tensor] | None = None


class RewrittenCheckpoint(Checkpoint):
    """A checkpoint with a `Rewriting` applied."""

    def __init__(self, original: Checkpoint, rewriting: Rewriting) -> None:
        super().__init__(original.path, {**original.config, **rewriting.config}, original.shards, original.files)
        self.original, self.rewriting, self.notes = original, rewriting, original.notes
        self._tensors = {name: self._described(name) for name in rewriting.names}

    def _described(self, name: str) -> TensorInfo:
        info = self.original.info(self.rewriting.source(name))
        dtype = self.rewriting.dtype(name) or info.dtype
        return replace(info, name=name, dtype=dtype, nbytes=prod(info.shape) * dtype.itemsize)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor. Errors as for the original's `tensor`."""
        self.info(name)
        value, dtype = self.rewriting.tensor(name), self.rewriting.dtype(name)
        return value if dtype is None else value.to(dtype)

    def part(self, name: str, expert: int) -> torch.Tensor:
        """Return one matrix of a tensor that stacks experts. Errors as for the original's `part`."""
        if self.rewriting.part is None:
            return self.tensor(name)[expert]
        self.info(name)
        value, dtype = self.rewriting.part(name, expert), self.rewriting.dtype(name)
        return value if dtype is None else value.to(dtype)

    def stored_bytes(self, name: str) -> int:
        """Return the stored bytes of the tensor that a tensor is computed from. Errors as for `info`."""
        self.info(name)
        return self.original.stored_bytes(self.rewriting.source(name))

    def stored_infos(self, name: str) -> tuple[TensorInfo, ...]:
        """Return the places of the stored tensors of the original. Errors as for `info`."""
        self.info(name)
        return self.original.stored_infos(self.rewriting.source(name))

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the tensor's bytes in the dtype of `info`."""
        value = self.tensor(name).to(self.info(name).dtype).contiguous()
        data: npt.NDArray[np.uint8] = value.reshape(-1).view(torch.uint8).numpy()
        return data

    def fingerprint(self) -> str:
        """Return the original's fingerprint and the identity of the change."""
        return f"{self.original.fingerprint()}+{self.rewriting.identity}"

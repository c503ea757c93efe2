"""A checkpoint whose tensors are decoded from stored ones when they are read, one tensor or one expert at a time.

Subclasses say which stored tensors a tensor needs and how its values follow from them. All other tensors are those of
the original. Nothing is written, and no decoded tensor is kept.
"""

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moepack.checkpoint.reader import Checkpoint
from moepack.format.header import TensorInfo

__all__ = ["DecodedCheckpoint"]


class DecodedCheckpoint(Checkpoint):
    """The decoded tensors of a checkpoint.

    Attributes:
        method: name of the source's quantization or file format.
    """

    method: str

    def __init__(
        self,
        original: Checkpoint,
        config: dict[str, Any],
        tensors: Mapping[str, TensorInfo],
        sources: Mapping[str, tuple[TensorInfo, ...]],
        quantized: Collection[str],
    ) -> None:
        """Create the decoded form of `original`.

        Args:
            original: the checkpoint with the stored tensors.
            config: the configuration of the decoded model.
            tensors: all tensors, with the dtypes that reading them gives. Offsets of decoded ones are unused.
            sources: the stored tensors of each decoded tensor.
            quantized: the decoded tensors that are stored in less than 16 bits per weight.
        """
        super().__init__(original.path, config, original.shards, original.files)
        self._tensors = dict(tensors)
        self._original, self._sources, self._quantized = original, sources, frozenset(quantized)
        self.notes = original.notes

    def _decoded(self, name: str, expert: int | None) -> torch.Tensor:
        """Return a decoded tensor, or one matrix of it."""
        raise NotImplementedError

    @property
    def bits(self) -> float:
        """Stored bits per quantized weight, including scales."""
        return self.stored_bits(self._quantized) or 0.0

    @property
    def note(self) -> str:
        """A note for the user on the quantized tensors, as a sentence."""
        return (
            f"{len(self._quantized)} tensors of the source are already quantized ({self.method}, {self.bits:.2f} bits "
            "per weight); the packed model keeps their quantization error."
        )

    def stored_bytes(self, name: str) -> int:
        """Return the stored bytes of a tensor, including codes, scales and zero points if it is quantized."""
        if name not in self._sources:
            return super().stored_bytes(name)
        return sum(info.nbytes for info in self._sources[name])

    def stored_infos(self, name: str) -> tuple[TensorInfo, ...]:
        """Return the places of the stored tensors, such as codes and scales."""
        return self._sources[name] if name in self._sources else self._original.stored_infos(name)

    def stored_bits(self, names: Collection[str]) -> float | None:
        """Return the stored bits per weight of some tensors, including scales; None if one is not quantized."""
        if not names or not self._quantized >= set(names):
            return None
        weights = sum(prod(self.info(name).shape) for name in names)
        return 8 * sum(map(self.stored_bytes, names)) / max(weights, 1)

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor, decoded if it is not stored as such. Errors as for the original's `tensor`."""
        return self._decoded(name, None) if name in self._sources else self._original.tensor(name)

    def part(self, name: str, expert: int) -> torch.Tensor:
        """Return one matrix of a stacked tensor, decoding only that matrix if the source allows it."""
        return self._decoded(name, expert) if name in self._sources else self._original.part(name, expert)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of the tensor in the dtype of `info`."""
        if name not in self._sources:
            return self._original.raw(name)
        data: npt.NDArray[np.uint8] = self.tensor(name).contiguous().reshape(-1).view(torch.uint8).numpy()
        return data

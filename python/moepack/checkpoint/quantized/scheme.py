"""How a quantized weight is stored: the names of its tensors, and its shape and values from them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moepack.checkpoint.reader import Checkpoint

__all__ = ["Scheme", "Settings", "Shapes", "Tensors", "groups", "listed", "require", "spread", "unpacked"]

Tensors = Mapping[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme.

    Attributes:
        codes: suffix of the tensor of codes.
        others: suffixes of its companions, in place of `codes`. The first one gives the dtype of the decoded weight.
        plain: suffix of the weight's name, in place of `codes`.
        shape: computes the weight's shape from the shapes of its tensors by suffix. Raises ValueError if they are
            inconsistent.
        values: computes the weight in float32 from its tensors by suffix.
        stacked: whether a tensor may hold all experts.
        optional: suffixes of companions that may be missing.
        dtype: dtype of the codes, if their name does not distinguish them from other tensors.
        state: suffix of a companion whose bytes are a JSON object with the shape and dtype of the weight.
        described: computes shape and dtype from that object and the shapes of all tensors by suffix. Raises ValueError
            if they are damaged or inconsistent.
        selects: tells from a module's path whether its weight has this scheme; None means all.
    """

    codes: str
    others: tuple[str, ...]
    plain: str
    shape: Callable[[Shapes], tuple[int, ...]]
    values: Callable[[Tensors], torch.Tensor]
    stacked: bool = False
    optional: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    state: str | None = None
    described: Callable[[dict[str, Any], Shapes], tuple[tuple[int, ...], torch.dtype]] | None = None
    selects: Callable[[str], bool] | None = None

    @property
    def companions(self) -> tuple[str, ...]:
        """Suffixes that only companions of codes have."""
        return self.others if self.codes else tuple(f"weight{end}" for end in self.others)

    def holds(self, checkpoint: Checkpoint, name: str) -> bool:
        """Return whether a tensor holds codes of this scheme."""
        if not name.endswith(self.codes) or self.dtype not in (None, checkpoint.info(name).dtype):
            return False
        return self.selects is None or self.selects(name.removesuffix(self.codes).removesuffix("."))

    @property
    def sought(self) -> str:
        """The tensors of codes, for error messages."""
        return f"called *{self.codes}" if self.dtype is None else f"in {str(self.dtype).removeprefix('torch.')}"


def require(condition: bool, reason: str) -> None:
    """Raise a ValueError unless the condition holds."""
    if not condition:
        raise ValueError(reason)


def listed(values: Collection[Any]) -> str:
    """Return values as text, sorted and separated by commas."""
    return ", ".join(sorted(map(str, values)))


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack codes from 32-bit words, low bits first: shape (..., W) to (..., W * 32 / bits) int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes: torch.Tensor = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2)


def groups(columns: int, count: int) -> torch.Tensor:
    """Return the group index of each column."""
    return torch.arange(columns) // (columns // count)


def spread(scales: torch.Tensor, columns: int) -> torch.Tensor:
    """Repeat one scale per group of columns, shape (..., G), for each column, shape (..., C)."""
    return scales.repeat_interleave(columns // scales.shape[-1], -1)

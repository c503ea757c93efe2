"""The list buffer: all hidden states of the calibration set in one place (QMoE, section 3.2 and figure 3).

Tokens of all samples are stored back to back, with delimiters between the samples. A sample is therefore a slice, and
the tokens of an expert are one vectorized gather; results are written back in place. The storage is CPU memory, device
memory if the calibration set fits, or a memory-mapped file if it exceeds memory.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from moepack.errors import DiskError
from moepack.system import files

__all__ = ["ListBuffer"]


class ListBuffer:
    """Hidden states [T, H] of N samples.

    Attributes:
        tokens: the storage [T, H]; modifying it modifies the buffer.
        starts: [N + 1] int64 delimiters: sample i is ``tokens[starts[i] : starts[i + 1]]``.
    """

    def __init__(
        self,
        lengths: list[int],
        width: int,
        dtype: torch.dtype = torch.float32,
        file: Path | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Create a buffer of zeros.

        Args:
            lengths: tokens of each sample.
            width: H.
            dtype: dtype of the states.
            file: file to map as storage, or ``None`` for memory. The file is recreated; the caller removes it.
            device: device of the memory, if there is no file; the CPU by default.

        Raises:
            DiskError: the file cannot be created.
        """
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64).cumsum(0)])
        size = int(self.starts[-1]) * width
        if file is None or size == 0:
            self.tokens = torch.zeros(size, dtype=dtype, device=device).view(-1, width)
        else:
            try:
                files.remove(file, missing_ok=True)
                _fill(file, size * dtype.itemsize)
                self.tokens = torch.from_file(str(file), shared=True, size=size, dtype=dtype).view(-1, width)
            except (OSError, RuntimeError) as error:
                raise DiskError(f"cannot map {size * dtype.itemsize} bytes: {error}", file=file) from error

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.starts) - 1

    @classmethod
    def of(cls, tokens: Tensor) -> ListBuffer:
        """Return a buffer whose storage is the given states [T, H], of one sample."""
        found = cls([], 1)
        found.tokens, found.starts = tokens, torch.tensor([0, len(tokens)])
        return found

    def samples(self, first: int, last: int) -> Tensor:
        """Return samples ``first`` to ``last`` (exclusive), a view [last - first, L, H].

        The samples must have equal length.
        """
        states = self.tokens[int(self.starts[first]) : int(self.starts[last])]
        return states.view(last - first, -1, states.shape[-1])

    def gather(self, tokens: Tensor, device: torch.device | None = None) -> Tensor:
        """Return the rows ``tokens`` [n] int64 (positions in the whole buffer), [n, H], on ``device``."""
        rows = self.tokens.index_select(0, tokens.to(self.tokens.device))
        return rows if device is None else rows.to(device)

    def add(self, tokens: Tensor, states: Tensor) -> None:
        """Add states [n, H] to the rows ``tokens`` [n] in place; rows may repeat."""
        self.tokens.index_add_(0, tokens.to(self.tokens.device), states.to(self.tokens.device, self.tokens.dtype))


def _fill(file: Path, size: int) -> None:
    """Write a file of zeros. A sparse one would end the process if the disk were full when a page is first written."""
    zeros = bytes(min(size, 1 << 20))
    with file.open("wb") as out:
        for first in range(0, size, len(zeros)):
            out.write(zeros[: size - first])

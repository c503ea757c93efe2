"""Computes the factors of seams from sampled weights, without data.

The factor of a column is its magnitude after the rows were balanced (`moepack.solvers.balance`), so it follows every
rescaling of columns and rows. The overall scale of a seam is free as well. It is fixed so that a norm's gains have a
geometric mean of one, and that the matrices on both sides of another seam have the same mean magnitude.

A norm's gain is stored rounded. The factors of its readers are therefore the quotients of rounded and original gains,
so that packed matrices carry no error from the rounding. Other factors are rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moepack.checkpoint.balanced.seams import Edge, Seam
from moepack.checkpoint.model import Part
from moepack.checkpoint.reader import Checkpoint
from moepack.solvers.balance import column_magnitudes, row_magnitudes

__all__ = ["Factors", "matrix_of"]

MATRICES, ROWS = 16, 512
"""Matrices and approximate rows, in total, from which the factors of a seam are estimated."""

MOST = {torch.float16: 10}
"""Largest factor of a norm with a tensor of this dtype, in octaves: float16 ends at 2^16 and 2^-14."""

LIMIT = 60
"""Largest factor in octaves elsewhere."""


class Factors:
    """The factors of the seams of a checkpoint, each computed when it is first requested."""

    def __init__(self, checkpoint: Checkpoint, seams: Sequence[Seam]) -> None:
        self._checkpoint = checkpoint
        self._known: dict[str, Tensor] = {}
        self._behind = {matrix_of(edge.part): (seam, edge) for seam in seams for edge in seam.reads}

    def of(self, seam: Seam) -> Tensor:
        """Return a seam's factors, float32."""
        if (found := self._known.get(seam.name)) is None:
            found = self._known[seam.name] = self._norm(seam) if not seam.writes else self._pair(seam)
        return found.float()

    def _norm(self, seam: Seam) -> Tensor:
        """Return the factors of a norm, float32."""
        gain = self._checkpoint.tensor(seam.vectors[0].part.tensor)
        values = gain.double()
        used = values.isfinite() & (values != 0)
        sizes = torch.where(used, values, 1.0).abs()
        logarithms = torch.log2(column_magnitudes(torch.cat(list(self._samples(seam.measured)))))
        if bool(used.any()):
            logarithms -= (logarithms + torch.log2(sizes))[used].mean()
        wanted = 2.0 ** logarithms.clamp(-(most := self._most(seam)), most)
        rounded = (sizes * wanted).to(gain.dtype).double()
        return torch.where(used & (rounded > 0) & rounded.isfinite(), rounded / sizes, wanted).float()

    def _pair(self, seam: Seam) -> Tensor:
        """Return the factors between two packed matrices, bfloat16."""
        (edge,) = seam.writes
        columns = column_magnitudes(torch.cat(list(self._samples(seam.measured))))
        # The products of rows and columns do not depend on the scales of channels.
        level = torch.log2(edge.features(self._rows(edge)[None]).mean(0) * columns).mean() / 2
        return (2.0 ** (torch.log2(columns) - level).clamp(-LIMIT, LIMIT)).bfloat16()

    def _rows(self, edge: Edge) -> Tensor:
        """Return the magnitudes of the rows of a matrix, whose columns are balanced first."""
        matrix = self._checkpoint.matrix(edge.part)
        columns = torch.ones(matrix.shape[1])
        if (behind := self._behind.get(matrix_of(edge.part))) is not None:
            columns = behind[1].spread(self.of(behind[0]))
        return row_magnitudes(matrix, columns.double())

    def _samples(self, edges: Sequence[Edge]) -> Iterator[Tensor]:
        """Yield evenly spaced rows of some matrices, over the features of the seam."""
        count = min(len(edges), MATRICES)
        for number in range(count):
            edge = edges[number * len(edges) // count]
            matrix = self._checkpoint.matrix(edge.part)
            rows = matrix[:: max(1, len(matrix) * count // ROWS)]
            yield edge.features(rows)

    def _most(self, seam: Seam) -> int:
        names = {edge.part.tensor for edge in (*seam.vectors, *seam.reads)}
        return min(MOST.get(self._checkpoint.info(name).dtype, LIMIT) for name in names)


def matrix_of(part: Part) -> tuple[str, int | None]:
    """Return the tensor, and the number in a stack, of the stored matrix that holds a part."""
    return part.tensor, part.split()[0]

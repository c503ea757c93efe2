"""The loops over columns of `moepack.solvers` on a GPU (`cuda/columns.cu`), one launch per sub-block.

Products and sums are fused, and added in another order than torch's, so a code next to a tie may differ.
"""

from functools import cache

import torch
from torch import Tensor

from moepack.backends.gpu.program import Program
from moepack.backends.gpu.structs import Struct, StructValue
from moepack.solvers.grids import Grid, TernaryGrid
from moepack.solvers.integers import Groups, Loops

__all__ = ["LOOPS", "descend", "program", "round_columns"]

_THREADS = 128

_GRID = Struct("columns.cu", "Grid")
_ROUNDING = Struct("columns.cu", "Rounding", Grid=_GRID)
_DESCENT = Struct("columns.cu", "Descent", Grid=_GRID)


def round_columns(
    grid: Grid, free: Tensor, errors: Tensor, left: Tensor, upper: Tensor, columns: Tensor, pivots: Tensor
) -> tuple[Tensor, Tensor]:
    """Round the columns of a sub-block; arguments and result as for `moepack.solvers.gptq.round_columns`.

    Raises:
        DeviceError: the GPU cannot run the kernel.
    """
    if isinstance(grid, TernaryGrid):
        own, dtype = _levels(grid), torch.int8
    else:
        assert isinstance(grid, Groups)
        own, dtype = _grid(grid, (columns // grid.width).int()), torch.uint8
    codes = torch.empty(free.shape, dtype=dtype, device=free.device)
    values = torch.empty_like(free, memory_format=torch.contiguous_format)
    argument = _ROUNDING(
        free=free, errors=errors, values=values, left=left, codes=codes, factors=upper, grid=own,
        of_free=free.stride(0), of_errors=errors.stride(0), of_values=values.stride(0), of_left=left.stride(0),
        of_codes=codes.stride(0), of_factors=upper.stride(0), line=upper.stride(1),
        rows=free.shape[2], count=free.shape[1],
    )  # fmt: skip
    _launch("round_columns", free, argument)
    return codes, values


def descend(grid: Groups, start: int, codes: Tensor, gradient: Tensor, changes: Tensor, metric: Tensor) -> None:
    """Replace the codes of a block of columns; arguments as for `moepack.solvers.integers.descend`.

    Raises:
        DeviceError: the GPU cannot run the kernel.
    """
    places = torch.arange(start, start + codes.shape[1], device=codes.device, dtype=torch.int32)
    argument = _DESCENT(
        gradient=gradient, codes=codes, changes=changes, factors=metric, grid=_grid(grid, places // grid.width, 0),
        of_gradient=gradient.stride(0), of_codes=codes.stride(0), of_changes=changes.stride(0),
        of_factors=metric.stride(0), line=metric.stride(1), rows=codes.shape[2], count=codes.shape[1],
    )  # fmt: skip
    _launch("descend", codes, argument)


LOOPS = Loops(round_columns, descend)
"""The loops for tensors on a GPU."""


@cache
def program() -> Program:
    """The kernels."""
    return Program("columns.cu")


def _grid(grid: Groups, groups: Tensor, columns: int | None = None) -> StructValue:
    """Describe a grid, and the group of each column [E, K] int32."""
    return _GRID(
        scales=grid.scales, offsets=grid.offsets, groups=groups, number=grid.scales.shape[2],
        columns=groups.stride(0) if columns is None else columns,
        middle=grid.middle, largest=2**grid.bits - 1, levels=None,
    )  # fmt: skip


def _levels(grid: TernaryGrid) -> StructValue:
    """Describe ternary rows."""
    return _GRID(
        scales=None, offsets=None, groups=None, number=0, columns=0, middle=0, largest=0,
        levels=grid.levels.contiguous(),
    )  # fmt: skip


def _launch(name: str, like: Tensor, argument: StructValue) -> None:
    experts, _, rows = like.shape
    if experts and rows:
        with torch.cuda.device(like.device):
            program().launch(name, (-(-rows // _THREADS), experts), _THREADS, [argument])

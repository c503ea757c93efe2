"""The search for dependent codes on a GPU (`cuda/trellis.cu`): the codes of `_core.solve_dependent`."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moepack.backends.gpu.program import Program
from moepack.backends.gpu.structs import Struct
from moepack.solvers.problem import visits
from moepack.solvers.uniform import LANES

__all__ = ["pairs", "program", "solve_dependent"]

_BLOCK, _ROWS, _STATES, _TILE, _TILE_THREADS = 32, 8, 8, 64, 256

_BYTES = 1 << 30
"""The most bytes of work space of the experts that are solved at a time, unless one needs more."""

_TRELLIS = Struct("trellis.cu", "Trellis")


def solve_dependent(
    weights: Tensor, upper: Tensor, pivots: Tensor, prices: Tensor, lengths: Tensor, runs: Tensor, *, step: float
) -> tuple[Tensor, Tensor]:
    """Find dependent codes on the device of the tensors; arguments and result as for `_core.solve_dependent`.

    The number of launches is two for every 32 columns. Codes are equal to the core's; losses differ by the order in
    which rows are added.

    Raises:
        ValueError: a weight is NaN or infinite.
        DeviceError: the GPU cannot run the kernels.
    """
    if not bool(weights.isfinite().all()):
        raise ValueError("NaN or infinite weights")
    codes = torch.empty(weights.shape, dtype=torch.int32, device=weights.device)
    losses = torch.zeros(pivots.shape, dtype=torch.float64, device=weights.device)
    if not weights.numel():
        return codes, losses
    _, rows, columns = weights.shape
    some = max(1, _BYTES // (12 * rows * columns))
    lists, tensors = pairs(lengths.float()), (weights, upper.float(), pivots.float(), prices.float(), runs.int())
    with torch.cuda.device(weights.device):
        for first in range(0, len(weights), some):
            part = slice(first, first + some)
            given = _Given(lists, *(each[part].contiguous() for each in tensors))
            given.solve(step, codes[part], losses[part])
    return codes, losses


def pairs(lengths: Tensor) -> Tensor:
    """Pair the bits of each index with the bits of the next index of its parity towards zero, [N, 2 L + 3, 2]."""
    places = torch.arange(lengths.shape[1], device=lengths.device)
    inner = torch.where(places > lengths.shape[1] // 2, places - 2, places + 2)
    return torch.stack([lengths, lengths[:, inner]], -1).contiguous()


@cache
def program() -> Program:
    """The kernels; products and sums are rounded separately, as in the core."""
    return Program("trellis.cu", options=("--fmad=false",))


@dataclass(frozen=True)
class _Given:
    """The lists of `pairs`, and the arguments of `solve_dependent` for some experts, contiguous."""

    lists: Tensor
    weights: Tensor
    upper: Tensor
    pivots: Tensor
    prices: Tensor
    runs: Tensor

    def solve(self, step: float, codes: Tensor, losses: Tensor) -> None:
        """Write codes [E, R, C] and losses [E, C]."""
        (experts, rows, columns), device = self.weights.shape, self.weights.device
        order = visits(columns, LANES).to(device)
        source = self.weights[..., order] * torch.tensor(4 / step, dtype=torch.float32, device=device)
        work, found = source.clone(), torch.empty(source.shape, dtype=torch.int32, device=device)
        states = torch.empty((experts, rows), dtype=torch.uint8, device=device)
        prices, tiles = 16 * self.prices, -(-rows // _TILE) * experts
        for start, count, first in _blocks(columns):
            argument = _TRELLIS(
                source=source, work=work, codes=found, states=states, upper=self.upper, pivots=self.pivots,
                prices=prices, lists=self.lists, runs=self.runs, experts=experts, rows=rows, columns=columns,
                indices=self.lists.shape[1], start=start, count=count, first=int(first),
            )  # fmt: skip
            program().launch("search", (-(-rows // _ROWS), experts), _ROWS * _STATES, [argument])
            if later := columns - start - count:
                program().launch("spread", (-(-later // _TILE), tiles), _TILE_THREADS, [argument])
        codes[..., order] = found
        losses.copy_((work - found).double().square_().sum(1) * self.pivots.double().square())


def _blocks(columns: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the first column and the size of each block, and whether a lane begins there."""
    end = 0
    for lane in range(LANES):
        begin, end = end, end + (columns + LANES - 1 - lane) // LANES
        for start in range(begin, end, _BLOCK):
            yield start, min(_BLOCK, end - start), start == begin

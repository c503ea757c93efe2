"""The schedule of a layer of experts with many tokens, which is written on the device: `cuda/common/routes.cuh`."""

import numpy as np
import torch
from torch import Tensor

from moepack.backends.gpu.program import Argument, Program
from moepack.backends.gpu.structs import Struct

__all__ = ["COUNTED_EXPERTS", "ROUTES", "Routes"]

ROUTES = Struct("common/routes.cuh", "Routes")
"""The kernels' `Routes` structure."""

COUNTED_EXPERTS = 2048
"""The most experts of a layer."""

_THREADS = 1024


class Routes:
    """Memory for the schedule of a layer.

    Args:
        index: [T, k] int64, contiguous, on the GPU; out-of-range values are skipped.
        experts: experts of the layer.
        columns: tokens per tile.

    Attributes:
        columns: tokens per tile.
        tiles: an upper bound of the number of tiles.
        struct: the kernels' `Routes` structure.
        place: the address of the place of each slot.
    """

    def __init__(self, index: Tensor, experts: int, columns: int) -> None:
        slots = index.numel()
        self.columns, self.tiles = columns, min(slots, slots // columns + experts)
        sizes = {"count": 1, "expert": self.tiles, "tokens": self.tiles, "slot": self.tiles * columns, "place": slots}
        starts = np.cumsum([0, *sizes.values()])
        self._memory = torch.empty(int(starts[-1]), dtype=torch.int32, device=index.device)
        at = {name: self._memory.data_ptr() + 4 * int(start) for name, start in zip(sizes, starts, strict=False)}
        self.struct, self.place = ROUTES(**at), at["place"]
        self._expert, self._index, self._count = self._memory[starts[1] : starts[2]], index, experts

    def sort(self, program: Program) -> None:
        """Launch the kernel `route` of a program, which writes the schedule."""
        arguments: list[Argument] = [self.struct, self._index, self._index.numel(), self._count, self.columns]
        program.launch("route", 1, _THREADS, arguments, early=True)

    def experts(self) -> Tensor:
        """The expert of each place, [places] int64; any for tiles without tokens."""
        return self._expert.long().clamp(0, self._count - 1).repeat_interleave(self.columns)

"""Experts on a GPU that compute only some of their channels: launches of `cuda/channels.cu`.

The up projection may belong to any family that can write a row for each pair of a token and an expert. Channels are
selected on the device, without involving the host or waiting for it.

All records are in GPU memory, or only those of the first channels are, and the others are in pinned host memory. From
there, kernels read the selected records over the bus.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moepack.backends.gpu.families import kernels_of
from moepack.backends.gpu.layer import device_of, padded
from moepack.backends.gpu.matrix import DeviceMatrix
from moepack.backends.gpu.program import Argument, Program
from moepack.backends.gpu.structs import ACTIVATIONS, Struct, StructValue, activations

__all__ = ["KERNELS", "ChannelKernels", "gather"]

GROUP = 64

_RECORDS = Struct("channels.cuh", "Records")
_SPARSE = Struct("channels.cu", "Sparse", Records=_RECORDS, Activations=ACTIVATIONS)

_RESIDENT = 2
"""Resident blocks of `compute` per multiprocessor."""

_TRANSFER_BLOCKS = 16
"""Blocks that saturate the bus (PCIe 5: 32 and 64 are no faster) and leave multiprocessors to products."""


class ChannelKernels:
    """Kernels of `channels`, which is not a matrix: of the methods of other families, it only has `dequantize`.

    The tables of a tensor:

    - `computed`, int64 [3]: over all calls and replays, the number of computed channels, of all channels of the tokens'
      experts, and of computed channels that are resident;
    - `thresholds`, float32 [E];
    - `resident`, uint8 [E, n, bytes]: the records of the first channels; only if the others are on the host.
    """

    def prepare(self, matrix: DeviceMatrix) -> None:
        """See `Kernels.prepare`."""
        device, (start, size) = torch.cuda.current_device(), matrix.sections["thresholds"]
        matrix.tables["computed"] = torch.zeros(3, dtype=torch.int64, device=device)
        thresholds = matrix.data[start : start + size].view(torch.float32)[: matrix.shape[0]]
        matrix.tables["thresholds"] = thresholds.to(device, copy=True)
        _program(matrix.details["bits"]).load()

    def keep(self, matrix: DeviceMatrix, channels: int) -> None:
        """Copy the records of each expert's first channels from host memory to the current GPU, and keep them."""
        experts, rows, _ = matrix.shape
        start, size = matrix.sections["records"]
        records = matrix.data[start : start + size].view(experts, rows, -1)
        resident = torch.empty((experts, channels, records.shape[2]), dtype=torch.uint8, device="cuda")
        for expert in range(experts):  # contiguous per expert, so copies run at the speed of the bus
            resident[expert].copy_(records[expert, :channels], non_blocking=True)
        matrix.tables["resident"] = resident

    def sparse(
        self,
        up: DeviceMatrix,
        channels: DeviceMatrix,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        out: Tensor,
    ) -> None:
        """Sum the outputs of each token's experts; launches like `Kernels`.

        Args:
            up: [E, I, H].
            channels: [E, I, 2 H].
            x: [T, H], bfloat16, float16 or float32.
            index: [T, k] int64, at most 512 entries; out-of-range values are skipped.
            weights: [T, k] float32.
            out: [T, H] float32.
        """
        (ups,) = _projected([up], x, index)
        launch = _launcher(channels, x, index, weights, out, ups)
        launch("choose"), launch("compute"), launch("add")

    def refined(
        self,
        gate: DeviceMatrix,
        up: DeviceMatrix,
        down: DeviceMatrix,
        residuals: DeviceMatrix,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        out: Tensor,
    ) -> None:
        """Sum the outputs of each token's experts, computed from coarse copies and refined in some channels.

        Args:
            gate, up: [E, I, H].
            down: [E, H, I].
            residuals: [E, I, 2 H], the differences between fine and coarse gate and down values.
            x, index, weights, out: as in `sparse`.
        """
        gates, ups = _projected([gate, up], x, index)
        inner = torch.empty_like(ups)
        launch = _launcher(residuals, x, index, weights, out, ups, gates, inner)
        launch("choose"), launch("compute")
        kernels_of(down.kind).combine(down, inner, index, weights, out)
        launch("add")

    def dequantize(self, matrix: DeviceMatrix, first: int, out: Tensor) -> None:
        """See `Kernels.dequantize`."""
        count, rows, columns = out.shape
        if not out.numel():
            return
        arguments: list[Argument] = [
            _records(matrix, None), np.int64(first * rows), np.int64(count * rows), columns // 2,
            int(out.dtype is torch.float32), out,
        ]  # fmt: skip
        grid = min(-(-out.numel() // 2048), 16 * device_of(out).processors)
        _program(matrix.details["bits"]).launch("dequantize", grid, 256, arguments)


KERNELS = ChannelKernels()


def gather(records: Tensor, chosen: Tensor, count: Tensor, out: Tensor, blocks: int = _TRANSFER_BLOCKS) -> None:
    """Copy selected records from pinned host memory to a GPU, on torch's current stream.

    Args:
        records: [N, bytes] uint8, pinned; bytes is a multiple of 16.
        chosen: int32 on the GPU, record indices.
        count: one int32 on the GPU, the number of indices to use.
        out: uint8 on the GPU, with room for this many records, which are written consecutively.
        blocks: the number of copying blocks.
    """
    arguments: list[Argument] = [records, chosen, count, np.int64(records.shape[1]), out]
    _program(16).launch("gather", blocks, 512, arguments)


def _projected(matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor) -> list[Tensor]:
    """Multiply each slot by matrices [E, I, H]; return float32 [slots, I]."""
    found = []
    for matrix in matrices:
        found.append(torch.empty((index.numel(), matrix.shape[1]), dtype=torch.float32, device=x.device))
        kernels_of(matrix.kind).project(matrix, x, index, found[-1])
    return found


def _launcher(
    channels: DeviceMatrix,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    out: Tensor,
    ups: Tensor,
    gates: Tensor | None = None,
    inner: Tensor | None = None,
) -> Callable[[str], None]:
    """Return a function that launches a call's kernels by name; it owns the buffers shared between them."""
    slots, (experts, rows, columns) = index.numel(), channels.shape
    columns //= 2
    listed = torch.empty((slots, rows), dtype=torch.int32, device=x.device)
    numbers = torch.empty(2 * slots + 1, dtype=torch.int32, device=x.device)
    counts, offsets = torch.split(numbers, [slots, slots + 1])
    blocks = _RESIDENT * device_of(x).processors
    width = -(-columns // GROUP) * GROUP
    tokens, parts = (torch.empty((count, width), device=x.device) for count in (len(index), blocks + slots))
    x, computed = padded(x), channels.tables["computed"]
    kept = {
        "index": index, "weights": weights, "ups": ups, "tokens": tokens, "list": listed, "counts": counts,
        "offsets": offsets, "parts": parts, "out": out, "gates": gates, "inner": inner, "computed": computed,
    }  # fmt: skip
    sparse = _SPARSE(
        records=_records(channels, channels.tables["thresholds"]), x=activations(x), **kept,
        slots=slots, top_k=index.shape[1], experts=experts, columns=columns, blocks=blocks,
    )  # fmt: skip
    arguments: list[Argument] = [sparse]
    program = _program(channels.details["bits"], refines=gates is not None)
    grids: dict[str, tuple[Any, int]] = {
        "choose": (slots, 1024), "compute": (blocks, 512), "add": ((-(-columns // 128), len(index)), 1024)
    }  # fmt: skip

    def launch(kernel: str, memory: object = (x, kept)) -> None:
        program.launch(kernel, *grids[kernel], arguments, early=True)

    return launch


def _records(matrix: DeviceMatrix, thresholds: Tensor | None) -> StructValue:
    """The kernels' `Records` structure."""
    experts, channels, columns = matrix.shape
    data, resident = matrix.pointer("records"), matrix.tables.get("resident")
    size = matrix.sections["records"][1] // max(experts * channels, 1)
    groups = -(-columns // 2 // GROUP)
    half = groups * GROUP * matrix.details["bits"] // 8
    if resident is None:
        near, count = data, channels if matrix.data.is_cuda else 0
    else:
        near, count = resident.data_ptr(), resident.shape[1]
    return _RECORDS(
        data=data, resident_data=near, thresholds=thresholds, bytes=size, half_bytes=half, groups=groups,
        channels=channels, resident=count,
    )  # fmt: skip


@cache
def _program(bits: int, refines: bool = False) -> Program:
    return Program("channels.cu", BITS=bits, REFINES=int(refines))

"""Launches of kernels based on `cuda/common/layer.cuh`: how work is divided, and the structures that they read."""

from abc import ABC, abstractmethod
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from moepack.backends.gpu.matrix import DeviceMatrix
from moepack.backends.gpu.program import Argument, Program, is_hopper
from moepack.backends.gpu.structs import ACTIVATIONS, DIVISOR, Struct, StructValue, activations, divisor

__all__ = [
    "BLOCK_ROWS",
    "CHUNK",
    "RESIDENT",
    "THREADS",
    "TOKENS",
    "Blocks",
    "Device",
    "Division",
    "Grouped",
    "LayerKernels",
    "device_of",
    "padded",
]

THREADS = 256
BLOCK_ROWS = 16
CHUNK = 128
"""Columns per chunk."""

RESIDENT = 2
"""Resident blocks per multiprocessor, for whose registers and shared memory kernels are compiled."""

TOKENS = (8, 32)
"""The most tokens per tile, which are the columns of a product; each has its own program."""

_STATIC_BYTES = 9 << 10
"""Shared memory of a block in addition to its dynamic part: the routing, and the driver's reserve."""

_FEW = 4
"""The most tokens whose activations every block lays out for itself."""

_FEW_CELLS = 128
"""The most cells of these tokens."""

_OWN_CELLS = 200
"""The most cells per block for more tokens that blocks lay out themselves, before a separate launch is faster."""

_SPLITS = (1, 2, 4, 8, 16)
"""Numbers of blocks that may share a sum."""

_MOST_OF_CLUSTER = 8
"""The cluster size that every GPU with clusters supports."""

_SLACK_CELLS = 12
"""More cells than kernels read after the last one (SLACK)."""

_PROBLEM = Struct("common/schedule.cuh", "Problem", Activations=ACTIVATIONS, Divisor=DIVISOR)


class Device(NamedTuple):
    """Properties of a GPU that launches depend on.

    Attributes:
        processors: the number of multiprocessors.
        shared: shared memory per multiprocessor in bytes.
        most_shared: the most dynamic shared memory per block in bytes.
        has_warpgroups: whether warpgroups can multiply (wgmma), which leaves registers to prepare many cells.
    """

    processors: int
    shared: int
    most_shared: int
    has_warpgroups: bool


class Blocks(NamedTuple):
    """The blocks of a launch.

    Attributes:
        warps: warps per block.
        resident: resident blocks per multiprocessor.
    """

    warps: int = THREADS // 32
    resident: int = RESIDENT


class Division(NamedTuple):
    """The division of a launch.

    Attributes:
        row_blocks: blocks of 16 rows per row tile.
        teams: the number of teams that share the row tiles.
        splits: blocks per team, which share the sum over columns.
        in_parts: whether the blocks write partial sums, which another launch adds; otherwise they form a cluster.
    """

    row_blocks: int
    teams: int
    splits: int = 1
    in_parts: bool = False


class Grouped(NamedTuple):
    """The kernels for many tokens of a matrix (`cuda/common/grouped.cuh`).

    Attributes:
        program: the kernels; equal for matrices with the same specification.
        matrix: the Format's `Matrix` structure.
        cell_bytes: bytes of a token's chunk.
    """

    program: Program
    matrix: StructValue
    cell_bytes: int


class LayerKernels(ABC):
    """Launches of a family whose Format implements `Layer` (`cuda/common/layer.cuh`)."""

    def tile_tokens(self, slots: int, tokens: int, device: Device) -> int:
        """The most tokens per tile for a launch with this many slots and tokens; one of `TOKENS`."""
        return TOKENS[0] if tokens <= TOKENS[0] else TOKENS[-1]

    def lays_out(self, most: int, device: Device) -> bool:
        """Whether `lay_out_tokens` and `lay_out_hidden` may prepare the cells of tiles with at most `most` tokens."""
        return False

    @abstractmethod
    def cell_bytes(self, matrix: DeviceMatrix) -> int:
        """Bytes of a token's chunk in shared memory."""

    def ring_bytes(self, matrix: DeviceMatrix) -> int:
        """An upper bound for the bytes of a warp's chunks in flight (RING in the kernels)."""
        return 6 << 10

    def blocks(self, tokens: int) -> Blocks:
        """The blocks for tiles of this many tokens."""
        return Blocks()

    @abstractmethod
    def specification(self, matrix: DeviceMatrix) -> tuple[Any, ...]:
        """The parameters for which a matrix's kernels are specialized."""

    @abstractmethod
    def program(self, matrix: DeviceMatrix, tokens: int) -> Program:
        """The kernels of a matrix for tiles of this many tokens."""

    @abstractmethod
    def struct(self, matrix: DeviceMatrix) -> StructValue:
        """The Format's `Matrix` structure."""

    def launched(self, matrix: DeviceMatrix, problem: StructValue, shared: int) -> tuple[StructValue, Tensor | None]:
        """Launch what a product depends on.

        Args:
            matrix: the matrix of the product.
            problem: its arguments.
            shared: the number of slots that share a row of x: 1, or the experts per token.

        Returns:
            The Format's `Matrix` structure, and an object to keep alive until the product is launched.
        """
        return self.struct(matrix), None

    def activations(self, matrix: DeviceMatrix, x: Tensor) -> Tensor:
        """Transform activations for the kernels of a matrix; by default returns x."""
        return x

    def linear_calls(self, matrix: DeviceMatrix) -> int:
        """The most calls of a linear layer, of 64 tokens each, that are faster than decoding all weights."""
        return 1

    def grouped(self, matrix: DeviceMatrix) -> Grouped | None:
        """The kernels for many tokens on GPUs with warpgroups; None if the matrix's format has none."""
        return None

    def scaled(self, matrix: DeviceMatrix, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Transform activations as `activations` does, for kernels that multiply results by units.

        Returns:
            The activations, and [N] float32, the units of each row; None if they are 1.
        """
        return self.activations(matrix, x), None

    def prepare(self, matrix: DeviceMatrix) -> None:
        """See `Kernels.prepare`."""
        Program.load_all(self.programs(matrix))

    def programs(self, matrix: DeviceMatrix) -> list[Program]:
        """All programs that may multiply a matrix."""
        found = [self.program(matrix, tokens) for tokens in TOKENS]
        if matrix.shape[0] > 1 and device_of(matrix.data).has_warpgroups and (many := self.grouped(matrix)):
            found.append(many.program)
        return found

    def linear(self, matrix: DeviceMatrix, x: Tensor, out: Tensor) -> None:
        """See `Kernels.linear`."""
        self._sum(matrix, x, None, None, out)

    def gated(self, gate: DeviceMatrix, up: DeviceMatrix, x: Tensor, index: Tensor, hidden: Tensor) -> None:
        """See `Kernels.gated`; gate and up projections with different specifications need two launches."""
        if self.specification(gate) == self.specification(up):
            self._by_slot("gated", [gate, up], x, index, hidden)
        else:
            self._by_slot("project", [gate], x, index, hidden)
            self._by_slot("multiply", [up], x, index, hidden)

    def combine(self, down: DeviceMatrix, hidden: Tensor, index: Tensor, weights: Tensor, out: Tensor) -> None:
        """See `Kernels.combine`; if the sum is split over blocks, its parts use memory from torch's allocator."""
        self._sum(down, hidden, index, weights, out)

    def project(self, matrix: DeviceMatrix, x: Tensor, index: Tensor, out: Tensor) -> None:
        """See `Kernels.project`."""
        self._by_slot("project", [matrix], x, index, out)

    def by_slot(self, matrices: list[DeviceMatrix], slots: int, tokens: int) -> Division:
        """Divide a launch that writes a row per slot; all rows of a tile share its activations."""
        _, _, columns = matrices[0].shape
        most = self._tile(matrices[0], slots, tokens)
        blocks = self._blocks_at_a_time(matrices[0], most)
        if most > TOKENS[0]:
            return Division(self.blocks(most).warps // len(matrices), blocks)
        return Division(4 if slots > _FEW * 4 or columns > 16 * CHUNK else 2, blocks)

    def of_sum(self, matrix: DeviceMatrix, slots: int, tokens: int) -> Division:
        """Divide the launch that sums the outputs of each token."""
        most, row_blocks = self._tile(matrix, slots, tokens), -(-matrix.shape[1] // BLOCK_ROWS)
        at_a_time = self._blocks_at_a_time(matrix, most)
        if tokens <= _FEW:
            fits = (of_tile for of_tile in (4, 2, 1) if of_tile == 1 or row_blocks // of_tile > 0.8 * at_a_time)
            return Division(next(fits), at_a_time)
        of_tile = 4 if most == TOKENS[0] else self.blocks(most).warps
        tiles = -(-row_blocks // of_tile)
        splits = max(splits for splits in _SPLITS if splits == 1 or tiles * splits <= at_a_time)
        if splits == 1:
            return Division(of_tile, at_a_time)
        clusters = self._clusters_at_a_time(matrix, most, splits, self._shared(matrix, most, tokens))
        in_parts = clusters < tiles
        return Division(of_tile, max(1, at_a_time // splits) if in_parts else clusters, splits, in_parts)

    def _tile(self, matrix: DeviceMatrix, slots: int, tokens: int) -> int:
        return self.tile_tokens(slots, tokens, device_of(matrix.data))

    def _blocks_at_a_time(self, matrix: DeviceMatrix, most: int) -> int:
        return self.blocks(most).resident * device_of(matrix.data).processors

    def _clusters_at_a_time(self, matrix: DeviceMatrix, most: int, size: int, shared: int) -> int:
        device = matrix.data.device.index
        if size > _MOST_OF_CLUSTER or not is_hopper(device):
            return 0
        return _clusters(self.program(matrix, most), size, 32 * self.blocks(most).warps, shared, device)

    def _by_slot(self, kernel: str, matrices: list[DeviceMatrix], x: Tensor, index: Tensor, out: Tensor) -> None:
        """Launch a kernel that writes a row per slot."""
        first = matrices[0]
        x = padded(self.activations(first, x))
        problem = _problem(first, x, index, None, out, len(x), self.by_slot(matrices, index.numel(), len(x)))
        cells = self._lay_out("lay_out_tokens", first, problem)
        before = [self.launched(matrix, problem, index.shape[1]) for matrix in matrices]
        self._launch(kernel, first, problem, [struct for struct, _ in before])
        del cells, before

    def _sum(self, matrix: DeviceMatrix, x: Tensor, index: Tensor | None, weights: Tensor | None, out: Tensor) -> None:
        """Launch the kernel that sums the outputs of each token; halves the tokens if shared memory is short."""
        most = self._tile(matrix, len(x), len(out))
        if self._shared(matrix, most, len(out)) > device_of(out).most_shared and len(out) > 1:
            per_token = len(x) // len(out)
            for tokens in (slice(0, len(out) // 2), slice(len(out) // 2, len(out))):
                slots = slice(tokens.start * per_token, tokens.stop * per_token)
                some, scales = (None if tensor is None else tensor[tokens] for tensor in (index, weights))
                self._sum(matrix, x[slots], some, scales, out[tokens])
            return
        division = self.of_sum(matrix, len(x), len(out))
        parts = out
        if division.in_parts:
            parts = torch.empty((division.splits, *out.shape), dtype=torch.float32, device=out.device)
        x = padded(self.activations(matrix, x))
        problem = _problem(matrix, x, index, weights, parts, len(out), division)
        cells = self._lay_out("lay_out_hidden", matrix, problem)
        struct, before = self.launched(matrix, problem, 1)
        self._launch("combine", matrix, problem, [struct])
        del cells, before
        if division.in_parts:
            grid = min(-(-out.numel() // THREADS), 8 * device_of(out).processors)
            arguments: list[Argument] = [parts, out, out.numel(), division.splits]
            self.program(matrix, TOKENS[0]).launch("add_splits", grid, THREADS, arguments, early=True)

    def _lay_out(self, kernel: str, matrix: DeviceMatrix, problem: StructValue) -> Tensor | None:
        """Prepare the cells of all slots in a separate launch, if that is faster than preparing them in each block.

        Returns:
            The cells; the caller keeps them alive until the kernel that reads them is launched.
        """
        tokens, top_k, chunks = problem["tokens"][0], problem["top_k"]["by"][0], problem["chunks"]["by"][0]
        # Sums are divided over blocks by columns, other launches by experts.
        hidden, device = kernel == "lay_out_hidden", device_of(matrix.data)
        parts = 1 << problem["split_bits"][0] if hidden else min(problem["experts"][0], tokens * top_k)
        many = _OWN_CELLS * parts if tokens > TOKENS[0] and device.has_warpgroups else 0
        own = _FEW_CELLS if tokens <= _FEW else many
        if not self.lays_out(self._tile(matrix, tokens * top_k, tokens), device) or tokens * top_k * chunks <= own:
            return None
        cells = torch.empty(
            int(tokens * top_k * chunks) * self.cell_bytes(matrix), dtype=torch.uint8, device=matrix.device
        )
        problem["cells"] = cells.data_ptr()
        self._launch(kernel, matrix, problem, [])
        return cells

    def _launch(self, kernel: str, of: DeviceMatrix, problem: StructValue, structs: list[StructValue]) -> None:
        """Launch a kernel of a matrix with as many blocks as can be resident."""
        tokens, top_k = int(problem["tokens"][0]), int(problem["top_k"]["by"][0])
        most, team = self._tile(of, tokens * top_k, tokens), 1 << int(problem["split_bits"][0])
        grid, shared, cluster = self._blocks_at_a_time(of, most), 0, 1
        if structs:
            outputs = tokens if kernel == "combine" else min(tokens * top_k, most)
            grid, shared = team * int(problem["teams"]["by"][0]), self._shared(of, most, outputs)
            cluster = 1 if problem["in_parts"][0] else team
        arguments, threads = [problem, *structs], 32 * self.blocks(most).warps
        self.program(of, most).launch(kernel, grid, threads, arguments, shared, early=True, cluster=cluster)

    def _shared(self, matrix: DeviceMatrix, most: int, outputs: int) -> int:
        """Dynamic shared memory per block in bytes: at least its rings, its sums, and twice the cells of a tile."""
        warps, resident = self.blocks(most)
        cells = 2 * TOKENS[-1] + _SLACK_CELLS
        least = warps * (self.ring_bytes(matrix) + outputs * BLOCK_ROWS * 4) + cells * self.cell_bytes(matrix)
        device = device_of(matrix.data)
        return max(least, min(device.shared // resident - _STATIC_BYTES, device.most_shared) // 128 * 128)


def device_of(tensor: Tensor) -> Device:
    """Return the properties of a tensor's GPU."""
    return _device(tensor.device.index)


@cache
def _device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    most = properties.shared_memory_per_block_optin - _STATIC_BYTES
    warpgroups = (properties.major, properties.minor) == (9, 0)
    return Device(properties.multi_processor_count, properties.shared_memory_per_multiprocessor, most, warpgroups)


@cache
def _clusters(program: Program, size: int, threads: int, shared: int, device: int) -> int:
    return program.clusters("combine", size, threads, shared)


def padded(x: Tensor) -> Tensor:
    """Pad activations so that rows start at multiples of 16 bytes."""
    more = -x.shape[1] % 8
    return functional.pad(x, (0, more)) if more else x


def _problem(
    matrix: DeviceMatrix,
    x: Tensor,
    index: Tensor | None,
    weights: Tensor | None,
    out: Tensor,
    tokens: int,
    division: Division,
) -> StructValue:
    """The arguments of a launch other than the matrices."""
    experts, rows, columns = matrix.shape
    tiles = -(-rows // (BLOCK_ROWS * division.row_blocks))
    return _PROBLEM(
        x=activations(x), index=index, weights=weights, out=out, cells=None,
        tokens=tokens, experts=experts, rows=rows,
        row_blocks=division.row_blocks, split_bits=division.splits.bit_length() - 1, in_parts=division.in_parts,
        top_k=divisor(1 if index is None else index.shape[1]), chunks=divisor(-(-columns // CHUNK)),
        row_tiles=divisor(tiles), teams=divisor(division.teams),
    )  # fmt: skip

"""Products with ternary weights on a GPU: tables and launches of `cuda/ternary.cu`."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moepack._core import ternary_table
from moepack.backends.gpu.layer import device_of
from moepack.backends.gpu.matrix import DeviceMatrix
from moepack.backends.gpu.program import Program
from moepack.backends.gpu.structs import ACTIVATIONS, Struct, StructValue, activations
from moepack.errors import LoadError

__all__ = ["KERNELS", "TernaryKernels"]

WARP = 32
TABLE_BYTES = 8192
PRODUCTS = 8192
"""The most products that a block of `combine` keeps, in floats."""

_MATRIX = Struct("ternary_rows.cuh", "Matrix")
_LAUNCH = Struct("ternary.cu", "Launch", Activations=ACTIVATIONS)
_TENSOR = Struct("ternary.cu", "Tensor")


class _Form(NamedTuple):
    """The configuration of a launch.

    Attributes:
        tokens: tokens per tile.
        in_global: whether activations stay in global memory.
        staged: the number of tiles whose activations are in shared memory at once.
        shared: bytes of shared memory.
    """

    tokens: int
    in_global: bool
    staged: int
    shared: int


class TernaryKernels:
    """Kernels of `fsv8` and `dict16`. The tables of a matrix:

    - `rows`, 16 bytes per row: start, length and dictionary, levels;
    - `columns`, int16: the column of every 32nd code;
    - `entries`, int32: the words of the codes;
    - `numbers`, int64 on the CPU: number of dictionaries, longest word, number of codes.
    """

    def prepare(self, matrix: DeviceMatrix) -> None:
        """See `Kernels.prepare`.

        Raises:
            LoadError: the tensor has more than 2^32 codes.
        """
        experts, rows, _ = matrix.shape
        header = matrix.data[:64].cpu().numpy()
        numbers = [None] if _is_dict16(matrix) else [int(number) for number in header[14 : 14 + header[13]]]
        words = [_words(number) for number in numbers]
        codes = matrix.sections["payload"][1] // (2 if _is_dict16(matrix) else 1)
        if codes >= 1 << 32:
            raise LoadError(f"GPU kernels support at most 2^32 ternary codes per tensor, but this one has {codes}")
        device = matrix.device
        entries = torch.from_numpy(np.concatenate([word.entries for word in words]).view(np.int32))
        matrix.tables["entries"] = entries.to(device)
        matrix.tables["numbers"] = torch.tensor([len(words), max(word.longest for word in words), codes])
        matrix.tables["rows"] = torch.empty(max(experts * rows, 1) * 16, dtype=torch.uint8, device=device)
        matrix.tables["columns"] = torch.empty(codes // 32 + 2, dtype=torch.int16, device=device)
        if not experts * rows:
            return
        for tokens, slots in ((1, 1), (1, 2), (4, 2)):
            _program(_is_dict16(matrix), tokens, _lanes(matrix), False, slots).load()
        three_slots = sum(word.three_slots << i for i, word in enumerate(words))
        program = _program(_is_dict16(matrix), 1, _lanes(matrix), False)
        groups = experts * rows if _is_dict16(matrix) else experts * -(-rows // 64)
        program.launch("find_rows", *_threads(groups), [_tensor(matrix, header, three_slots), matrix.tables["rows"]])
        program.launch("find_columns", *_threads(experts * rows), [_struct(matrix), matrix.tables["columns"]])

    def linear(self, matrix: DeviceMatrix, x: Tensor, out: Tensor) -> None:
        """See `Kernels.linear`."""
        self._combine(matrix, x, None, None, out)

    def gated(self, gate: DeviceMatrix, up: DeviceMatrix, x: Tensor, index: Tensor, hidden: Tensor) -> None:
        """See `Kernels.gated`.

        Raises:
            LoadError: one projection is `fsv8` and the other `dict16`.
        """
        if _is_dict16(gate) != _is_dict16(up):
            raise LoadError(f"GPU kernels require one code for gate and up, got {gate.format} and {up.format}")
        pad = max(_pad(gate), _pad(up))
        form = _gated_form(gate, up, pad, index)
        launch = _launch(x, index, index.shape[1])
        arguments: list[Any] = [_struct(gate, pad), _struct(up, pad), launch, hidden]
        _launched("gated", gate, form, index.numel(), device_of(gate.data).processors, arguments, _lanes(gate))

    def project(self, matrix: DeviceMatrix, x: Tensor, index: Tensor, out: Tensor) -> None:
        """See `Kernels.project`; writes zeros to rows of skipped experts."""
        rows = x.repeat_interleave(index.shape[1], 0) if index.shape[1] > 1 else x
        self._combine(matrix, rows, index.view(-1, 1), None, out)

    def combine(self, down: DeviceMatrix, hidden: Tensor, index: Tensor, weights: Tensor, out: Tensor) -> None:
        """See `Kernels.combine`."""
        self._combine(down, hidden, index, weights, out)

    def dequantize(self, matrix: DeviceMatrix, first: int, out: Tensor) -> None:
        """See `Kernels.dequantize`; levels are rounded to bfloat16, which is exact for tensors with bfloat16 levels."""
        if out.dtype is torch.float32:
            self.dequantize(matrix, first, rounded := torch.empty_like(out, dtype=torch.bfloat16))
            out.copy_(rounded)
            return
        row_bytes = -(-matrix.shape[2] // 8) * 16
        block = _block(_is_dict16(matrix), 1, WARP, 1)
        warps = min(block // WARP, (device_of(matrix.data).most_shared - _table_bytes(matrix)) // row_bytes)
        rows = out.shape[0] * out.shape[1]
        threads = WARP * warps or block
        grid = min(-(-rows * WARP // threads), device_of(matrix.data).processors)
        program = _program(_is_dict16(matrix), 1, WARP, warps == 0)
        shared = _table_bytes(matrix) + warps * row_bytes
        program.launch("dequantize", grid, threads, [_struct(matrix), first, out.shape[0], out], shared)

    def _combine(
        self, matrix: DeviceMatrix, x: Tensor, index: Tensor | None, weights: Tensor | None, out: Tensor
    ) -> None:
        """Sum over experts; a linear layer is a sum over a single expert without weights."""
        each = 1 if index is None else index.shape[1]
        rows, slots = matrix.shape[1], len(x)
        grid = max(device_of(matrix.data).processors, -(-rows * slots // PRODUCTS) if each > 1 else 1)
        form = _combine_form(matrix, slots, -(-rows // grid) * slots if each > 1 else 0)
        launch = _launch(x, index, 1)
        arguments = [_struct(matrix), launch, weights, each, form.staged, out]
        _launched("combine", matrix, form, slots, grid, arguments, _lanes(matrix))


KERNELS = TernaryKernels()


class _Words(NamedTuple):
    """A dictionary's table in the layout for kernels (`cuda/ternary.cuh`).

    Attributes:
        entries: uint32; always 2048 for FSV8, regardless of the class bits.
        longest: the longest word, in weights.
        three_slots: the layout of the entries.
    """

    entries: NDArray[np.uint32]
    longest: int
    three_slots: bool


@cache
def _words(dictionary: int | None) -> _Words:
    """Build the table of an FSV8 dictionary, or of dict16."""
    entries, class_bits, three_slots = ternary_table(dictionary)
    # The upper two bits of 0.0, of -2.0 for symbol 1 and of 2.0 for symbol 2.
    kinds = np.array([0, 3, 1, 0], np.uint32)
    symbols = [kinds[entries >> (16 + 2 * slot) & 3] for slot in range(3)]
    lengths = entries >> 24
    if three_slots:
        slots = [(entries >> (5 * slot) & 31) | symbols[slot] << 6 for slot in range(3)]
        packed = slots[0] | slots[1] << 8 | lengths << 16 | slots[2] << 24
    else:
        packed = entries & 0xFFFF | lengths << 16 | symbols[0] << 30 | symbols[1] << 28
    if class_bits == 2:
        packed = packed.repeat(2)
    return _Words(packed.astype(np.uint32), int(lengths.max()), three_slots)


def _block(dict16: bool, tokens: int, lanes: int, slots: int) -> int:
    """Threads per block: many if there is much work, but all of them run the code before the first row."""
    if tokens > 1 or dict16:
        return 768
    return 896 if slots > 1 else 512 if lanes == WARP else 768


@cache
def _program(dict16: bool, tokens: int, lanes: int, in_global: bool, slots: int = 1) -> Program:
    threads = _block(dict16, tokens, lanes, slots)
    return Program("ternary.cu", DICT16=int(dict16), TOKENS=tokens, LANES=lanes, GLOBAL=int(in_global), THREADS=threads)


def _launched(
    kernel: str, matrix: DeviceMatrix, form: _Form, slots: int, grid: int, arguments: list[Any], lanes: int
) -> None:
    """Launch a kernel; all slot counts above one use the same program."""
    key = _is_dict16(matrix), form.tokens, lanes
    program = _program(*key, form.in_global, min(slots, 2))
    program.launch(kernel, grid, _block(*key, slots), arguments, form.shared)


def _gated_form(gate: DeviceMatrix, up: DeviceMatrix, pad: int, index: Tensor) -> _Form:
    """Choose tiles of one or four tokens: the first size, in order of fewer weight reads, that fits."""
    space = device_of(gate.data).most_shared
    for tokens in _tile_sizes(index.numel(), gate.shape[0]):
        shared = _table_bytes(gate) + _table_bytes(up) + (gate.shape[2] + 2 * pad) * 4 * tokens
        if shared <= space:
            return _Form(tokens, False, 1, shared)
    return _Form(1, True, 1, _table_bytes(gate) + _table_bytes(up))


def _combine_form(matrix: DeviceMatrix, slots: int, products: int) -> _Form:
    """Stage as many tiles at once as fit beside the products."""
    experts, _, columns = matrix.shape
    pad, fixed = _pad(matrix), _table_bytes(matrix) + 4 * products
    for tokens in _tile_sizes(slots, experts):
        tile = -(-(pad + columns) * tokens // 4) * 16
        rest = device_of(matrix.data).most_shared - fixed - pad * 4 * tokens
        if rest >= tile:
            staged = min(slots, rest // tile)
            return _Form(tokens, False, staged, fixed + pad * 4 * tokens + staged * tile)
    return _Form(1, True, slots, fixed)


def _tile_sizes(slots: int, experts: int) -> tuple[int, ...]:
    """Tokens per tile, best first: four if experts have more than one or two tokens."""
    return (4, 1) if slots > 2 * min(slots, experts) else (1,)


def _is_dict16(matrix: DeviceMatrix) -> bool:
    return bool(matrix.details["code"] == "dict16")


def _numbers(matrix: DeviceMatrix) -> list[int]:
    numbers: list[int] = matrix.tables["numbers"].tolist()
    return numbers


def _table_bytes(matrix: DeviceMatrix) -> int:
    return 0 if _is_dict16(matrix) else _numbers(matrix)[0] * TABLE_BYTES


def _pad(matrix: DeviceMatrix) -> int:
    """The most columns covered by a lane's eight codes, plus the codes that overlap their start and end."""
    return -(-(9 * _numbers(matrix)[1] + 8) // 4) * 4


def _lanes(matrix: DeviceMatrix) -> int:
    """Lanes per row: a round of eight codes per lane should cover about half of the row."""
    experts, rows, _ = matrix.shape
    codes = _numbers(matrix)[2] / max(experts * rows, 1)
    return 8 if codes <= 200 else 16 if codes <= 320 else 32


def _struct(matrix: DeviceMatrix, pad: int | None = None) -> StructValue:
    """The kernels' `Matrix` structure."""
    tables, (experts, rows, columns) = matrix.tables, matrix.shape
    return _MATRIX(
        row=tables["rows"], column=tables["columns"], payload=matrix.pointer("payload"), table=tables["entries"],
        experts=experts, rows=rows, columns=columns, dictionaries=0 if _is_dict16(matrix) else _numbers(matrix)[0],
        pad=_pad(matrix) if pad is None else pad,
    )  # fmt: skip


def _launch(x: Tensor, index: Tensor | None, shared: int) -> StructValue:
    """The kernels' `Launch` structure; slots are the entries of the index, or the rows of x."""
    slots = len(x) if index is None else index.numel()
    return _LAUNCH(x=activations(x), index=index, slots=slots, shared=shared)


def _tensor(matrix: DeviceMatrix, header: NDArray[np.uint8], three_slots: int) -> StructValue:
    """The kernels' `Tensor` structure; docs/format.md, section 5, specifies the header."""
    experts, rows, columns = matrix.shape
    return _TENSOR(
        **{section: matrix.pointer(section) for section in ("levels", "index", "starts")},
        experts=experts, rows=rows, columns=columns, level_type=int(header[11]), symmetric=int(header[22]),
        wide=-(-columns // 4) > 4095, three_slots=three_slots,
    )  # fmt: skip


def _threads(count: int) -> tuple[int, int]:
    """The grid and block for a number of threads."""
    return -(-count // 128), 128

"""Products of many tokens, for formats without kernels for them (`grouped`).

Weights are decoded and multiplied by cuBLAS, in float32 for float32 activations, which are not rounded, otherwise in
bfloat16. Decoding writes as many bytes as a bfloat16 model reads, once per call instead of once per token.

On Hopper, all experts of a bfloat16 layer are decoded and multiplied at once if they fit in `DECODED_BYTES`: the host
only needs shapes, so nothing synchronizes. Otherwise the number of tokens of each expert is copied to the host, and a
few experts are decoded at a time; this cannot be captured in a CUDA graph.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moepack.backends.base import Activation
from moepack.backends.gpu.families import kernels_of
from moepack.backends.gpu.matrix import DeviceMatrix

__all__ = ["experts", "grouped", "linear"]

DECODED_BYTES = 1 << 30
"""The most bytes of decoded weights at once, unless a single expert of a layer exceeds it."""


def linear(matrix: DeviceMatrix, x: Tensor) -> Tensor:
    """Multiply x [N, C]; return [N, R] float32."""
    x = x.to(_computing(x))
    return (x @ _decoded(matrix, 0, 1, x.dtype)[0].T).float()


def experts(
    matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, weights: Tensor, activation: Activation
) -> Tensor:
    """Sum the outputs of each token's experts; arguments and result as in `Backend.experts`, on one GPU."""
    count = matrices[0].shape[0]
    flat = index.reshape(-1)
    flat = torch.where((flat >= 0) & (flat < count), flat, count)
    sorted_experts, order = flat.sort(stable=True)
    # A search finds the end of each expert's run. Counting with atomics is no faster.
    ends = torch.searchsorted(sorted_experts, torch.arange(count, device=flat.device), right=True)
    x = x.to(_computing(x))
    if all(_fits(matrix, x) for matrix in matrices):
        rows = _whole(matrices, x[order // index.shape[1]], ends.int(), activation)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        # Rows of experts that do not exist are not written.
        outputs = torch.where((flat < count).unsqueeze(1), rows[places], 0).float()
    else:
        outputs = torch.zeros((flat.numel(), matrices[-1].shape[1]), dtype=torch.float32, device=x.device)
        for run in _runs(matrices, ends.tolist(), x.dtype.itemsize):
            places = order[run.tokens]
            outputs[places] = _run(matrices, x[places // index.shape[1]], run, activation)
    shape = (*index.shape, outputs.shape[1])
    return torch.einsum("tk,tkh->th", weights, outputs.view(shape))


def grouped(matrix: DeviceMatrix, x: Tensor, offsets: Tensor) -> Tensor:
    """Multiply rows, sorted by expert; arguments and result as in `Backend.grouped`, on one GPU."""
    outputs = torch.zeros((len(x), matrix.shape[1]), dtype=torch.float32, device=x.device)
    x = x.to(_computing(x))
    for run in _runs([matrix], offsets[1:].tolist(), x.dtype.itemsize):
        outputs[run.tokens] = _product(matrix, x[run.tokens], run).float()
    return outputs


def _computing(x: Tensor) -> torch.dtype:
    """The dtype to which weights are decoded."""
    return torch.float32 if x.dtype is torch.float32 else torch.bfloat16


class _Run:
    """Consecutive experts whose weights are decoded together, with their tokens.

    Attributes:
        first: the first expert.
        ends: the end of each expert's tokens, relative to the first token of the run.
        tokens: the tokens of the run, sorted by expert.
    """

    def __init__(self, first: int, start: int, ends: Sequence[int]) -> None:
        self.first = first
        self.ends = [end - start for end in ends]
        self.tokens = slice(start, ends[-1])


def _runs(matrices: Sequence[DeviceMatrix], ends: Sequence[int], itemsize: int) -> list[_Run]:
    """Split experts into runs, without leading and trailing experts that have no tokens."""
    size = itemsize * max(rows * columns for _, rows, columns in (matrix.shape for matrix in matrices))
    most = max(1, DECODED_BYTES // size)
    starts = [0, *ends]
    runs, expert = [], 0
    while expert < len(ends):
        last = min(expert + most, len(ends))
        used = [e for e in range(expert, last) if ends[e] > starts[e]]
        if used:
            first, last = used[0], used[-1] + 1
            runs.append(_Run(first, starts[first], ends[first:last]))
        expert = last
    return runs


def _run(matrices: Sequence[DeviceMatrix], x: Tensor, run: _Run, activation: Activation) -> Tensor:
    """Compute the outputs [n, H] of a run's tokens x [n, C]."""
    first, *middle, last = matrices
    inner = activation(_product(first, x, run))
    for matrix in middle:
        inner = inner * _product(matrix, x, run)
    return _product(last, inner, run).float()


def _product(matrix: DeviceMatrix, x: Tensor, run: _Run) -> Tensor:
    """Multiply each expert's rows of x by its weights, in the dtype of x."""
    weights = _decoded(matrix, run.first, len(run.ends), x.dtype)
    if x.dtype is torch.bfloat16 and _can_group(x, weights.shape[1:]):
        ends = torch.tensor(run.ends, dtype=torch.int32, device=x.device)
        product: Tensor = torch._grouped_mm(x, weights.transpose(1, 2), offs=ends)
        return product
    starts = [0, *run.ends]
    places = [slice(start, end) for start, end in zip(starts, run.ends, strict=False)]
    return torch.cat([x[place] @ weights[expert].T for expert, place in enumerate(places)])


def _whole(matrices: Sequence[DeviceMatrix], x: Tensor, ends: Tensor, activation: Activation) -> Tensor:
    """Compute the outputs [n, H] of rows x [n, C] sorted by expert; `ends` are on the device, as by `experts`."""

    def product(matrix: DeviceMatrix, x: Tensor) -> Tensor:
        weights = _decoded(matrix, 0, matrix.shape[0], x.dtype)
        found: Tensor = torch._grouped_mm(x, weights.transpose(1, 2), offs=ends)
        return found

    first, *middle, last = matrices
    inner = activation(product(first, x))
    for matrix in middle:
        inner = inner * product(matrix, x)
    return product(last, inner)


def _fits(matrix: DeviceMatrix, x: Tensor) -> bool:
    """Whether all experts can be decoded and multiplied at once."""
    count, *sizes = matrix.shape
    small = x.dtype.itemsize * count * sizes[0] * sizes[1] <= DECODED_BYTES
    return small and matrix.data.is_cuda and x.dtype is torch.bfloat16 and _can_group(x, sizes)


def _can_group(x: Tensor, sizes: Sequence[int]) -> bool:
    """Whether torch can multiply all experts in one launch."""
    aligned = all(size % 8 == 0 for size in sizes)
    return aligned and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def _decoded(matrix: DeviceMatrix, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """Decode experts to [count, R, C]."""
    _, rows, columns = matrix.shape
    out = torch.empty((count, rows, columns), dtype=dtype, device=matrix.device)
    kernels_of(matrix.kind).dequantize(matrix, first, out)
    return out

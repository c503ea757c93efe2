"""Products of packed weights on a GPU.

For few tokens, up to `TOKENS` per call and `PAIRS` of tokens and experts, kernels of the format read the router's
tensors on the device: two launches per layer, without synchronization. More tokens use several calls while that is
faster. Other computations between the products (activations other than SiLU, no gate, biases, clamps) are torch's, with
a launch for each product (`own`). Many tokens use kernels that decode for tiles of tokens (`grouped`, `coded_layer`),
in formats that have them; otherwise, weights are decoded to bfloat16 (`prompt`).

Compute modes have no effect on GPUs; the sources in the `cuda` folder document how each format rounds activations.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from os import PathLike
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from moepack._core import PackedTensor
from moepack.arrays import as_bytes
from moepack.backends.base import Activation, Backend, Between, Matrix, is_silu
from moepack.backends.gpu import channels, coded, coded_layer, grouped, own, prompt, slots
from moepack.backends.gpu.coded_upload import lay_out
from moepack.backends.gpu.device import allocate, require
from moepack.backends.gpu.families import FAMILIES, kernels_of
from moepack.backends.gpu.layer import LayerKernels
from moepack.backends.gpu.matrix import DeviceMatrix
from moepack.backends.gpu.upload import Uploader
from moepack.errors import LoadError
from moepack.registry import OpenTensor, open_tensor

__all__ = ["PAIRS", "REARRANGED", "TOKENS", "GpuBackend", "has_kernels", "upload"]

TOKENS = 64
"""The most tokens per call for the kernels."""

PAIRS = 512
"""The most (token, expert) pairs: a block lists those of its expert in shared memory."""

CHANNELS = "channels"
"""The kind of tensors that store gate and down projections by channel."""

_FEWER = {"ternary": 8}
"""The most tokens for the kernels in linear layers, for formats in which decoding all weights is faster above that."""

_IN_CALLS = {"codebook": 4}
"""The most calls of the kernels that are faster than decoding all experts of a layer, for formats that have no kernels
for many tokens, measured on an H100 with 128 experts. A call reads the experts of its tokens."""

_FEW_CODED = 16
"""The most tokens of coded layers for the kernels of few tokens."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class GpuBackend(Backend):
    """The kernels of the `cuda` folder; matrices are `DeviceMatrix`."""

    def supports(self, device: torch.device) -> bool:
        """Whether the device is a GPU; opening a matrix raises if it cannot be used."""
        return device.type == "cuda"

    def open(self, data: Tensor, *, file: str | PathLike[str] | None = None, tensor: str | None = None) -> DeviceMatrix:
        """Open bytes on a GPU; they are copied to the host once to be validated. See `Backend.open`.

        Raises:
            DeviceError: the GPU cannot be used.
        """
        require(data.device)
        host = data.cpu()
        opened = open_tensor(host.numpy(), file=file, tensor=tensor)
        rearrange = REARRANGED.get(opened.kind)
        if rearrange and not np.array_equal(rearrange(host.numpy()), host.numpy()):
            return upload(host, Uploader(data.device), file=file, tensor=tensor)
        return _prepared(data, opened)

    def linear(self, matrix: Matrix, x: Tensor, mode: str | None) -> Tensor:
        """See `Backend.linear`."""
        weights = cast(DeviceMatrix, matrix)
        _, rows, columns = weights.shape
        x = _activations(x)
        out = torch.empty((len(x), rows), dtype=torch.float32, device=x.device)
        if not (len(x) and rows and columns):
            return out.zero_()
        with _current([weights], x):
            kernels = kernels_of(weights.kind)
            wide = x.dtype is torch.float32
            calls = kernels.linear_calls(weights) if isinstance(kernels, LayerKernels) and not wide else 1
            if len(x) > _FEWER.get(weights.kind, TOKENS * calls):
                return prompt.linear(weights, x)
            for some, to in zip(torch.split(x, TOKENS), torch.split(out, TOKENS), strict=True):
                kernels.linear(weights, some, to)
        return out

    def grouped(self, matrix: Matrix, x: Tensor, offsets: Tensor, mode: str | None) -> Tensor:
        """See `Backend.grouped`; weights are always decoded."""
        weights, x = cast(DeviceMatrix, matrix), _activations(x)
        if not (len(x) and all(weights.shape)):
            return torch.zeros((len(x), weights.shape[1]), dtype=torch.float32, device=x.device)
        with _current([weights], x):
            return prompt.grouped(weights, x, offsets)

    def experts(
        self,
        matrices: Sequence[Matrix],
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        activation: Activation,
        mode: str | None,
    ) -> Tensor:
        """See `Backend.experts`."""
        if cast(DeviceMatrix, matrices[-1]).kind == CHANNELS:
            return self.sparse_experts(matrices, x, index, weights, mode)[0]
        projections = cast(Sequence[DeviceMatrix], matrices)
        x, index, weights = _activations(x), index.long().contiguous(), weights.float().contiguous()
        rows = projections[-1].shape[1]
        if not (index.numel() and all(all(matrix.shape) for matrix in projections)):
            return torch.zeros((len(x), rows), dtype=torch.float32, device=x.device)
        with _current([*projections, index, weights], x):
            fused = has_kernels(projections, index, activation) or _in_calls(projections, x.dtype, index, activation)
            if _many(projections, x, activation, fused):
                return grouped.experts(projections, x, index, weights)
            if _many_coded(projections, x, index, activation):
                return coded_layer.experts(projections, x, index, weights)
            if not fused:
                code = Between(partial(_activated, activation), lambda outputs, _: outputs)
                found = self.own_experts(matrices, x, index, weights, code, mode)
                return prompt.experts(projections, x, index, weights, activation) if found is None else found
            if projections[-1].slots:
                return slots.experts(projections, x, index, weights)
            gate, up, down = projections
            out = torch.empty((len(x), rows), dtype=torch.float32, device=x.device)
            for some, chosen, scales, to in _calls(index, x, index, weights, out):
                hidden = torch.empty((chosen.numel(), gate.shape[1]), dtype=torch.float32, device=x.device)
                kernels_of(gate.kind).gated(gate, up, some, chosen, hidden)
                kernels_of(down.kind).combine(down, hidden, chosen, scales, to)
        return out

    def own_experts(
        self, matrices: Sequence[Matrix], x: Tensor, index: Tensor, weights: Tensor, code: Between, mode: str | None
    ) -> Tensor | None:
        """See `Backend.own_experts`; more tokens than one call of the kernels takes need those for many tokens."""
        projections = cast(Sequence[DeviceMatrix], matrices)
        x, index, weights = _activations(x), index.long().contiguous(), weights.float().contiguous()
        if not (index.numel() and all(all(matrix.shape) for matrix in projections)) or projections[-1].slots:
            return None
        with _current([*projections, index, weights], x):
            if len(x) > 1 and x.dtype is not torch.float32 and grouped.supports_own(projections):
                return grouped.experts(projections, x, index, weights, code)
            few = len(x) <= TOKENS and index.numel() <= PAIRS
            return own.experts(projections, x, index, weights, code) if few else None

    def sparse_experts(
        self, matrices: Sequence[Matrix], x: Tensor, index: Tensor, weights: Tensor, mode: str | None
    ) -> tuple[Tensor, int]:
        """See `Backend.sparse_experts`; the kernels count channels on the device, so the returned count is 0."""
        own = cast(Sequence[DeviceMatrix], matrices)
        x, index, weights = _activations(x), index.long().contiguous(), weights.float().contiguous()
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        if not (index.numel() and all(own[0].shape)):
            return out.zero_(), 0
        with _current([*own[:-1], index, weights], x):
            run: Callable[..., None] = channels.KERNELS.sparse if len(own) == 2 else channels.KERNELS.refined
            for part in _calls(index, x, index, weights, out):
                run(*own, *part)
        return out, 0


def upload(
    data: Tensor, uploader: Uploader, *, file: str | PathLike[str] | None = None, tensor: str | None = None
) -> DeviceMatrix:
    """Copy packed bytes from the CPU to a GPU, rearranging entropy-coded data.

    Args:
        data: flat uint8, possibly a read-only file map.
        uploader: the uploader of the GPU.
        file: their file, for messages.
        tensor: their name, for messages.

    Raises:
        CorruptionError: the bytes violate their format.
        LoadError: the format is unknown or has no kernels.
        DeviceMemoryError: the bytes do not fit.
        DeviceError: the GPU cannot run the kernels.
    """
    opened = open_tensor(data.numpy(), file=file, tensor=tensor)
    if opened.kind == "coded":
        packed = as_bytes(coded.packed(data.numpy()))
        with torch.cuda.device(uploader.device):
            return _prepared(lay_out(packed, opened.details(), uploader, f"'{tensor}'"), opened)
    if opened.kind not in FAMILIES:
        raise LoadError(f"a tensor of the kind '{opened.kind}' can only run on the CPU", file=file, tensor=tensor)
    place = allocate(len(data), uploader.device, f"'{tensor}'")
    uploader.copy(data, place)
    return _prepared(place, opened)


REARRANGED = {"coded": coded.uploaded}
"""Functions that convert a packed tensor's bytes to their layout on a GPU, for kinds with a different layout."""


def _prepared(data: Tensor, opened: OpenTensor) -> DeviceMatrix:
    """Create the matrix for bytes on a GPU; `opened` is a copy of them on the CPU."""
    kernels = kernels_of(opened.kind)
    sections = opened.sections() if isinstance(opened, PackedTensor) else {}
    matrix = DeviceMatrix(data, opened.shape, opened.kind, opened.format, opened.details(), sections)
    with torch.cuda.device(data.device):
        kernels.prepare(matrix)
    return matrix


def _calls(index: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors of tokens into calls that kernels can process.

    Raises:
        ValueError: the tokens of `index` [T, k] have too many experts.
    """
    if index.shape[1] > PAIRS:
        raise ValueError(f"GPU kernels support at most {PAIRS} experts per token, got {index.shape[1]}")
    few = min(TOKENS, PAIRS // index.shape[1])
    return zip(*(torch.split(tensor, few) for tensor in tensors), strict=True)


def _activated(activation: Activation, parts: list[Tensor], expert: Tensor) -> Tensor:
    """The activation of the first rows, times the others."""
    first, *others = parts
    return math.prod(others, start=activation(first))


def _activations(x: Tensor) -> Tensor:
    """Prepare activations for kernels: contiguous and aligned to 16 bytes.

    Raises:
        ValueError: the dtype is not one of three floating-point types, or the tensor is not 2-D.
    """
    if x.dtype not in _DTYPES or x.ndim != 2:
        raise ValueError(f"activations must be [tokens, columns] float32, bfloat16 or float16, got {x.dtype} {x.shape}")
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _current(needed: Sequence[Any], x: Tensor) -> AbstractContextManager[Any]:
    """A context that makes the GPU of the activations the current one.

    Raises:
        LoadError: another argument is on another device.
    """
    for other in needed:
        if other.device != x.device:
            what = "indices and weights" if isinstance(other, Tensor) else "packed weights"
            raise LoadError(f"{what} on '{other.device}' cannot be used on '{x.device}'")
    return nullcontext() if torch.cuda.current_device() == x.device.index else torch.cuda.device(x.device)


def _in_calls(matrices: Sequence[DeviceMatrix], dtype: torch.dtype, index: Tensor, activation: Activation) -> bool:
    """Whether several calls of the kernels are faster than decoding all experts; they round float32 activations."""
    tokens, choices = index.shape
    if choices > PAIRS or matrices[-1].slots or dtype is torch.float32:
        return False
    few = min(TOKENS, PAIRS // choices)
    calls = min(_IN_CALLS.get(matrix.kind, 1) for matrix in matrices)
    return tokens <= calls * few and has_kernels(matrices, index[:few], activation)


def _many(matrices: Sequence[DeviceMatrix], x: Tensor, activation: Activation, fused: bool) -> bool:
    """Whether the kernels for many tokens run a layer: where there are any, from two 16-bit tokens on.

    Slots use the others if these can run them (`fused`), because their sums follow the router's choice. For 2 to 64
    tokens of Qwen3-30B-A3B's experts on an H200, they take 0.68 to 1.01 times as long as a launch for each projection
    (int2, int3, int4, int8, 4-bit codebooks).
    """
    if fused and (len(x) == 1 or matrices[-1].slots):
        return False
    return x.dtype is not torch.float32 and is_silu(activation) and grouped.supports(matrices)


def _many_coded(matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, activation: Activation) -> bool:
    """Whether the kernels of coded integers for many tokens run a layer; they round float32 activations.

    For 64 tokens of Qwen3-30B-A3B's and Mixtral-8x7B's experts on an H200, they take 0.83 and 0.92 times as long as the
    others, for 32 tokens 0.97 and 0.88 times, for 16 tokens 1.0 and 1.13 times.
    """
    wide = len(x) <= _FEW_CODED or x.dtype is torch.float32 or matrices[-1].slots
    return not wide and is_silu(activation) and coded_layer.supports(matrices, index.numel())


def has_kernels(matrices: Sequence[DeviceMatrix], index: Tensor, activation: Any) -> bool:
    """Return whether kernels support a layer with an activation, for tokens with the experts in `index` [T, k]."""
    tokens, choices = index.shape
    few = tokens <= TOKENS and tokens * choices <= PAIRS
    gated = len(matrices) == 3 and is_silu(activation)
    return few and gated and FAMILIES[matrices[0].kind] == FAMILIES[matrices[1].kind]

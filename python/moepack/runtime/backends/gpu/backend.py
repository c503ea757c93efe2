"""Products of packed weights on a GPU.

Few tokens, up to `TOKENS` of a call and `PAIRS` of tokens with their experts, are multiplied by the kernels of the
format: two launches a layer, from the router's tensors on the device, without waiting for the device. More tokens, and
layers that the kernels do not know (another activation than SiLU, no gate, biases or clamps), go through `prompt`:
weights are decoded to bfloat16 a few experts at a time.

Compute modes mean nothing here: how each format rounds activations is said in its source in the folder `cuda`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from os import PathLike
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from moepack._core import PackedTensor
from moepack.arrays import as_bytes
from moepack.errors import LoadError
from moepack.registry import OpenTensor, open_tensor
from moepack.runtime.backends.base import Activation, Backend, Matrix, is_silu
from moepack.runtime.backends.gpu import channels, coded, prompt, slots
from moepack.runtime.backends.gpu.coded_upload import lay_out
from moepack.runtime.backends.gpu.device import allocate, require
from moepack.runtime.backends.gpu.families import FAMILIES, kernels_of
from moepack.runtime.backends.gpu.matrix import DeviceMatrix
from moepack.runtime.backends.gpu.upload import Uploader

__all__ = ["PAIRS", "REARRANGED", "TOKENS", "GpuBackend", "has_kernels", "upload"]

TOKENS = 64
"""Most tokens of a call that the kernels take."""

PAIRS = 512
"""Most pairs of a token and an expert: a block lists those of its expert in shared memory."""

CHANNELS = "channels"
"""The kind of tensors that hold gate and down projection channel by channel."""

_FEWER = {"ternary": 8}
"""Most tokens of a linear layer that kernels take, for formats where decoding all weights is faster from there on."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class GpuBackend(Backend):
    """The kernels of the folder `cuda`; matrices are `DeviceMatrix`."""

    def supports(self, device: torch.device) -> bool:
        """Whether it is a GPU, usable or not: opening a matrix says what is wrong with it."""
        return device.type == "cuda"

    def open(self, data: Tensor, *, file: str | PathLike[str] | None = None, tensor: str | None = None) -> DeviceMatrix:
        """Open bytes on a GPU, which are read back once to be checked; see `Backend.open`.

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
            if len(x) > _FEWER.get(weights.kind, TOKENS):
                return prompt.linear(weights, x)
            kernels_of(weights.kind).linear(weights, x, out)
        return out

    def grouped(self, matrix: Matrix, x: Tensor, offsets: Tensor, mode: str | None) -> Tensor:
        """See `Backend.grouped`; weights are decoded, however few the tokens."""
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
            if not has_kernels(projections, index, activation):
                return prompt.experts(projections, x, index, weights, activation)
            if projections[-1].slots:
                return slots.experts(projections, x, index, weights)
            gate, up, down = projections
            hidden = torch.empty((index.numel(), gate.shape[1]), dtype=torch.float32, device=x.device)
            out = torch.empty((len(x), rows), dtype=torch.float32, device=x.device)
            kernels_of(gate.kind).gated(gate, up, x, index, hidden)
            kernels_of(down.kind).combine(down, hidden, index, weights, out)
        return out

    def sparse_experts(
        self, matrices: Sequence[Matrix], x: Tensor, index: Tensor, weights: Tensor, mode: str | None
    ) -> tuple[Tensor, int]:
        """See `Backend.sparse_experts`; channels are counted by the kernels, so the number here is 0."""
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
    """Copy packed bytes from the CPU to a GPU, decoding or rearranging what is entropy coded.

    Args:
        data: flat uint8, maybe a read-only file map.
        uploader: of the GPU.
        file: where they come from, for messages.
        tensor: their name, for messages.

    Raises:
        CorruptionError: the bytes contradict their format.
        LoadError: their format is unknown or has no kernels.
        DeviceMemoryError: they do not fit.
        DeviceError: the GPU cannot run the kernels.
    """
    opened = open_tensor(data.numpy(), file=file, tensor=tensor)
    if opened.kind == "coded":
        packed = as_bytes(coded.packed(data.numpy()))
        with torch.cuda.device(uploader.device):
            return _prepared(lay_out(packed, opened.details(), uploader, f"'{tensor}'"), opened)
    if opened.kind not in FAMILIES:
        raise LoadError(f"a tensor of the kind '{opened.kind}' runs on the CPU alone", file=file, tensor=tensor)
    place = allocate(len(data), uploader.device, f"'{tensor}'")
    uploader.copy(data, place)
    return _prepared(place, opened)


REARRANGED = {"coded": coded.uploaded}
"""What makes the bytes for a GPU of a packed tensor's, for kinds whose bytes are others there."""


def _prepared(data: Tensor, opened: OpenTensor) -> DeviceMatrix:
    """The matrix of bytes on a GPU, of which `opened` knows a copy on the CPU."""
    kernels = kernels_of(opened.kind)
    sections = opened.sections() if isinstance(opened, PackedTensor) else {}
    matrix = DeviceMatrix(data, opened.shape, opened.kind, opened.format, opened.details(), sections)
    with torch.cuda.device(data.device):
        kernels.prepare(matrix)
    return matrix


def _calls(index: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of tokens in calls that kernels take.

    Raises:
        ValueError: a token of `index` [T, k] has too many experts.
    """
    if index.shape[1] > PAIRS:
        raise ValueError(f"a token has at most {PAIRS} experts here, not {index.shape[1]}")
    few = min(TOKENS, PAIRS // index.shape[1])
    return zip(*(torch.split(tensor, few) for tensor in tensors), strict=True)


def _activations(x: Tensor) -> Tensor:
    """Activations as kernels take them: contiguous, at a multiple of 16.

    Raises:
        ValueError: they are no floats of one of three dtypes, or have not two axes.
    """
    if x.dtype not in _DTYPES or x.ndim != 2:
        raise ValueError(f"activations must be [tokens, columns] float32, bfloat16 or float16, got {x.dtype} {x.shape}")
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _current(needed: Sequence[Any], x: Tensor) -> AbstractContextManager[Any]:
    """A context in which the GPU of the activations is the current one.

    Raises:
        LoadError: something else is on another device.
    """
    for other in needed:
        if other.device != x.device:
            what = "indices and weights" if isinstance(other, Tensor) else "packed weights"
            raise LoadError(f"{what} on '{other.device}' cannot be used on '{x.device}'")
    return nullcontext() if torch.cuda.current_device() == x.device.index else torch.cuda.device(x.device)


def has_kernels(matrices: Sequence[DeviceMatrix], index: Tensor, activation: Any) -> bool:
    """Whether kernels do a layer, with an activation, of tokens that choose as `index` [T, k] says."""
    tokens, choices = index.shape
    few = tokens <= TOKENS and tokens * choices <= PAIRS
    gated = len(matrices) == 3 and is_silu(activation)
    return few and gated and FAMILIES[matrices[0].kind] == FAMILIES[matrices[1].kind]

"""Modules that compute from packed bytes: what experts and linear layers have in common.

Invariants:
- The bytes live in uint8 buffers named after the projections: views of the mapped file after loading. Casts to another
  dtype leave them alone, they are part of `state_dict`, and nothing ever writes into them (the map is read-only).
- Inference only: a backward pass through packed weights raises.
"""

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moepack.errors import LoadError
from moepack.registry import Activations, OpenTensor, open_tensor
from moepack.runtime.compute import ComputingModule, product_mode

__all__ = ["PackedModule", "Shape", "as_numpy", "inference_only", "require_cpu"]

Shape = tuple[int, int, int]
"""Experts, rows and columns; a linear layer has one expert."""


class _InferenceOnly(torch.autograd.Function):
    """Runs the forward pass outside autograd; a backward pass raises, instead of losing the gradient."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Call `function` on the inputs."""
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Refuse."""
        raise RuntimeError("packed weights run inference only: there is no gradient through them")


def inference_only(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Call `function` on the inputs; where a gradient is asked for, the result has one that raises when it is used."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        output: torch.Tensor = _InferenceOnly.apply(function, *inputs)
        return output
    return function(*inputs)


class PackedModule(ComputingModule):
    """Buffers of packed bytes, one for each projection, and the readers of these bytes; a subclass computes."""

    projections: tuple[str, ...]

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        super().__init__()
        self.shapes = {name: shapes[name] for name in self.projections}
        self._matrices: dict[str, tuple[int, OpenTensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(buffer.numel() for buffer in self.buffers(recurse=False))

    def attach(
        self,
        projection: str,
        data: NDArray[np.uint8],
        *,
        file: str | PathLike[str] | None = None,
        tensor: str | None = None,
    ) -> None:
        """Give a projection its bytes, without copying them.

        Args:
            projection: one of `self.projections`.
            data: the blob, flat uint8, maybe a read-only file map, which must stay unchanged from here on.
            file: where the blob lies, for messages.
            tensor: its name, for messages.

        Raises:
            CorruptionError: the blob contradicts its format.
            LoadError: the blob's format is unknown, or its shape is not this module's.
        """
        matrix = open_tensor(data, file=file, tensor=tensor)
        if matrix.shape != self.shapes[projection]:
            message = f"the packed tensor is {matrix.shape}, the model's {projection} is {self.shapes[projection]}"
            raise LoadError(message, file=file, tensor=tensor)
        buffer = _as_tensor(data)
        self._buffers.pop(projection, None)
        self.register_buffer(projection, buffer)
        self._matrices[projection] = buffer.data_ptr(), matrix

    def matrix(self, projection: str) -> OpenTensor:
        """The reader of a projection, made anew where the buffer was moved or copied (`deepcopy`, `load_state_dict`).

        Raises:
            LoadError: the bytes are not there, or not on the CPU.
        """
        buffer = self._buffers.get(projection)
        if buffer is None:
            raise LoadError(f"packed weights without bytes: load the model first ({projection} is missing)")
        pointer, matrix = self._matrices.get(projection, (None, None))
        if matrix is None or pointer != buffer.data_ptr():
            require_cpu(buffer)
            self.attach(projection, buffer.numpy(), tensor=projection)
            matrix = self._matrices[projection][1]
        return matrix

    def __getstate__(self) -> dict[str, Any]:
        """Leave the readers out of copies and pickles: they borrow the buffers of this very module."""
        return {**self.__dict__, "_matrices": {}}

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        """Adopt the given bytes instead of writing them into the buffer, which may be a read-only map."""
        missing_keys, error_messages = arguments[2], arguments[4]
        for projection in self.projections:
            tensor = state_dict.get(prefix + projection)
            if tensor is None:
                missing_keys.append(prefix + projection)
                continue
            try:
                require_cpu(tensor)
                self.attach(projection, tensor.numpy(), tensor=prefix + projection)
            except (LoadError, ValueError, TypeError) as error:
                error_messages.append(f"{prefix}{projection}: {error}")

    def extra_repr(self) -> str:
        """The projections with their shapes and formats."""
        parts = []
        for name, shape in self.shapes.items():
            entry = self._matrices.get(name)
            parts.append(f"{name}={shape}" + (f" {entry[1].format}" if entry else ""))
        return ", ".join(parts)

    def _product(self, projection: str, x: torch.Tensor, offsets: NDArray[np.int64]) -> torch.Tensor:
        """Grouped product: x [N, C] float32 or bfloat16, sorted by expert, to [N, R] float32."""
        matrix = self.matrix(projection)
        return torch.from_numpy(matrix.matmul_grouped(as_numpy(x), offsets, product_mode(matrix, self.mode)))


def as_numpy(x: torch.Tensor) -> Activations:
    """View a contiguous tensor as the kernels take it: float32, or bfloat16 as uint16 bits; others become float32."""
    if x.dtype == torch.bfloat16:
        bits: NDArray[np.uint16] = x.contiguous().view(torch.uint16).numpy()
        return bits
    values: NDArray[np.float32] = x.float().contiguous().numpy()
    return values


def _as_tensor(data: NDArray[np.uint8]) -> torch.Tensor:
    """View a blob as a tensor; torch's warning about read-only arrays is moot, for nothing writes to a blob."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
        return torch.from_numpy(data)


def require_cpu(tensor: torch.Tensor) -> None:
    """Raise `LoadError` for a tensor on any other device."""
    if tensor.device.type != "cpu":
        raise LoadError(f"packed weights run on the CPU; keep the model there (a tensor is on '{tensor.device}')")

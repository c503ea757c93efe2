"""Packed matrices on a GPU, and the interface of kernel families.

The bytes on the device are those on disk: kernels read the sections of the format in place. Additional data that a
family needs (tables of starts, sums) is created once per matrix by `Kernels.prepare`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["DeviceMatrix", "Kernels", "Late"]


@dataclass(frozen=True, eq=False)
class Late:
    """Experts of a call whose bytes are still being copied.

    Attributes:
        there: [T, k] int64, the experts whose bytes have arrived; out-of-range values replace the others.
        index: the same for experts that are still being copied.
        wait: orders later launches after the copies.
    """

    there: Tensor
    index: Tensor
    wait: Callable[[], None]


@dataclass(eq=False)
class DeviceMatrix:
    """One packed projection on a GPU.

    Attributes:
        data: the packed bytes, flat uint8, aligned to 64 bytes; for `channels`, possibly in pinned host memory.
        shape: experts, rows and columns.
        kind: the format as in manifests, for example `groupwise`.
        format: the human-readable format, for example `groupwise-4bit`.
        details: properties of the format other than the shape (`_core.PackedTensor.details`).
        sections: offset and size in `data` of each section of the format (`_core.PackedTensor.sections`).
        tables: the tables created by `Kernels.prepare`, by name.
        slots: whether its experts are slots, whose indices have no meaning; sums over them then follow the order of the
            router's choice.
        late: experts that a call has to wait for; only set on first projections.
        kept: results that launches derive from the other attributes, by name, so that each is computed once.
    """

    data: Tensor
    shape: tuple[int, int, int]
    kind: str
    format: str
    details: Mapping[str, Any]
    sections: Mapping[str, tuple[int, int]]
    tables: dict[str, Tensor] = field(default_factory=dict)
    slots: bool = False
    late: Late | None = None
    kept: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, including tables."""
        return int(self.data.nbytes + sum(table.nbytes for table in self.tables.values() if table.is_cuda))

    @property
    def device(self) -> torch.device:
        """The device of the bytes."""
        return self.data.device

    def pointer(self, section: str) -> int:
        """Return the address of a section."""
        return self.data.data_ptr() + self.sections[section][0]


class Kernels(Protocol):
    """The kernels of a family of formats.

    All methods except `prepare` launch on torch's current stream of the matrix's device. They do not allocate,
    synchronize or read back, so they can be captured in a CUDA graph. `gated` and `combine` may belong to different
    families; they only share `hidden`.
    """

    def prepare(self, matrix: DeviceMatrix) -> None:
        """Compile the kernels for a matrix and create its tables; called once, before any other method."""
        ...

    def linear(self, matrix: DeviceMatrix, x: Tensor, out: Tensor) -> None:
        """Multiply x [N, C], bfloat16, float16 or float32, by the single expert; write to out [N, R] float32."""
        ...

    def gated(self, gate: DeviceMatrix, up: DeviceMatrix, x: Tensor, index: Tensor, hidden: Tensor) -> None:
        """Write silu(gate x) * (up x) for each token and each of its experts.

        Args:
            gate: [E, I, C].
            up: same family and shape; the specification may differ.
            x: [T, C], bfloat16, float16 or float32.
            index: [T, k] int64; out-of-range values are skipped.
            hidden: [T * k, I] float32; rows of skipped experts are not written.
        """
        ...

    def project(self, matrix: DeviceMatrix, x: Tensor, index: Tensor, out: Tensor) -> None:
        """Write the product for each token and each of its experts, with sums independent of other tokens and experts.

        Args:
            matrix: [E, R, C].
            x: [T, C], bfloat16, float16 or float32.
            index: [T, k] int64; out-of-range values are skipped.
            out: [T * k, R] float32; rows of skipped experts are not written.
        """
        ...

    def combine(self, down: DeviceMatrix, hidden: Tensor, index: Tensor, weights: Tensor, out: Tensor) -> None:
        """Sum the experts' outputs: out[t] = sum over j of weights[t, j] * down(hidden[t * k + j]).

        Sums are float32, in an order that depends only on the routing.

        Args:
            down: [E, H, I].
            hidden: [T * k, I], written by `gated`; rows of skipped experts are not read.
            index: [T, k] int64.
            weights: [T, k] float32.
            out: [T, H] float32; tokens without experts get zeros.
        """
        ...

    def dequantize(self, matrix: DeviceMatrix, first: int, out: Tensor) -> None:
        """Decode the experts from `first` on to out [n, R, C], bfloat16 or float32; n is the number of experts."""
        ...

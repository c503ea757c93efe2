"""Packed matrices on a GPU, and what a family of kernels does with them.

The bytes on the device are those on disk: kernels read the sections of the format where they lie. What a family needs
beside them (tables of starts, sums) it makes once a matrix, in `Kernels.prepare`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["DeviceMatrix", "Kernels", "Late"]


@dataclass(frozen=True, eq=False)
class Late:
    """Experts of a call whose bytes are on their way.

    Attributes:
        there: [T, k] int64, the experts whose bytes are there; a number that is no expert's in place of others.
        index: the same of those that are on their way.
        wait: lets what is launched from here on see their bytes.
    """

    there: Tensor
    index: Tensor
    wait: Callable[[], None]


@dataclass(eq=False)
class DeviceMatrix:
    """One packed projection on a GPU.

    Attributes:
        data: the packed bytes, uint8, flat, at a multiple of 64; of `channels` maybe in pinned memory of the host.
        shape: experts, rows and columns.
        kind: the format as manifests name it: `groupwise`.
        format: the format for people: `groupwise-4bit`.
        details: what the format says beside the shape (`_core.PackedTensor.details`).
        sections: offset and bytes in `data` of each part of the format (`_core.PackedTensor.sections`).
        tables: what `Kernels.prepare` has made, by name.
        slots: whether its experts are those of slots, whose numbers say nothing: sums over them then have the order of
            the router's choice.
        late: what a call waits for itself; only of a first projection.
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

    @property
    def nbytes(self) -> int:
        """All bytes on the device."""
        return int(self.data.nbytes + sum(table.nbytes for table in self.tables.values() if table.is_cuda))

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return self.data.device

    def pointer(self, section: str) -> int:
        """The address of a section."""
        return self.data.data_ptr() + self.sections[section][0]


class Kernels(Protocol):
    """The kernels of a family of formats.

    Every method but `prepare` launches on torch's current stream of the matrix's device, allocates nothing, waits for
    nothing and reads nothing back, so that it can be captured in a CUDA graph. `gated` and `combine` may belong to
    different families: `hidden` is all that passes between them.
    """

    def prepare(self, matrix: DeviceMatrix) -> None:
        """Compile what the matrix needs and make its tables; called once, before anything else."""
        ...

    def linear(self, matrix: DeviceMatrix, x: Tensor, out: Tensor) -> None:
        """Multiply x [N, C], bfloat16, float16 or float32, by the only expert, into out [N, R] float32."""
        ...

    def gated(self, gate: DeviceMatrix, up: DeviceMatrix, x: Tensor, index: Tensor, hidden: Tensor) -> None:
        """Write silu(gate x) * (up x) of each token and each of its experts.

        Args:
            gate: [E, I, C].
            up: of the same family and shape; maybe with another specification.
            x: [T, C], bfloat16, float16 or float32.
            index: [T, k] int64; a number that is no expert's is skipped.
            hidden: [T * k, I] float32; rows of skipped experts stay as they are.
        """
        ...

    def project(self, matrix: DeviceMatrix, x: Tensor, index: Tensor, out: Tensor) -> None:
        """Write the products of each token and each of its experts, as sums that no other token or expert changes.

        Args:
            matrix: [E, R, C].
            x: [T, C], bfloat16, float16 or float32.
            index: [T, k] int64; a number that is no expert's is skipped.
            out: [T * k, R] float32; rows of skipped experts stay as they are.
        """
        ...

    def combine(self, down: DeviceMatrix, hidden: Tensor, index: Tensor, weights: Tensor, out: Tensor) -> None:
        """Sum the experts' outputs: out[t] = sum over j of weights[t, j] * down(hidden[t * k + j]).

        Sums are float32, in an order that the routing alone determines.

        Args:
            down: [E, H, I].
            hidden: [T * k, I], what `gated` wrote; rows of skipped experts are not read.
            index: [T, k] int64.
            weights: [T, k] float32.
            out: [T, H] float32; tokens without experts get zeros.
        """
        ...

    def dequantize(self, matrix: DeviceMatrix, first: int, out: Tensor) -> None:
        """Write the values of the experts from `first` on, as many as out [n, R, C], bfloat16 or float32, holds."""
        ...

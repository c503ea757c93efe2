"""What a backend does: products of packed weights on one kind of device, torch tensors in and out.

Everything that a device needs beyond torch (arrays of the core, streams, kernels) stays behind this interface. Modules
above it, stores included, know tensors, packed matrices that only their backend looks into, and modes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from os import PathLike
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from moepack.errors import DeviceError, LoadError

__all__ = ["Activation", "Backend", "Coarse", "Matrix", "is_silu"]

Activation = Callable[[Tensor], Tensor]


class Matrix(Protocol):
    """The packed weights of one projection of a layer, opened by a backend."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts (1 for a linear layer), rows and columns."""
        ...

    @property
    def format(self) -> str:
        """Name of the format, for people."""
        ...


class Coarse(NamedTuple):
    """What coarse copies know of the channels of each token's experts, [T, k, I] float32.

    Attributes:
        gates: outputs of the gate.
        ups: outputs of the up projection; zero where a channel is not refined.
        inner: silu(gate) * up, what the down projection multiplies.
    """

    gates: Tensor
    ups: Tensor
    inner: Tensor


class Backend(ABC):
    """Products on one kind of device; products accumulate in float32."""

    @abstractmethod
    def supports(self, device: torch.device) -> bool:
        """Whether tensors of a device can be multiplied."""

    @abstractmethod
    def open(self, data: Tensor, *, file: str | PathLike[str] | None = None, tensor: str | None = None) -> Matrix:
        """Open packed bytes, flat uint8 on a supported device; they are neither copied nor changed.

        Args:
            data: the bytes.
            file: where they come from, for messages.
            tensor: their name, for messages.

        Raises:
            CorruptionError: the bytes contradict their format.
            LoadError: their format is unknown.
        """

    @abstractmethod
    def linear(self, matrix: Matrix, x: Tensor, mode: str | None) -> Tensor:
        """Multiply x [N, C], float32, bfloat16 or float16, by one expert, to [N, R] float32.

        Args:
            matrix: the weights.
            x: the activations.
            mode: a compute mode, or None for that of the process.
        """

    def grouped(self, matrix: Matrix, x: Tensor, offsets: Tensor, mode: str | None) -> Tensor:
        """Multiply rows, sorted by expert, by their experts' matrices.

        Args:
            matrix: the weights of E experts.
            x: [N, C], float32, bfloat16 or float16.
            offsets: [E + 1] int64, where each expert's rows begin; the last is at most N.
            mode: as in `linear`.

        Returns:
            [N, R] float32; zero for rows behind the last expert's.

        Raises:
            LoadError: the device has no such product.
        """
        raise LoadError(
            "experts that compute more than act(gate x) * up x between their products (biases, clamps, norms) do not "
            f"run on '{x.device}'"
        )

    def transposed(self, matrix: Matrix, y: Tensor, offsets: Tensor | None) -> Tensor:
        """Multiply by the transposed weights, which gives the gradient of a product's activations; CPU only.

        Args:
            matrix: the weights, whose values are those of `dequantize` whatever a compute mode rounds them to.
            y: [N, R], float32, bfloat16 or float16, sorted by expert.
            offsets: as in `grouped`; None for one expert.

        Returns:
            [N, C] float32; zero for rows behind the last expert's.

        Raises:
            DeviceError: the device has no such product.
            LoadError: the format has none.
        """
        raise DeviceError(f"gradients pass through packed weights on the CPU only, a tensor is on '{y.device}'")

    @abstractmethod
    def experts(
        self,
        matrices: Sequence[Matrix],
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        activation: Activation,
        mode: str | None,
    ) -> Tensor:
        """Sum the outputs of each token's experts, in an order that depends on the routing alone.

        Args:
            matrices: gate, up and down projection, for down(activation(gate x) * up x); or two, for
                second(activation(first x)).
            x: [T, H], float32, bfloat16 or float16.
            index: [T, k], the chosen experts; a number that is no expert's is skipped.
            weights: [T, k], what their outputs are multiplied by.
            activation: between the projections.
            mode: as in `linear`.

        Returns:
            [T, H] float32.
        """

    def sparse_experts(
        self, matrices: Sequence[Matrix], x: Tensor, index: Tensor, weights: Tensor, mode: str | None
    ) -> tuple[Tensor, int]:
        """Sum the outputs of each token's experts, of which only some channels are computed; see `SparseExperts`.

        Args:
            matrices: up projections and records of channels; or coarse gate, up and down projections, and records of
                what finer values add to gate and down, see `RefinedExperts`.
            x: [T, H], float32, bfloat16 or float16.
            index: [T, k], the chosen experts; a number that is no expert's is skipped.
            weights: [T, k], what their outputs are multiplied by.
            mode: as in `linear`, of what is no record.

        Returns:
            [T, H] float32, and how many channels were computed, or refined, over all tokens and their experts.

        Raises:
            DeviceError: the device has no such products.
        """
        raise DeviceError("experts of which some channels are computed run on the CPU")

    def wanted_channels(
        self,
        matrices: Sequence[Matrix],
        x: Tensor,
        index: Tensor,
        mode: str | None,
        weights: Tensor | None = None,
        deciding: Tensor | None = None,
    ) -> Tensor:
        """Decide which channels of each token's experts are computed from records; errors as of `sparse_experts`.

        Args:
            matrices: as of `sparse_experts`, or of `coarse_channels`.
            x, index, mode: as of `sparse_experts`.
            weights: as of `sparse_experts`; coarse copies decide by them.
            deciding: [T, H], what decides in place of `x`, which the outputs are still of.

        Returns:
            [T, k, I] float32, the outputs of the up projection; zero where a channel is skipped.
        """
        raise DeviceError("experts of which some channels are computed run on the CPU")

    def coarse_channels(
        self,
        matrices: Sequence[Matrix],
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        mode: str | None,
        deciding: Tensor | None = None,
    ) -> Coarse:
        """Compute what coarse copies know of all channels, and decide which are refined; see `RefinedExperts`.

        Args:
            matrices: coarse gate, up and down projections, and records of what finer values add to gate and down.
            x, index, weights, mode: as of `sparse_experts`.
            deciding: as of `wanted_channels`.

        Raises:
            DeviceError: the device has no such products.
        """
        raise DeviceError("experts of which some channels are refined run on the CPU")

    def refined_channels(
        self, records: Matrix, x: Tensor, index: Tensor, weights: Tensor, coarse: Coarse, ups: Tensor
    ) -> tuple[Tensor, int]:
        """Refine channels; arguments and errors as of `coarse_channels`.

        Args:
            records: what finer values add.
            x, index, weights: of the call.
            coarse: what `coarse_channels` gave; its `inner` becomes that of the refined channels.
            ups: its `ups`, or a part of them.

        Returns:
            [T, H] float32, what the records' down columns add to the outputs, and how many channels were refined.
        """
        raise DeviceError("experts of which some channels are refined run on the CPU")

    def coarse_outputs(self, down: Matrix, coarse: Coarse, index: Tensor, weights: Tensor, mode: str | None) -> Tensor:
        """Sum the outputs [T, H] of each token's experts by the coarse down projection, from all channels' `inner`."""
        raise DeviceError("experts of which some channels are refined run on the CPU")

    def sparse_channels(
        self, records: Matrix, x: Tensor, index: Tensor, weights: Tensor, ups: Tensor
    ) -> tuple[Tensor, int]:
        """Sum the outputs of each token's experts as `sparse_experts`, by what `wanted_channels` gave for `ups`."""
        raise DeviceError("experts of which some channels are computed run on the CPU")


def is_silu(activation: Activation) -> bool:
    """Whether an activation is SiLU, of which transformers has a class of its own beside torch's."""
    return activation is functional.silu or type(activation).__name__ in ("SiLU", "SiLUActivation")

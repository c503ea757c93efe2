"""The backend interface: products of packed weights on one kind of device, with torch tensors in and out.

Everything that a device needs beyond torch (arrays of the core, streams, kernels) is hidden behind this interface.
Code above it, including stores, only handles tensors, modes, and packed matrices that are opaque outside their backend.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from os import PathLike
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from moepack.errors import DeviceError, LoadError

__all__ = ["Activation", "Backend", "Between", "Clamped", "Coarse", "Matrix", "is_silu"]

Activation = Callable[[Tensor], Tensor]


class Matrix(Protocol):
    """The packed weights of one projection of a layer, opened by a backend."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts (1 for a linear layer), rows and columns."""
        ...

    @property
    def format(self) -> str:
        """The human-readable name of the format."""
        ...


class Clamped(NamedTuple):
    """Experts with a clamped gate: down((clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)), g = min(gate, limit).

    Attributes:
        gate_bias: [E, 2 I], added to gate and up, or None.
        bias: [E, H], added to the outputs, or None.
        takes_turns: whether the biases of gate and up alternate; otherwise those of up follow those of gate.
    """

    alpha: float
    limit: float
    gate_bias: Tensor | None
    bias: Tensor | None
    takes_turns: bool


class Between(NamedTuple):
    """What experts compute between and behind their products, on rows of tokens and experts.

    Attributes:
        between: returns the inputs [N, I] of the last product, given the outputs [N, I] of the others, float32, and the
            expert of each row, [N] int64.
        behind: returns the outputs [N, H], given those of the last product, and the experts.
        clamped: the parameters, if both compute a clamped gate and biases, for which a device may have kernels.
    """

    between: Callable[[list[Tensor], Tensor], Tensor]
    behind: Callable[[Tensor, Tensor], Tensor]
    clamped: Clamped | None = None


class Coarse(NamedTuple):
    """Results from coarse copies for the channels of each token's experts, [T, k, I] float32.

    Attributes:
        gates: outputs of the gate projection.
        ups: outputs of the up projection; zero for channels that are not refined.
        inner: silu(gate) * up, the input of the down projection.
    """

    gates: Tensor
    ups: Tensor
    inner: Tensor


class Backend(ABC):
    """Products on one kind of device, accumulated in float32."""

    @abstractmethod
    def supports(self, device: torch.device) -> bool:
        """Whether tensors on a device can be multiplied."""

    @abstractmethod
    def open(self, data: Tensor, *, file: str | PathLike[str] | None = None, tensor: str | None = None) -> Matrix:
        """Open packed bytes, flat uint8 on a supported device, without copying or changing them.

        Args:
            data: the bytes.
            file: their file, for messages.
            tensor: their name, for messages.

        Raises:
            CorruptionError: the bytes violate their format.
            LoadError: the format is unknown.
        """

    @abstractmethod
    def linear(self, matrix: Matrix, x: Tensor, mode: str | None) -> Tensor:
        """Multiply x [N, C], float32, bfloat16 or float16, by a single-expert matrix; return [N, R] float32.

        Args:
            matrix: the weights.
            x: the activations.
            mode: a compute mode; None selects the mode of the process.
        """

    def grouped(self, matrix: Matrix, x: Tensor, offsets: Tensor, mode: str | None) -> Tensor:
        """Multiply rows, sorted by expert, by the matrices of their experts.

        Args:
            matrix: the weights of E experts.
            x: [N, C], float32, bfloat16 or float16.
            offsets: [E + 1] int64, the first row of each expert; the last is at most N.
            mode: as in `linear`.

        Returns:
            [N, R] float32; zero for rows after the last expert's.

        Raises:
            LoadError: the device does not support this product.
        """
        raise LoadError(
            "experts that compute more than act(gate x) * up x between their products (biases, clamps, norms) do not "
            f"run on '{x.device}'"
        )

    def transposed(self, matrix: Matrix, y: Tensor, offsets: Tensor | None) -> Tensor:
        """Multiply by the transposed weights, which yields the gradient of a product's activations; CPU only.

        Args:
            matrix: the weights; their values are those of `dequantize`, regardless of rounding by the compute mode.
            y: [N, R], float32, bfloat16 or float16, sorted by expert.
            offsets: as in `grouped`; None for one expert.

        Returns:
            [N, C] float32; zero for rows after the last expert's.

        Raises:
            DeviceError: the device does not support this product.
            LoadError: the format does not support it.
        """
        raise DeviceError(f"gradients through packed weights require the CPU, but a tensor is on '{y.device}'")

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
        """Sum the outputs of each token's experts, in an order that depends only on the routing.

        Args:
            matrices: gate, up and down projections for down(activation(gate x) * up x), or two matrices for
                second(activation(first x)).
            x: [T, H], float32, bfloat16 or float16.
            index: [T, k], the chosen experts; out-of-range values are skipped.
            weights: [T, k], the routing weights.
            activation: applied between the projections.
            mode: as in `linear`.

        Returns:
            [T, H] float32.
        """

    def own_experts(
        self, matrices: Sequence[Matrix], x: Tensor, index: Tensor, weights: Tensor, code: Between, mode: str | None
    ) -> Tensor | None:
        """Sum the outputs of each token's experts, which have code of their own.

        Args:
            matrices: the projections; all but the last multiply the tokens.
            x, index, weights, mode: as in `experts`.
            code: called for rows in any order; some may belong to no token.

        Returns:
            [T, H] float32; None if the device computes these products only for rows sorted by expert (`grouped`).
        """
        return None

    def sparse_experts(
        self, matrices: Sequence[Matrix], x: Tensor, index: Tensor, weights: Tensor, mode: str | None
    ) -> tuple[Tensor, int]:
        """Sum the outputs of each token's experts, computing only some of their channels; see `SparseExperts`.

        Args:
            matrices: up projections and channel records; or coarse gate, up and down projections, and records of the
                difference between fine and coarse gate and down values (`RefinedExperts`).
            x: [T, H], float32, bfloat16 or float16.
            index: [T, k], the chosen experts; out-of-range values are skipped.
            weights: [T, k], the routing weights.
            mode: as in `linear`, for products without records.

        Returns:
            [T, H] float32, and the number of computed or refined channels over all tokens and their experts.

        Raises:
            DeviceError: the device does not support these products.
        """
        raise DeviceError("experts that compute only some of their channels require the CPU")

    def wanted_channels(
        self,
        matrices: Sequence[Matrix],
        x: Tensor,
        index: Tensor,
        mode: str | None,
        weights: Tensor | None = None,
        deciding: Tensor | None = None,
    ) -> Tensor:
        """Select the channels of each token's experts to compute from records; errors as in `sparse_experts`.

        Args:
            matrices: as in `sparse_experts` or `coarse_channels`.
            x, index, mode: as in `sparse_experts`.
            weights: as in `sparse_experts`; used in the selection by coarse copies.
            deciding: [T, H], inputs for the selection instead of `x`; outputs still use `x`.

        Returns:
            [T, k, I] float32, the outputs of the up projection; zero for skipped channels.
        """
        raise DeviceError("experts that compute only some of their channels require the CPU")

    def coarse_channels(
        self,
        matrices: Sequence[Matrix],
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        mode: str | None,
        deciding: Tensor | None = None,
    ) -> Coarse:
        """Compute all channels from coarse copies, and select those to refine; see `RefinedExperts`.

        Args:
            matrices: coarse gate, up and down projections, and records of the difference to fine gate and down values.
            x, index, weights, mode: as in `sparse_experts`.
            deciding: as in `wanted_channels`.

        Raises:
            DeviceError: the device does not support these products.
        """
        raise DeviceError("experts that refine some of their channels require the CPU")

    def refined_channels(
        self, records: Matrix, x: Tensor, index: Tensor, weights: Tensor, coarse: Coarse, ups: Tensor
    ) -> tuple[Tensor, int]:
        """Refine channels; errors as in `coarse_channels`.

        Args:
            records: the differences between fine and coarse values.
            x, index, weights: the arguments of the call.
            coarse: the result of `coarse_channels`; its `inner` is updated for refined channels.
            ups: its `ups`, or a part of them.

        Returns:
            [T, H] float32, the contribution of the records' down columns, and the number of refined channels.
        """
        raise DeviceError("experts that refine some of their channels require the CPU")

    def coarse_outputs(self, down: Matrix, coarse: Coarse, index: Tensor, weights: Tensor, mode: str | None) -> Tensor:
        """Sum the outputs [T, H] of each token's experts by the coarse down projection of all channels' `inner`."""
        raise DeviceError("experts that refine some of their channels require the CPU")

    def sparse_channels(
        self, records: Matrix, x: Tensor, index: Tensor, weights: Tensor, ups: Tensor
    ) -> tuple[Tensor, int]:
        """Sum the outputs of each token's experts like `sparse_experts`, with `ups` from `wanted_channels`."""
        raise DeviceError("experts that compute only some of their channels require the CPU")


def is_silu(activation: Activation) -> bool:
    """Return whether an activation is SiLU; transformers has its own class in addition to torch's."""
    return activation is functional.silu or type(activation).__name__ in ("SiLU", "SiLUActivation")

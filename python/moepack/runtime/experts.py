"""Expert modules that compute from packed bytes: they stand where transformers has its own experts modules.

`PackedExperts` replaces the standard layout (`gate_up_proj`, `down_proj`, called with top-k indices and weights), and
`PackedSwitchExperts` the `ModuleDict` of Switch Transformers (called with a one-hot mask). Both sort the tokens by
expert, so that each expert's bytes are decoded once a call whatever the number of its tokens, and multiply all experts
in one call of the kernel.

Invariants:
- The bytes live in uint8 buffers named after the projections: views of the mapped file after loading. Casts to another
  dtype leave them alone, they are part of `state_dict`, and nothing ever writes into them (the map is read-only).
- Products accumulate in float32, and so does the sum over a token's experts, in an order that depends on the routing
  alone: the same input gives the same output, whatever the number of threads.
- Inference only: a backward pass through the experts raises.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from moepack.errors import LoadError
from moepack.runtime.matrix import Activations, PackedMatrix, open_matrix

__all__ = ["PackedExperts", "PackedSwitchExperts", "Routing", "sort_by_expert"]

Shape = tuple[int, int, int]


class Routing(NamedTuple):
    """Token and expert pairs in the order of the experts.

    Attributes:
        order: [N], the positions in the flattened [T, k] index, sorted by expert, sentinels left out.
        offsets: [E + 1], where each expert's run starts in `order`; the last is N.
    """

    order: NDArray[np.int64]
    offsets: NDArray[np.int64]


def sort_by_expert(index: NDArray[np.int64], experts: int) -> Routing:
    """Sort a flat array of expert numbers, stably; numbers >= `experts` are sentinels and are dropped."""
    offsets = np.zeros(experts + 1, np.int64)
    np.cumsum(np.bincount(index, minlength=experts)[:experts], out=offsets[1:])
    order = index.argsort(kind="stable")[: offsets[-1]]
    return Routing(order, offsets)


class _InferenceOnly(torch.autograd.Function):
    """Runs the forward pass outside autograd; a backward pass raises, instead of losing the experts' gradient."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Call `function` on the inputs."""
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Refuse."""
        raise RuntimeError("packed experts run inference only: there is no gradient through them")


class _PackedModule(nn.Module, ABC):
    """Buffers of packed bytes, one for each projection, and the matrices that read them."""

    projections: tuple[str, ...]

    def __init__(self, shapes: Mapping[str, Shape], act_fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.shapes = {name: shapes[name] for name in self.projections}
        self.num_experts = next(iter(self.shapes.values()))[0]
        self.act_fn = act_fn
        self._matrices: dict[str, tuple[int, PackedMatrix]] = {}

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
        matrix = open_matrix(data, file=file, tensor=tensor)
        if matrix.shape != self.shapes[projection]:
            message = f"the packed tensor is {matrix.shape}, the model's {projection} is {self.shapes[projection]}"
            raise LoadError(message, file=file, tensor=tensor)
        buffer = _as_tensor(data)
        self._buffers.pop(projection, None)
        self.register_buffer(projection, buffer)
        self._matrices[projection] = buffer.data_ptr(), matrix

    def matrix(self, projection: str) -> PackedMatrix:
        """The reader of a projection, made anew where the buffer was moved or copied (`deepcopy`, `load_state_dict`).

        Raises:
            LoadError: the bytes are not there, or not on the CPU.
        """
        buffer = self._buffers.get(projection)
        if buffer is None:
            raise LoadError(f"packed experts without bytes: load the model first ({projection} is missing)")
        pointer, matrix = self._matrices.get(projection, (None, None))
        if matrix is None or pointer != buffer.data_ptr():
            _require_cpu(buffer)
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
                _require_cpu(tensor)
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
        return torch.from_numpy(self.matrix(projection).matmul_grouped(_as_numpy(x), offsets))

    @abstractmethod
    def _experts(self, x: torch.Tensor, offsets: NDArray[np.int64]) -> torch.Tensor:
        """Run the experts: x [N, H], sorted by expert, to [N, H] float32."""

    def _forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Route, run and sum: hidden_states [T, H], index and weights [T, k], to [T, H] in the input's dtype."""
        _require_cpu(hidden_states)
        tokens, top_k = index.shape
        positions, offsets = sort_by_expert(index.reshape(-1).numpy(), self.num_experts)
        weights = weights.float().contiguous()
        if tokens == 1:
            outputs = self._experts(hidden_states.expand(len(positions), -1), offsets)
            return torch.mm(weights.take(torch.from_numpy(positions)).unsqueeze(0), outputs).to(hidden_states.dtype)
        rows = torch.from_numpy(positions // top_k)
        outputs = self._experts(hidden_states.index_select(0, rows), offsets)
        return _weighted_sum(outputs, positions, weights).to(hidden_states.dtype)

    def _run(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and (hidden_states.requires_grad or weights.requires_grad):
            output: torch.Tensor = _InferenceOnly.apply(self._forward, hidden_states, index, weights)
            return output
        return self._forward(hidden_states, index, weights)


class PackedExperts(_PackedModule):
    """Experts with a gate: down(act(gate(x)) * up(x)), as in Mixtral, Qwen, DeepSeek, OLMoE, Phi-MoE and GraniteMoE.

    Args:
        shapes: (E, R, C) of `gate_proj` and `up_proj` (E, I, H) and `down_proj` (E, H, I).
        act_fn: the activation of the module that is replaced.
    """

    projections = ("gate_proj", "up_proj", "down_proj")

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Sum the chosen experts' outputs.

        Args:
            hidden_states: [T, H], float32, bfloat16 or float16, on the CPU.
            top_k_index: [T, k], the chosen experts; a number >= E is skipped.
            top_k_weights: [T, k], floating point.

        Returns:
            [T, H] in the dtype of `hidden_states`.
        """
        return self._run(hidden_states, top_k_index, top_k_weights)

    def _experts(self, x: torch.Tensor, offsets: NDArray[np.int64]) -> torch.Tensor:
        x = x.contiguous()
        gated = self.act_fn(self._product("gate_proj", x, offsets))
        return self._product("down_proj", gated.mul_(self._product("up_proj", x, offsets)), offsets)


class PackedSwitchExperts(_PackedModule):
    """The experts of Switch Transformers: wo(act(wi(x))), one expert a token.

    Args:
        shapes: (E, R, C) of `wi` (E, d_ff, d_model) and `wo` (E, d_model, d_ff).
        act_fn: the activation of the module that is replaced.
    """

    projections = ("wi", "wo")

    def forward(
        self, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weigh the chosen experts' outputs.

        Args:
            hidden_states: [T, H], float32, bfloat16 or float16, on the CPU.
            selected_experts: [T, 1, E] one-hot; a token beyond its expert's capacity has no one and yields zeros.
            routing_weights: [T, 1].

        Returns:
            [T, H] in the dtype of `hidden_states`.
        """
        chosen, index = selected_experts.max(dim=-1)
        index = torch.where(chosen > 0, index, self.num_experts)
        return self._run(hidden_states, index, routing_weights)

    def _experts(self, x: torch.Tensor, offsets: NDArray[np.int64]) -> torch.Tensor:
        return self._product("wo", self.act_fn(self._product("wi", x, offsets)), offsets)


def _weighted_sum(outputs: torch.Tensor, positions: NDArray[np.int64], weights: torch.Tensor) -> torch.Tensor:
    """Sum each token's outputs.

    An embedding bag gathers and sums in one pass, a third of the time of putting the rows back in order first.

    Args:
        outputs: [N, H] float32, in the order of the experts.
        positions: [N], where each row belongs in the flattened [T, k].
        weights: [T, k] float32.

    Returns:
        [T, H]; what no row belongs to counts as zero.
    """
    count, total = len(positions), weights.numel()
    rows = np.full(total, count, np.int64)
    rows[positions] = np.arange(count)
    if count < total:
        outputs = functional.pad(outputs, (0, 0, 0, 1))
    bags = torch.from_numpy(rows).view(weights.shape)
    return functional.embedding_bag(bags, outputs, mode="sum", per_sample_weights=weights)


def _as_numpy(x: torch.Tensor) -> Activations:
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


def _require_cpu(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise LoadError(f"packed experts run on the CPU; keep the model there (a tensor is on '{tensor.device}')")
